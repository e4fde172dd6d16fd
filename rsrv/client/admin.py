"""The administration of a worker: register, drain, warm, cool, replace and remove its models while it serves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import grpc

from rsrv.client import admin_answers as answers
from rsrv.client.admin_answers import Change, Event, Operation, Program, Programs, Reclaim, Selected
from rsrv.client.connection import MAX_TIMEOUT_SECONDS, Handle, Metadata, bearer, message_of
from rsrv.client.control import Floor
from rsrv.core.errors import DeadlineExceeded, InvalidResponse, UsageError

SERVICE = "/rsrv.admin.v1.AdminService/"
REPLY_SECONDS = 10.0
"""What a call that waits on the server has beyond that wait."""

Until = Literal["idle", "drained", "ready", "gone"]


class Admin(Handle):
    """The administration of one worker by its URL. See `KServeModel` for the options.

    `timeout` bounds each call, in seconds, 60 by default, at most a day; those that wait on the server have what they
    wait for beside it. `token` is the bearer token of a server with ``endpoints.admin_token_file``; over a connection
    without TLS everybody on the way can read it.

    All methods raise UnknownModel, WrongState (its `reason` says which), IncarnationChanged when `if_incarnation` is
    given and is not the model's any more, Unauthenticated, and Unimplemented where administration is off.
    """

    _service = SERVICE
    _default_timeout = 60.0
    _max_timeout = MAX_TIMEOUT_SECONDS

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float | None = None,
        secure: bool | None = None,
        root_certificates: bytes | None = None,
        client_key: bytes | None = None,
        client_cert: bytes | None = None,
        metadata: Metadata = (),
        channel: grpc.Channel | None = None,
    ) -> None:
        if token is not None:
            metadata = (*metadata, *bearer(token))
        super().__init__(
            url,
            timeout=timeout,
            secure=secure,
            root_certificates=root_certificates,
            client_key=client_key,
            client_cert=client_cert,
            metadata=metadata,
            channel=channel,
        )

    # --- what is there ----------------------------------------------------------------------------------------------

    def status(self, model: str = "") -> dict[str, Any]:
        """The document that docs/status.md describes; with `model` only that one's row in ``models``."""
        found = _object(self._ask("GetStatus", "StatusRequest", "StatusResponse", model=model).json)
        _rows(found, "models")
        return found

    def models(self) -> list[dict[str, Any]]:
        """The prepared models: tensors, batch sizes, gate."""
        return _rows(_object(self._ask("ListModels", "Empty", "ListModelsResponse").json), "models")

    # --- registration and admission ---------------------------------------------------------------------------------

    def register(
        self,
        model: str,
        directory: str,
        *,
        admission: Literal["open", "drained"] = "open",
        residency: Floor | None = None,
        weight: float | None = None,
        max_batch_size: int | None = None,
        pinned: bool = False,
    ) -> Operation:
        """Serve the bundle in `directory`, a path on the server's machine, under a name; it is prepared meanwhile.

        With `admission` drained only its manifest is read, until `undrain` or `activate`. Raises NameTaken,
        CapacityFull, or InvalidRequest for a directory that the server may not serve from.
        """
        request: dict[str, Any] = {
            "directory": directory,
            "admission": admission,
            "residency": residency,
            "weight": weight,
            "max_batch_size": max_batch_size,
            "pinned": pinned,
        }
        return self._operation("RegisterModel", "RegisterRequest", model=model, **request)

    def retry(self, model: str, *, if_incarnation: int = 0) -> Operation:
        """Prepare a failed model again, or try again to free what could not be freed."""
        return self._operation("RetryModel", "Target", model=model, if_incarnation=if_incarnation)

    def drain(self, model: str, *, wait: float = 0.0, if_incarnation: int = 0) -> Operation:
        """Let no new request in. Answers when the gate has changed, or, after `wait` seconds at most, when the requests
        that were accepted have been answered."""
        target = _target(model, if_incarnation)
        return self._operation("DrainModel", "DrainRequest", extra=wait, t=target, wait_ms=_ms(wait))

    def undrain(self, model: str, *, if_incarnation: int = 0) -> Operation:
        """Let requests in, those that are held first; a model that was only registered is prepared before."""
        return self._operation("UndrainModel", "Target", model=model, if_incarnation=if_incarnation)

    def unregister(
        self, model: str, *, mode: Literal["drain", "abort"] = "drain", if_incarnation: int = 0
    ) -> Operation:
        """Remove a model: `drain` answers what was accepted first, `abort` refuses it. See `wait` for the end."""
        return self._operation("UnregisterModel", "UnregisterRequest", t=_target(model, if_incarnation), mode=mode)

    def wait(self, model: str, until: Until, *, timeout: float, if_incarnation: int = 0) -> Operation:
        """Wait up to `timeout` seconds until a model is `idle`, `drained`, `ready` or `gone`. Raises WaitTimeout."""
        target = _target(model, if_incarnation)
        return self._operation(
            "WaitModel", "WaitRequest", extra=timeout, t=target, until=until, timeout_ms=_ms(timeout)
        )

    # --- weights ----------------------------------------------------------------------------------------------------

    def activate(self, model: str, *, allow_open: bool = False, if_incarnation: int = 0) -> Operation:
        """Bring the weights to the device and run each program once, behind a closed gate unless `allow_open`."""
        target = _target(model, if_incarnation)
        return self._operation("ActivateModel", "ActivateRequest", t=target, allow_open=allow_open)

    def deactivate(self, model: str, *, host: bool = False, if_incarnation: int = 0) -> Operation:
        """Free the weights on the device, with `host` also those in host memory; programs stay."""
        return self._operation("DeactivateModel", "DeactivateRequest", t=_target(model, if_incarnation), host=host)

    def pin(self, model: str, *, if_incarnation: int = 0) -> Operation:
        """Never evict its weights once they are on the device."""
        return self._operation("PinModel", "Target", model=model, if_incarnation=if_incarnation)

    def unpin(self, model: str, *, if_incarnation: int = 0) -> Operation:
        return self._operation("UnpinModel", "Target", model=model, if_incarnation=if_incarnation)

    def set_residency(self, model: str, floor: Floor, *, if_incarnation: int = 0) -> str:
        """Have the weights at least in that place always; returns the floor that the model has then."""
        fields: dict[str, Any] = {"floor": floor, "if_incarnation": if_incarnation}
        return str(self._ask("SetResidency", "ResidencyRequest", "ResidencyResponse", model=model, **fields).floor)

    def reclaim(
        self,
        *,
        parameter_idle_ms: float | None = None,
        workspace_idle_ms: float | None = None,
        host_idle_ms: float | None = None,
    ) -> Reclaim:
        """Set after how much idle time memory is given back, where given; returns what holds then."""
        fields: dict[str, Any] = {
            "parameter_idle_ms": parameter_idle_ms,
            "workspace_idle_ms": workspace_idle_ms,
            "host_idle_ms": host_idle_ms,
        }
        answer = self._ask("SetReclaim", "ReclaimPolicy", "ReclaimPolicy", **fields)
        return Reclaim(answer.parameter_idle_ms, answer.workspace_idle_ms, answer.host_idle_ms)

    def trim(self, *, device: int = 0, target_bytes: int = 0, compact: bool = False) -> dict[str, Any]:
        """Free weights, those unused for longest first, until at most so many bytes are taken; with `compact` all that
        may leave, so that holes merge. Returns the device's row of the status document afterwards."""
        request: dict[str, Any] = {"device": device, "target_bytes": target_bytes, "compact": compact}
        found = _object(self._ask("TrimDevice", "TrimRequest", "StatusResponse", **request).json).get("device")
        if not isinstance(found, dict):
            raise InvalidResponse("the answer to TrimDevice has no field 'device'")
        return found

    # --- program sets -----------------------------------------------------------------------------------------------

    def programs(self, model: str) -> Programs:
        return answers.programs(self._ask("ListPrograms", "Target", "ProgramList", model=model))

    def stage(
        self,
        model: str,
        directory: str,
        *,
        base: int = 0,
        sources: Sequence[str] = (),
        label: str = "",
        wait: bool = True,
        shadow_percent: float = 0.0,
        timeout: float = 600.0,
        if_incarnation: int = 0,
    ) -> Program:
        """Compile the programs in `directory`, a path on the server's machine, into a set beside those there are.

        Those that `sources` leaves out come from `base` (0 = the selected one). With `wait` it is answered when they
        are compiled, at most `timeout` seconds later; one that cannot be compiled is a set with the phase ``failed``.
        Raises InvalidRequest when a program takes or returns something else, CapacityFull.
        """
        request: dict[str, Any] = {
            "base": base,
            "base_directory": directory,
            "sources": list(sources),
            "wait": wait,
            "label": label,
            "shadow_percent": shadow_percent,
            "if_incarnation": if_incarnation,
        }
        extra = timeout if wait else 0.0
        return answers.program(
            self._ask("StageProgram", "StageRequest", "Program", extra=extra, model=model, **request)
        )

    def select(
        self, model: str, program: int, *, expected: int, require_clean: bool = False, if_incarnation: int = 0
    ) -> Selected:
        """Answer with another program set from the next batch on, if `expected` is the present one.

        Raises ExpectedMismatch otherwise, and WrongState for a set that is not ready or, with `require_clean`, whose
        shadow has found a difference or compared nothing.
        """
        request: dict[str, Any] = {"program": program, "expected": expected, "require_clean": require_clean}
        target = _target(model, if_incarnation)
        answer = self._ask("SelectProgram", "SelectRequest", "SelectResponse", t=target, **request)
        return Selected(answer.selected, answer.previous)

    def remove(self, model: str, program: int, *, if_incarnation: int = 0) -> Programs:
        """Drop a program set that is not selected; returns those that are left."""
        target = _target(model, if_incarnation)
        return answers.programs(self._ask("RemoveProgram", "RemoveRequest", "ProgramList", t=target, program=program))

    def shadow(
        self,
        model: str,
        program: int,
        percent: float,
        *,
        tolerances: Mapping[str, float] | None = None,
        if_incarnation: int = 0,
    ) -> Program:
        """Give a program set a copy of that share of batches and compare what comes out; 0 ends it.

        `tolerances` by dtype (f32, f16, bf16, f64) bound max|Δ| / max|reference| of an output.
        """
        request: dict[str, Any] = {"program": program, "percent": percent, "tolerances": dict(tolerances or {})}
        target = _target(model, if_incarnation)
        return answers.program(self._ask("SetShadow", "ShadowRequest", "Program", t=target, **request))

    # --- the server -------------------------------------------------------------------------------------------------

    def poll(self) -> list[Change]:
        """Look at the model directories now; returns what is different. Raises WrongState unless the server does so."""
        found = _object(self._ask("PollRepository", "Empty", "StatusResponse").json)
        return [answers.change(row) for row in _rows(found, "changes")]

    def events(self, *, from_seq: int = 0, model: str = "", seconds: float | None = None) -> Iterator[Event]:
        """What changes on the server, as it happens, until the iterator is closed, the server ends, or `seconds` are
        over.

        `from_seq` = 0: only what is to come; 1: first all that the server still remembers. After an interruption go on
        with the number of the last event + 1.
        """
        from rsrv.protos import admin

        request = _message("WatchEvents", "WatchRequest", from_seq=from_seq, model=model)
        try:
            for body in self._connection.stream("WatchEvents", request.SerializeToString(), seconds):
                yield answers.event(message_of(admin.Event, body))
        except DeadlineExceeded:
            if seconds is None:
                raise

    # --- small parts ------------------------------------------------------------------------------------------------

    def _operation(self, method: str, request: str, *, extra: float = 0.0, **fields: Any) -> Operation:
        return answers.operation(self._ask(method, request, "Operation", extra=extra, **fields))

    def _ask(self, method: str, request: str, answer: str, *, extra: float = 0.0, **fields: Any) -> Any:
        """Call `method`, which may wait for `extra` seconds on the server; fields that are None are left out."""
        from rsrv.protos import admin

        message = _message(method, request, **fields)
        timeout = min(extra + REPLY_SECONDS, MAX_TIMEOUT_SECONDS) if extra else self._timeout
        body = self._connection.call(method, message.SerializeToString(), max(timeout, self._timeout))
        return message_of(getattr(admin, answer), body)


def _message(method: str, request: str, **fields: Any) -> Any:
    from rsrv.protos import admin

    try:
        return getattr(admin, request)(**{name: value for name, value in fields.items() if value is not None})
    except (ValueError, TypeError) as error:  # a number below 0 or too large, text that is not UTF-8
        raise UsageError(f"{method} cannot take these arguments: {error}") from None


def _target(model: str, if_incarnation: int) -> dict[str, Any]:
    return {"model": model, "if_incarnation": if_incarnation}


def _ms(seconds: float) -> int:
    if not 0 <= seconds <= MAX_TIMEOUT_SECONDS:
        raise UsageError(f"cannot wait for {seconds:g} seconds; wanted a number from 0 to {MAX_TIMEOUT_SECONDS:g}")
    return math.ceil(seconds * 1e3)


def _rows(found: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    rows = found.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidResponse(f"the server's answer has no list of objects {name!r}")
    return rows


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidResponse(f"the server's answer of {len(text)} characters is no JSON object")
    return found
