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
        errors.RegistrationFailed,
        errors.DeviceError,
        errors.DeviceLost,
        errors.DeviceOutOfMemory,
        errors.ResidencyRefused,
        errors.Unimplemented,
        errors.AdmissionClosed,
        errors.HeldFull,
        errors.Removing,
        errors.NoWorkers,
        errors.GatewayLoop,
        errors.NameTaken,
        errors.IncarnationChanged,
        errors.ExpectedMismatch,
        errors.WaitTimeout,
        errors.Unauthenticated,
    )
}
STALE_REGION = "unregistered shared memory region"
"""What servers say, under any status, about a region that they do not hold."""
TOO_LARGE = "larger than max"
"""What gRPC says on both sides about a message above a limit. It gives the code of an overload and will never pass."""
_SIZE_HINT = (
    "send fewer rows in one request, or raise max_send_message_length and max_receive_message_length here "
    "and grpc.max_recv_msg_bytes and grpc.max_send_msg_bytes at the server"
)
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
_PEM_HINT = "root_certificates, client_cert and client_key have to be PEM, and the key has to be the certificate's"
_TLS_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": "does root_certificates hold the authority that signed the server's certificate?",
    "Hostname Verification": "call the server by a name for which its certificate was made",
    "is not in peer certificate": "call the server by a name for which its certificate was made",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS here: write grpc:// instead of grpcs://",
    "Failed to create security handshaker": _PEM_HINT,
}
"""By what gRPC says when it gives up a handshake. A text that is not here is only a lost connection."""


def from_rpc_error(error: grpc.RpcError, target: str) -> RsrvError:
    """The error that `error`, raised by a call to `target`, stands for; `reason` is "" when the server gave none."""
    code = Code(error.code().value[0])
    text = error.details() or code.name
    reason = _reason(error)
    kind = _kind(code, reason)
    if STALE_REGION in text:
        kind = errors.UnregisteredRegion
    if kind is errors.ServerUnreachable:
        return _unreachable(text, target)
    if kind is errors.DeadlineExceeded and not reason:
        return errors.DeadlineExceeded(f"no answer from {target} before the deadline")
    failure = kind.__new__(kind)  # some of the classes build their message from other arguments
    too_large = code is Code.RESOURCE_EXHAUSTED and not reason and TOO_LARGE in text
    RsrvError.__init__(failure, text, code=code, reason=reason or None, hint=_SIZE_HINT if too_large else None)
    if isinstance(failure, errors.ExpectedMismatch):
        selected = _trailer(error, SELECTED_METADATA_KEY)
        failure.selected = int(selected) if selected.isdigit() else 0
    if not reason and kind is RsrvError:
        failure.reason = ""
    return failure


def _unreachable(text: str, target: str) -> RsrvError:
    for said, hint in _TLS_HINTS.items():
        if said in text:
            return errors.TlsFailed(f"no TLS connection to {target}: {text}", hint=hint)
    hint = "is the server running, and is this its gRPC port?"
    if "Socket closed" in text:
        hint += " Does it want TLS (grpcs://), or a certificate of the client?"
    return errors.ServerUnreachable(f"no answer from {target}: {text}", hint=hint)


def _kind(code: Code, reason: str) -> type[RsrvError]:
    """A reason names one type, but those of `WrongState` are many, and some of them others use with another code."""
    kind = _BY_REASON.get(reason)
    if code is Code.FAILED_PRECONDITION and reason and (kind is None or kind.code is not code):
        return RsrvError if reason in _BUNDLES else errors.WrongState
    if reason in _CAPACITIES:
        return errors.CapacityFull
    if code is Code.UNAVAILABLE and kind is None and reason not in ("", errors.ServerUnreachable.reason):
        return RsrvError  # somebody did answer, with a reason of its own
    return kind or _BY_CODE.get(code, RsrvError)


def answered_by_server(error: RsrvError) -> bool:
    """True when the server has finished with the request: it sent this error, and not because time ran out.

    Or never had it, without a TLS connection.
    """
    if isinstance(error, errors.TlsFailed):
        return True
    if error.code in (Code.INTERNAL, Code.UNKNOWN) and error.reason in ("", "worker"):
        return False  # perhaps the transport's own words, about a stream that broke off; "worker": at a gateway
    return not isinstance(error, (errors.DeadlineExceeded, errors.Cancelled, errors.ServerUnreachable))


def _reason(error: grpc.RpcError) -> str:
    return _trailer(error, REASON_METADATA_KEY)


def _trailer(error: grpc.RpcError, wanted: str) -> str:
    trailers: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in trailers:
        if key == wanted:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""
