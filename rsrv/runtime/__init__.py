"""Compile and run programs on one device, and compile untrusted ones in processes that may die."""

import os

from rsrv._lazy import attach

# Read when jaxlib is loaded: without it every client that is created writes INFO lines to stderr.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Buffer": ".device",
        "CacheDirectory": ".cache_directory",
        "CompileOptions": ".device",
        "CompilePool": ".compile_pool",
        "Compiled": ".compiled",
        "Device": ".device",
        "Executable": ".device",
        "ExecutableCache": ".cache",
        "FakeDevice": ".fake",
        "Launch": ".device",
        "MemoryStats": ".device",
        "PjrtDevice": ".pjrt",
        "execute": ".device",
        "open_cache": ".cache",
        "open_device": ".backends",
    },
)
