"""Other executables for the weights of a model: staged beside those that serve, tried in their shadow, and selected."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ProgramList": ".records",
        "ProgramSet": ".records",
        "ProgramSets": ".sets",
        "Selected": ".records",
        "ShadowRecord": ".compare",
    },
)
