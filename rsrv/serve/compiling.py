"""Where a worker compiles programs, and where it keeps executables: processes, options, the cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rsrv.runtime import CompileOptions, CompilePool, ExecutableCache, open_cache
from rsrv.runtime.backends import cuda_plugin_installed
from rsrv.runtime.fingerprint import fingerprint
from rsrv.runtime.options import compile_options
from rsrv.runtime.probe import require_usable_flags, require_usable_options
from rsrv.serve.loading import LoadProgress, ProgramSource

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.runtime.device import Device


class Compiling:
    """Opened before the device, because processes are started before anything that does not survive that.

    Attributes:
        pool: the processes.
        cache: None when nothing is kept; known when the device is (`follow`).
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises CompileProcessError, ConfigError for flags that XLA does not take."""
        self._config = config
        self._platform = expected_platform(config.runtime.backend)
        self._options = CompileOptions()
        self.cache: ExecutableCache | None = None
        self.pool = self._open_pool()
        try:
            require_usable_flags(self.pool)
        except BaseException:
            self.pool.close()
            raise

    def _open_pool(self) -> CompilePool:
        runtime = self._config.runtime
        return CompilePool(
            workers=runtime.compile_workers,
            timeout_seconds=runtime.compile_timeout_seconds,
            memory_bytes=runtime.compile_memory_bytes,
            platform=self._platform,
            cpu_threads=runtime.cpu_threads,
            ordinal=runtime.device_ordinal,
            awake=not self._config.cache_dir,
        )

    def follow(self, device: Device) -> None:
        """Compile for `device`. Raises ConfigError for options that XLA does not take, CacheError."""
        if device.platform != self._platform:
            # CUDA was expected and the CPU came.
            self.pool.close()
            self._platform = device.platform
            self.pool = self._open_pool()
        config, runtime = self._config, self._config.runtime
        self._options = compile_options(
            runtime.xla_options,
            platform=device.platform,
            autotune=runtime.autotune,
            autotune_cache=runtime.autotune_cache,
            autotune_cache_dir=runtime.autotune_cache_dir,
        )
        if config.cache_dir:
            self.cache = open_cache(config.cache_dir, fingerprint(device), config.cache_max_bytes)
        if self.cache is None or self.cache.empty:
            self.pool.wake()
        require_usable_options(self.pool, self._options, self.cache)

    def source(self, device: Device, progress: LoadProgress, require_running: Callable[[], None]) -> ProgramSource:
        """Where executables come from; `require_running` raises when the server stops."""
        return ProgramSource(
            device=device,
            pool=self.pool,
            cache=self.cache,
            options=self._options,
            progress=progress,
            require_running=require_running,
        )


def expected_platform(backend: str) -> str:
    """Which platform `open_device` will give, unless CUDA turns out not to work."""
    if backend == "auto":
        return "cuda" if cuda_plugin_installed() else "cpu"
    return backend
