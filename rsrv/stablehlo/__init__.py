"""Programs at rest: read, describe and write StableHLO modules."""

import os

from rsrv._lazy import attach

# Read when jaxlib is loaded: without it every client that is created writes INFO lines to stderr.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "DEFAULT_VERSION": ".artifact",
        "Policy": ".policy",
        "Prepared": ".program",
        "ProgramReport": ".signature",
        "ProgramSignature": ".signature",
        "TensorType": ".signature",
        "artifact_version": ".artifact",
        "apply": ".policy",
        "element_type": ".signature",
        "inspect_module": ".program",
        "numpy_dtype": ".signature",
        "parse": ".program",
        "prepare": ".program",
        "readable_versions": ".artifact",
        "report": ".program",
        "serialize": ".artifact",
        "specialised": ".specialise",
        "tf32_capable": ".policy",
        "tensor_type": ".signature",
    },
)
