"""rsrv: export models to StableHLO bundles and serve many of them per device over KServe V2."""

from rsrv._lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "HookRejected": ".core.errors",
        "RsrvError": ".core.errors",
    },
)
