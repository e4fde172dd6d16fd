"""Every error that leaves rsrv: a gRPC code, a machine-readable reason and a message. Nobody matches on the text."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class Code(IntEnum):
    """The gRPC status codes, with their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @property
    def http_status(self) -> int:
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 412,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}

REASON_METADATA_KEY = "rsrv-reason"
"""Trailing metadata key that carries `RsrvError.reason` on gRPC answers."""

SELECTED_METADATA_KEY = "rsrv-selected"
"""Trailing metadata key that carries `ExpectedMismatch.selected` on gRPC answers."""

FAILOVER_METADATA_KEY = "x-rsrv-failover"
"""Request metadata key by which a gateway says that another worker may answer if this one refuses."""


class RsrvError(Exception):
    """Base of all errors of rsrv.

    Attributes:
        code: gRPC status code.
        reason: machine-readable reason, sent as trailing metadata ``rsrv-reason``.
        message: what happened: it names the tensor, model, file or key, the value, and what was wanted.
        hint: how the user can fix it, or None.
        exit_code: what a command that ends with this error returns to the shell.
        trailers: what a gRPC answer carries as trailing metadata besides the reason.
    """

    code: Code = Code.INTERNAL
    reason: str = "internal"
    exit_code: int = 1
    trailers: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, message: str, *, hint: str | None = None, code: Code | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code
        if reason is not None:
            self.reason = reason


# --- request path -------------------------------------------------------------------------------------------------


class InvalidRequest(RsrvError):
    code, reason = Code.INVALID_ARGUMENT, "invalid"


class InvalidResponse(RsrvError):
    """A server's answer is not a message of the protocol, or its bytes do not fit its headers."""

    code, reason = Code.INTERNAL, "bad_response"


class UnknownModel(RsrvError):
    code, reason = Code.NOT_FOUND, "unknown_model"


class UnknownWorker(RsrvError):
    """A gateway has no worker of that address or name."""

    code, reason = Code.NOT_FOUND, "unknown_worker"


class ModelPreparing(RsrvError):
    code, reason = Code.UNAVAILABLE, "preparing"


class ModelFailed(RsrvError):
    code, reason = Code.UNAVAILABLE, "failed"


class ModelUnloaded(RsrvError):
    code, reason = Code.NOT_FOUND, "unloaded"


class NotResident(RsrvError):
    """The weights are not on the device, and only an operator or gateway may bring them there."""

    code, reason = Code.UNAVAILABLE, "not_resident"


class WeightsUnavailable(RsrvError):
    """The weights of a model that serves could not be brought to the device again.

    Not the code of a `BundleError`: clients take FAILED_PRECONDITION as a sign that their shared memory is not known.
    """

    code, reason = Code.UNAVAILABLE, "weights_unavailable"


class ResidencyRefused(RsrvError):
    """Weights are not moved by hand on this server: it has no budget for them, or it moves them itself."""

    code, reason = Code.FAILED_PRECONDITION, "residency"


class AdmissionClosed(RsrvError):
    """The gate of the model is closed: it is being drained, or was."""

    code, reason = Code.UNAVAILABLE, "admission_closed"


class HeldFull(RsrvError):
    """As many requests, admin calls and event streams wait already as may."""

    code, reason = Code.RESOURCE_EXHAUSTED, "held_full"


class Removing(RsrvError):
    """The model is being removed, and the request waited for it."""

    code, reason = Code.NOT_FOUND, "removing"


class QueueFull(RsrvError):
    code, reason = Code.RESOURCE_EXHAUSTED, "queue_full"


class Shed(RsrvError):
    code, reason = Code.RESOURCE_EXHAUSTED, "shed"


class ServerStopping(RsrvError):
    code, reason = Code.UNAVAILABLE, "stopping"


class DeadlineExceeded(RsrvError):
    code, reason = Code.DEADLINE_EXCEEDED, "deadline"


class PoolAcquireTimeout(DeadlineExceeded):
    """The deadline passed while a request waited for room in a pool of buffers.

    Attributes:
        span: how many adjacent slots it waited for.
        waited: seconds that it waited.
    """

    reason = "pool_timeout"

    def __init__(self, span: int, waited: float) -> None:
        slots = "slot" if span == 1 else f"{span} adjacent slots"
        super().__init__(
            f"no {slots} of the buffer pool came free in {waited:.3g} s",
            hint="give the pool more slots (client_init(n_slots=…)), or the request more time",
        )
        self.span = span
        self.waited = waited


class PoolWithdrawn(RsrvError):
    """A pool of buffers will never again have so many adjacent slots to lend: make another one."""

    code, reason = Code.RESOURCE_EXHAUSTED, "pool_withdrawn"


class Cancelled(RsrvError):
    code, reason = Code.CANCELLED, "cancelled"


class HookRejected(RsrvError):
    """Raised by a hook on purpose, for bad client data; the message reaches the client."""

    code, reason = Code.INVALID_ARGUMENT, "hook_rejected"


class HookError(RsrvError):
    code, reason = Code.INTERNAL, "hook_error"


class UnregisteredRegion(RsrvError):
    """A tensor names a shared-memory region that the server does not hold.

    The text keeps the phrase that older clients recognise even behind a proxy that rewrites the status.
    """

    code, reason = Code.FAILED_PRECONDITION, "shm_unregistered"

    def __init__(self, region: str) -> None:
        super().__init__(
            f"unregistered shared memory region {region!r}", hint="register the region with this server and send again"
        )
        self.region = region


