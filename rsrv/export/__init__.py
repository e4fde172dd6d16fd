"""Front ends: from a model in Python to a bundle on disk. Never imported by the server or the client."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ExportOptions": ".options",
        "Factory": ".factory",
        "InputSpec": ".specs",
        "call_factory": ".factory",
        "export_bundle": ".bundle",
        "load_factory": ".factory",
        "parse_input_spec": ".specs",
        "parse_variant_spec": ".specs",
    },
)
