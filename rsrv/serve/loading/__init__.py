"""From a bundle's directory to a model that serves: opening, compiling or finding in the cache, placing, warming up."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "DigestWatch": ".digests",
        "LoadProgress": ".progress",
        "Loader": ".loader",
        "ProgramSource": ".programs",
        "Warmup": ".warmup",
        "prepare_checks": ".checks",
    },
)
