"""Messages of ``grpc.reflection.v1alpha``, for clients that ask for the older name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.protos.generated.reflection_v1alpha import *  # noqa: F403
else:
    from rsrv.protos import symbols

    globals().update(symbols("reflection/reflection_v1alpha.proto"))
    del symbols