class ShmUnrecoverable(RsrvError):
    """A server does not keep our shared memory: registering it again failed, or did not help."""

    code, reason = Code.FAILED_PRECONDITION, "shm_unrecoverable"


class RegionLimit(RsrvError):
    code, reason = Code.RESOURCE_EXHAUSTED, "shm_limit"


class RegistrationFailed(RsrvError):
    """Not all workers of a gateway could register a shared-memory region, so that none of them has it now."""

    code, reason = Code.FAILED_PRECONDITION, "shm_register"


class DeviceError(RsrvError):
    """The device or its runtime failed while it ran a program."""

    code, reason = Code.INTERNAL, "device"


class DeviceOutOfMemory(DeviceError):
    code, reason = Code.RESOURCE_EXHAUSTED, "device_oom"


class DeviceLost(DeviceError):
    """The device, or this process's hold on it, is gone: nothing runs on it any more before a restart."""

    code, reason = Code.UNAVAILABLE, "device_lost"


class Unimplemented(RsrvError):
    code, reason = Code.UNIMPLEMENTED, "unimplemented"


# --- administration -----------------------------------------------------------------------------------------------


class WrongState(RsrvError):
    """The model, or the server, is not in a state that allows the operation; the reason says which it is."""

    code, reason = Code.FAILED_PRECONDITION, "wrong_state"


class NoWorkers(RsrvError):
    """The gateway has no worker that is ready, and what was asked for needs one."""

    code, reason = Code.UNAVAILABLE, "no_workers"


class GatewayLoop(RsrvError):
    """A call has come back to a gateway that it had passed: gateways list each other, or themselves, as workers."""

    code, reason = Code.UNAVAILABLE, "gateway_loop"


class NameTaken(RsrvError):
    code, reason = Code.ALREADY_EXISTS, "name_taken"


class IncarnationChanged(RsrvError):
    """A compare-and-set failed: the name belongs to another incarnation now."""

    code, reason = Code.ABORTED, "incarnation_changed"


class ExpectedMismatch(RsrvError):
    """A compare-and-set failed: another program set is selected. `selected` is which."""

    code, reason = Code.ABORTED, "expected_mismatch"

    def __init__(self, message: str, *, selected: int) -> None:
        super().__init__(message)
        self.selected = selected

    @property
    def trailers(self) -> Mapping[str, str]:  # type: ignore[override]
        return {SELECTED_METADATA_KEY: str(self.selected)}


class CapacityFull(RsrvError):
    """A bound of the administration is reached; the reason says which (`model_capacity`, `program_capacity`)."""

    code, reason = Code.RESOURCE_EXHAUSTED, "capacity"


class WaitTimeout(RsrvError):
    """What an admin call waits for did not happen in time."""

    code, reason = Code.DEADLINE_EXCEEDED, "wait_timeout"


class Unauthenticated(RsrvError):
    code, reason = Code.UNAUTHENTICATED, "unauthenticated"


class ForeignOrigin(RsrvError):
    """An administrative call that a web page of another origin may have sent from the user's own browser."""

    code, reason = Code.PERMISSION_DENIED, "foreign_origin"


# --- bundles and programs -----------------------------------------------------------------------------------------


class BundleError(RsrvError):
    """A bundle, or a file of it, is not what it has to be; `rule` is the violated rule ("B-18") or None."""

    code, reason = Code.FAILED_PRECONDITION, "bundle"

    def __init__(
        self, message: str, *, rule: str | None = None, file: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.rule = rule
        self.file = file


class ManifestError(BundleError):
    reason = "manifest"


class WeightsError(BundleError):
    reason = "weights"


class DigestMismatch(BundleError):
    reason = "digest"


class SignatureMismatch(BundleError):
    """A program's entry function does not take or return what manifest and weights declare."""

    reason = "signature"


class ParityMismatch(BundleError):
    """The programs of a bundle do not compute what the framework computed."""

    reason = "parity"


class ProgramError(BundleError):
    """A program cannot be read or compiled; also when the process that tried it died or ran out of time."""

    reason = "program"


class CompileProcessError(RsrvError):
    """The processes that compile programs cannot be started or do not live long enough to take a job."""

    code, reason = Code.INTERNAL, "compile_process"


class CacheError(RsrvError):
    """The directory of the executable cache, or an entry of it, cannot be used."""

    code, reason = Code.FAILED_PRECONDITION, "cache"


class ExportError(RsrvError):
    code, reason = Code.INVALID_ARGUMENT, "export"


# --- commands -----------------------------------------------------------------------------------------------------


class UsageError(RsrvError):
    code, reason, exit_code = Code.INVALID_ARGUMENT, "usage", 2


class IOMismatch(UsageError):
    """What an IO sends or reads is not what the model takes or gives; the message lists everything that was found.

    Attributes:
        findings: the same one by one, warnings included.
    """

    reason = "io_mismatch"

    def __init__(self, message: str, *, findings: tuple[object, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.findings = findings


class ServerUnreachable(RsrvError):
    code, reason, exit_code = Code.UNAVAILABLE, "unreachable", 3


class TlsFailed(ServerUnreachable):
    """Client and server do not agree on a TLS connection; another attempt ends the same."""

    reason = "tls"


class ConfigError(RsrvError):
    code, reason, exit_code = Code.INVALID_ARGUMENT, "config", 78


class PortTaken(ConfigError):
    reason = "port_taken"
