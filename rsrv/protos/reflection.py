"""Messages of ``grpc.reflection.v1``; those of v1alpha are the same bytes, and in `reflection_v1alpha`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.protos.generated.reflection_v1 import *  # noqa: F403
else:
    from rsrv.protos import symbols

    globals().update(symbols("reflection/reflection_v1.proto"))
    del symbols
