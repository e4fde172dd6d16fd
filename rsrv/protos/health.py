"""Messages of ``grpc.health.v1``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.protos.generated.health import *  # noqa: F403
else:
    from rsrv.protos import symbols

    globals().update(symbols("health/health.proto"))
    del symbols
