"""Which operation is allowed in which state of a registration, as one table of plain data (spec worker 11.5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rsrv.core.errors import WrongState
from rsrv.serve.registry import Entry, ModelState

OperationName = Literal[
    "drain", "undrain", "activate", "deactivate", "pin", "stage", "select", "remove", "retry", "unregister"
]

YES = ""
"""It is done."""
NO_OP = "no-op"
"""It is answered with the present state, and nothing is done."""

_ORDER = (
    ModelState.REGISTERED,
    ModelState.PREPARING,
    ModelState.READY,
    ModelState.FAILED,
    ModelState.RETIRING,
    ModelState.RELEASE_FAILED,
)
_ROWS: Mapping[OperationName, tuple[str, str, str, str, str, str]] = {
    # what is not YES or NO_OP is the reason of the refusal
    # operation: registered, preparing, ready, failed, retiring, release_failed
    "drain": (YES, YES, YES, NO_OP, "removing", "removing"),
    "undrain": (YES, YES, YES, "failed", "removing", "removing"),
    "activate": (YES, YES, YES, "failed", "removing", "removing"),
    "deactivate": (NO_OP, "operation_pending", YES, "failed", "removing", "removing"),
    "pin": (YES, YES, YES, "failed", "removing", "removing"),
    "stage": ("not_ready", "not_ready", YES, "failed", "removing", "removing"),
    "select": ("not_ready", "not_ready", YES, "failed", "removing", "removing"),
    "remove": ("not_ready", "not_ready", YES, "failed", "removing", "removing"),
    "retry": ("not_failed", "not_failed", "not_failed", YES, "removing", YES),
    "unregister": (YES, YES, YES, YES, YES, YES),
}
MATRIX: Mapping[OperationName, Mapping[ModelState, str]] = {
    operation: dict(zip(_ORDER, cells, strict=True)) for operation, cells in _ROWS.items()
}

_VERBS: Mapping[OperationName, str] = {
    "drain": "drained",
    "undrain": "undrained",
    "activate": "activated",
    "deactivate": "deactivated",
    "pin": "pinned or unpinned",
    "stage": "given other programs",
    "select": "switched to other programs",
    "remove": "changed in its programs",
    "retry": "tried again",
    "unregister": "unregistered",
}
_HINTS = {
    "failed": "`rsrv ctl retry` prepares it again",
    "not_ready": "`rsrv ctl wait` waits until it is",
    "operation_pending": "`rsrv ctl wait` waits until it is ready",
    "not_failed": "only a model that failed is tried again",
}


def verdict(operation: OperationName, entry: Entry) -> str:
    """YES or NO_OP; raises WrongState where the table has the reason of a refusal."""
    cell = MATRIX[operation][entry.state]
    if cell in (YES, NO_OP):
        return cell
    state = "being removed" if cell == "removing" else entry.state.value
    why = f" ({entry.failure})" if cell == "failed" and entry.failure is not None else ""
    raise WrongState(
        f"model {entry.name!r} is {state}{why}, so it cannot be {_VERBS[operation]}",
        reason=cell,
        hint=_HINTS.get(cell),
    )
