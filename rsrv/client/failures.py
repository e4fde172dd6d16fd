"""From a failed gRPC call to the `RsrvError` that the server meant: by reason first, by status code otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from rsrv.core import errors
from rsrv.core.errors import REASON_METADATA_KEY, Code, RsrvError

_BY_REASON: dict[str, type[RsrvError]] = {
    kind.reason: kind
    for kind in (
        errors.InvalidRequest,
        errors.UnknownModel,
        errors.ModelPreparing,
        errors.ModelFailed,
        errors.ModelUnloaded,
        errors.NotResident,
        errors.WeightsUnavailable,
        errors.QueueFull,
        errors.Shed,
        errors.ServerStopping,
        errors.DeadlineExceeded,
        errors.Cancelled,
        errors.HookRejected,
        errors.HookError,
        errors.UnregisteredRegion,
        errors.RegionLimit,
        errors.DeviceError,
        errors.DeviceOutOfMemory,
        errors.ResidencyRefused,
        errors.Unimplemented,
    )
}
_BY_CODE: dict[Code, type[RsrvError]] = {
    Code.INVALID_ARGUMENT: errors.InvalidRequest,
    Code.NOT_FOUND: errors.UnknownModel,
    Code.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    Code.CANCELLED: errors.Cancelled,
    Code.UNIMPLEMENTED: errors.Unimplemented,
    Code.UNAVAILABLE: errors.ServerUnreachable,
}
_STALE_REGION = "unregistered shared memory region"


def from_rpc_error(error: grpc.RpcError, target: str) -> RsrvError:
    """The error that `error`, raised by a call to `target`, stands for; `reason` is "" when the server gave none."""
    code = Code(error.code().value[0])
    text = error.details() or code.name
    reason = _reason(error)
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, RsrvError)
    if _STALE_REGION in text:
        kind = errors.UnregisteredRegion
    if kind is errors.ServerUnreachable:
        return errors.ServerUnreachable(
            f"no answer from {target}: {text}", hint="is the server running, and is this its gRPC port?"
        )
    if kind is errors.DeadlineExceeded and not reason:
        return errors.DeadlineExceeded(f"no answer from {target} before the deadline")
    failure = kind.__new__(kind)  # some of the classes build their message from other arguments
    RsrvError.__init__(failure, text, code=code, reason=reason or None)
    if not reason and kind is RsrvError:
        failure.reason = ""
    return failure


def answered_by_server(error: RsrvError) -> bool:
    """True when the server has finished with the request: it sent this error, and not because time ran out."""
    return not isinstance(error, (errors.DeadlineExceeded, errors.Cancelled, errors.ServerUnreachable))


def _reason(error: grpc.RpcError) -> str:
    trailers: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in trailers:
        if key == REASON_METADATA_KEY:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""
