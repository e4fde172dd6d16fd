"""From a failed gRPC call to the `RsrvError` that the server meant: by reason first, by status code otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from rsrv.core import errors
from rsrv.core.errors import REASON_METADATA_KEY, SELECTED_METADATA_KEY, Code, RsrvError

_BY_REASON: dict[str, type[RsrvError]] = {
    kind.reason: kind
    for kind in (
        errors.InvalidRequest,
        errors.UnknownModel,
        errors.UnknownWorker,
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
        errors.AdmissionClosed,
        errors.HeldFull,
        errors.Removing,
        errors.NoWorkers,
        errors.UnknownWorker,
        errors.NameTaken,
        errors.IncarnationChanged,
        errors.ExpectedMismatch,
        errors.WaitTimeout,
        errors.Unauthenticated,
    )
}
_CAPACITIES = ("model_capacity", "program_capacity")
_BUNDLES = {
    kind.reason
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, (errors.BundleError, errors.CacheError))
}
"""Reasons of errors that are made from more than a text; a client gets them as `RsrvError`."""
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
    kind = _kind(code, reason)
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
    if isinstance(failure, errors.ExpectedMismatch):
        selected = _trailer(error, SELECTED_METADATA_KEY)
        failure.selected = int(selected) if selected.isdigit() else 0
    if not reason and kind is RsrvError:
        failure.reason = ""
    return failure


def _kind(code: Code, reason: str) -> type[RsrvError]:
    """A reason names one type, but those of `WrongState` are many, and some of them others use with another code."""
    kind = _BY_REASON.get(reason)
    if code is Code.FAILED_PRECONDITION and reason and (kind is None or kind.code is not code):
        return RsrvError if reason in _BUNDLES else errors.WrongState
    if reason in _CAPACITIES:
        return errors.CapacityFull
    return kind or _BY_CODE.get(code, RsrvError)


def answered_by_server(error: RsrvError) -> bool:
    """True when the server has finished with the request: it sent this error, and not because time ran out."""
    return not isinstance(error, (errors.DeadlineExceeded, errors.Cancelled, errors.ServerUnreachable))


def _reason(error: grpc.RpcError) -> str:
    return _trailer(error, REASON_METADATA_KEY)


def _trailer(error: grpc.RpcError, wanted: str) -> str:
    trailers: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in trailers:
        if key == wanted:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""
