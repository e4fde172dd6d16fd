"""Messages of the package ``rsrv.admin.v1``: the administration of a worker."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.protos.generated.rsrv_admin import *  # noqa: F403
else:
    from rsrv.protos import symbols

    globals().update(symbols("admin/rsrv_admin.proto"))
    del symbols
