"""Messages of the package ``reactant_control``: the control plane of workers and gateway."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.protos.generated.rsrv_control import *  # noqa: F403
else:
    from rsrv.protos import symbols

    globals().update(symbols("control/rsrv_control.proto"))
    del symbols
