"""What an executable depends on besides its program: the machine, the libraries and the variables that change code."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rsrv.runtime.device import Device

_VARIABLES = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
_CPU_FACTS = ("model name", "flags", "Features", "CPU implementer", "CPU part")

Fingerprint = Mapping[str, str]


def fingerprint(device: Device, environ: Mapping[str, str] = os.environ) -> Fingerprint:
    """Facts by name. An executable may be used where all of them are what they were where it was compiled.

    Native code for a CPU is compiled for the features of the machine and for the number of threads of its client.
    """
    facts = {"platform": device.platform, "device": device.kind, **device.facts}
    if device.platform == "fake":
        return facts
    facts["jaxlib"] = _jaxlib_version()
    facts.update({name: environ[name] for name in _VARIABLES if environ.get(name)})
    if device.platform == "cpu":
        facts["cpu"] = cpu_features()
        facts["threads"] = environ.get("NPROC") or environ.get("PJRT_NPROC") or str(len(os.sched_getaffinity(0)))
    else:
        facts["driver"] = _driver_version()
    return facts


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model and the features of the first processor: the architecture and a digest of all.

    Where they cannot be read, the name of the machine takes their place, since code for another processor may end a
    process.
    """
    facts: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            if name.strip() in _CPU_FACTS:
                facts[name.strip()] = " ".join(sorted(value.split()))
    except OSError:
        facts["node"] = os.uname().nodename
    facts["machine"] = os.uname().machine
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16]
    return f"{facts['machine']} {digest}"


def _jaxlib_version() -> str:
    if find_spec("jaxlib") is None:
        return "none"
    from jaxlib.version import __version__

    return str(__version__)


def _driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"
