"""``rsrv env``: what a bug report needs to know about this machine."""

from __future__ import annotations

import os
import sys

from rsrv.cli import output

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "grpcio",
    "protobuf",
    "pydantic",
    "typer",
    "safetensors",
    "aiohttp",
    "jax",
    "jaxlib",
    "torch",
    "torchax",
    "flax",
    "equinox",
)


def env(as_json: output.JsonOption = False) -> None:
    """Print versions and devices for a bug report.

    No device is opened, and secrets in the environment are not shown.

    Example:
        rsrv env --json
    """
    facts = collect()
    if output.is_json():
        output.json(facts)
        return
    output.table("rsrv environment", ["what", "value"], list(facts.items()))


def collect() -> dict[str, str | int | None]:
    """The facts, cheap ones only: no device is opened."""
    import platform

    facts: dict[str, str | int | None] = {
        "rsrv": _version("rsrv"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpus": os.cpu_count(),
        "cpus usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory bytes": _memory_bytes(),
        "nvidia driver": _nvidia_driver(),
        "nvidia devices": _nvidia_devices(),
        "stablehlo": _stablehlo_versions(),
    }
    facts.update({name: _version(name) for name in _PACKAGES})
    facts.update({name: _shown(name) for name in sorted(os.environ) if name.startswith(("RSRV_", "JAX_", "XLA_"))})
    return facts


def _shown(name: str) -> str:
    """The value of an environment variable, unless its name says that it is a secret: reports are pasted in public."""
    secret = any(word in name for word in ("TOKEN", "SECRET", "PASSWORD", "KEY"))
    return "(set)" if secret else os.environ[name]


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _nvidia_driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip().removeprefix("NVRM version:").strip()
    except OSError:
        return None


def _nvidia_devices() -> int:
    """Device nodes, counted without loading CUDA."""
    try:
        return sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
    except OSError:
        return 0


def _stablehlo_versions() -> str | None:
    """The StableHLO versions that the installed jaxlib reads."""
    try:
        from rsrv.stablehlo.artifact import readable_versions

        oldest, newest = readable_versions()
    except ImportError:
        return None
    return f"{oldest} to {newest}"
