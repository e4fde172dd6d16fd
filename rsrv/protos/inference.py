"""Messages of the package ``inference``: KServe V2 and the extensions that we share with Triton."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.protos.generated.grpc_predict_v2 import *  # noqa: F403
    from rsrv.protos.generated.model_config import *  # noqa: F403
else:
    from rsrv.protos import symbols

    globals().update(symbols("inference/model_config.proto", "inference/grpc_predict_v2.proto"))
    del symbols
