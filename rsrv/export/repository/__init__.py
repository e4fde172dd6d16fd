"""A whole model repository as bundles: what to convert, each model in a process of its own, and a report about it."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ConversionReport": ".report",
        "ConversionResult": ".report",
        "ConvertConfig": ".config",
        "HandlerContext": ".handlers",
        "TritonModel": ".triton",
        "TritonTensor": ".triton",
        "WorkItem": ".worklist",
        "convert_repository": ".convert",
        "load_convert_config": ".config",
        "plan": ".worklist",
        "read_triton_model": ".triton",
        "select": ".worklist",
    },
)
