"""Which device a server gets: `open_device` turns the keys of the ``runtime`` section into a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec

from rsrv.core.errors import ConfigError, DeviceError
from rsrv.runtime.device import Device

logger = logging.getLogger(__name__)

_CUDA_PLUGINS = ("xla_cuda13", "xla_cuda12")


def open_device(
    backend: str = "auto",
    *,
    ordinal: int = 0,
    mem_fraction: float = 0.9,
    preallocate: bool = True,
    allow_cpu_fallback: bool = True,
    cpu_threads: int | None = None,
    fake_seconds_per_row: float = 0.0,
    fake_memory_bytes: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Device:
    """Open the device that `backend` names.

    ``auto`` is CUDA when its plugin is installed and a client can be created, else CPU. ``cuda`` (alias ``gpu``) falls
    back to CPU with a warning while `allow_cpu_fallback` holds. `cpu_threads` sets the variable ``NPROC`` of this
    process, which XLA reads when its client is made; compile processes have to get the same number. A fake device with
    `fake_memory_bytes` is a card.

    Raises:
        ConfigError: unknown backend, ``fake`` without ``RSRV_ALLOW_FAKE=1``, or ``cuda`` without its plugin.
        DeviceError: the client cannot be created, or there is no device `ordinal`.
    """
    if backend == "fake":
        require_fake_allowed(environ)
        from rsrv.runtime.fake import FakeDevice

        return FakeDevice(
            seconds_per_row=fake_seconds_per_row, memory_bytes=fake_memory_bytes, unified=fake_memory_bytes is None
        )
    if backend not in ("auto", "cpu", "cuda", "gpu"):
        raise ConfigError(f"runtime.backend is {backend!r}, wanted auto, cpu, cuda or fake")
    if cpu_threads is not None:
        os.environ["NPROC"] = str(cpu_threads)

    from rsrv.runtime.pjrt import PjrtDevice

    if backend == "cpu":
        return PjrtDevice("cpu", ordinal=ordinal)
    if not cuda_plugin_installed():
        if backend == "auto":
            return PjrtDevice("cpu")
        if not allow_cpu_fallback:
            raise ConfigError(
                "runtime.backend is cuda, but no CUDA plugin is installed", hint="pip install 'rsrv[cuda]'"
            )
        logger.warning("cuda_unavailable fallback=cpu reason=%r", "no CUDA plugin is installed")
        return PjrtDevice("cpu")
    try:
        return PjrtDevice("cuda", ordinal=ordinal, mem_fraction=mem_fraction, preallocate=preallocate)
    except DeviceError as error:
        if backend != "auto" and not allow_cpu_fallback:
            raise
        logger.warning("cuda_unavailable fallback=cpu reason=%r", error.message)
        return PjrtDevice("cpu")


def require_fake_allowed(environ: Mapping[str, str] = os.environ) -> None:
    """A fake device answers with nonsense, so a server takes it only when the environment says that it is a test."""
    if environ.get("RSRV_ALLOW_FAKE") != "1":
        raise ConfigError("runtime.backend is fake, which only tests may use", hint="set RSRV_ALLOW_FAKE=1")


def cuda_plugin_installed() -> bool:
    """Whether jax's CUDA plugin can be imported; does not import it."""
    try:
        return any(find_spec(f"jax_plugins.{plugin}") is not None for plugin in _CUDA_PLUGINS)
    except ModuleNotFoundError:
        return False
