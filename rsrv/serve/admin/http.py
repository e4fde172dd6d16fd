"""Administration over HTTP: paths, JSON and status codes (spec worker 11.1, 11.4); `operations` does what is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import ExpectedMismatch, InvalidRequest, RsrvError
from rsrv.rpc.access import BearerToken, require_own_host, require_same_origin
from rsrv.rpc.http_messages import JSON, HttpAnswer, HttpRequest, HttpRoute, error_answer
from rsrv.serve.admin.requests import (
    ActivateRequest,
    Answer,
    DeactivateRequest,
    DrainRequest,
    EmptyRequest,
    ReclaimPolicy,
    RegisterRequest,
    RemoveRequest,
    Request,
    ResidencyRequest,
    SelectRequest,
    ShadowRequest,
    StageRequest,
    Target,
    TrimRequest,
    UnregisterRequest,
    WaitRequest,
    WatchRequest,
    parse_json,
    parse_query,
)

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.serve.admin.events import Event, EventLog
    from rsrv.serve.admin.operations import Administration

SPARE_THREADS = 16
"""What the listener needs for calls that do not wait, beside one thread for each place of `admission.held_requests`."""
HEARTBEAT_SECONDS = 15.0
_RETRY = b"retry: 2000\n\n"
_SEEN = "[0-9]{1,19}"


@dataclass(frozen=True, slots=True)
class _Operation:
    """`waits` = the method wants to know whether its caller is still there; `status` = what success is told with."""

    kind: type[Request]
    method: Callable[..., Answer]
    status: int = 200
    waits: bool = False


def admin_http_routes(
    administration: Administration, events: EventLog, config: ServerConfig, *, token: BearerToken | None = None
) -> Mapping[tuple[str, str], HttpRoute]:
    """The routes under ``/v1`` but for ``/v1/status``. `token` is what calls must carry, None = nothing."""
    return _Routes(administration, events, config.endpoints.host, token).all()


def listener_threads(config: ServerConfig) -> int:
    """Threads that a listener with these routes needs: whatever waits, the others find one."""
    held: int = config.held_requests
    return held + SPARE_THREADS


class _Routes:
    def __init__(self, administration: Administration, events: EventLog, host: str, token: BearerToken | None) -> None:
        self._administration = administration
        self._events = events
        self._host = host
        self._token = token

    def all(self) -> Mapping[tuple[str, str], HttpRoute]:
        handlers = {path: HttpRoute(self._handler(each), "thread", self._guard) for path, each in self._table().items()}
        return {**handlers, ("GET", "/v1/events"): HttpRoute(self._follow, "stream", self._guard)}

    def _guard(self, request: HttpRequest) -> None:
        """Raises ForeignOrigin for what somebody's web page may have sent, Unauthenticated without the token."""
        headers = request.headers
        require_own_host(headers.get("Host"), self._host)
        require_same_origin(headers.get("Origin"), headers.get("Host"))
        if self._token is not None:
            self._token.require(headers.get("Authorization"))

    def _table(self) -> Mapping[tuple[str, str], _Operation]:
        do, models = self._administration, "/v1/models"
        stage = _Operation(StageRequest, do.stage_program)
        programs = _Operation(Target, do.list_programs)
        return {
            ("GET", models): _Operation(EmptyRequest, do.list_models),
            ("POST", f"{models}/register"): _Operation(RegisterRequest, do.register_model, 202),
            ("POST", f"{models}/retry"): _Operation(Target, do.retry_model, 202),
            ("POST", f"{models}/drain"): _Operation(DrainRequest, do.drain_model, waits=True),
            ("POST", f"{models}/undrain"): _Operation(Target, do.undrain_model),
            ("POST", f"{models}/unregister"): _Operation(UnregisterRequest, do.unregister_model, 202),
            ("POST", f"{models}/activate"): _Operation(ActivateRequest, do.activate_model, 202),
            ("POST", f"{models}/deactivate"): _Operation(DeactivateRequest, do.deactivate_model, 202),
            ("POST", f"{models}/pin"): _Operation(Target, do.pin_model),
            ("POST", f"{models}/unpin"): _Operation(Target, do.unpin_model),
            ("POST", f"{models}/residency"): _Operation(ResidencyRequest, do.set_residency),
            ("POST", f"{models}/programs"): stage,
            ("GET", f"{models}/programs"): programs,
            ("POST", f"{models}/variants"): stage,
            ("GET", f"{models}/variants"): programs,
            ("POST", f"{models}/programs/select"): _Operation(SelectRequest, do.select_program),
            ("POST", f"{models}/programs/remove"): _Operation(RemoveRequest, do.remove_program),
            ("POST", f"{models}/programs/shadow"): _Operation(ShadowRequest, do.set_shadow),
            ("GET", f"{models}/wait"): _Operation(WaitRequest, do.wait_model, waits=True),
            ("GET", "/v1/reclaim"): _Operation(EmptyRequest, do.get_reclaim),
            ("PATCH", "/v1/reclaim"): _Operation(ReclaimPolicy, do.set_reclaim),
            ("POST", "/v1/devices/trim"): _Operation(TrimRequest, do.trim_device),
            ("POST", "/v1/repository/poll"): _Operation(EmptyRequest, do.poll_repository),
        }

    def _handler(self, operation: _Operation) -> Callable[[HttpRequest], HttpAnswer]:
        def handle(request: HttpRequest) -> HttpAnswer:
            model = ""
            try:
                message = _message(operation.kind, request)
                model = getattr(message, "model", "")
                answer = operation.method(message, *((request.gone,) if operation.waits else ()))
            except RsrvError as error:
                return self._refused(error, model)
            status = 202 if getattr(answer, "underway", False) else operation.status
            return HttpAnswer(status, answer.model_dump_json().encode() + b"\n", JSON)

        return handle

    def _refused(self, error: RsrvError, model: str) -> HttpAnswer:
        more: dict[str, Any] = {"model": model or None, "incarnation": self._administration.incarnation(model)}
        if isinstance(error, ExpectedMismatch):
            more["selected"] = error.selected
        return error_answer(error, **more)

    def _follow(self, request: HttpRequest) -> EventStream | HttpAnswer:
        try:
            watch = parse_query(WatchRequest, request.parameters())
            from_seq = _after(request.headers.get("Last-Event-ID")) or watch.from_seq
            held = ExitStack()
            held.enter_context(self._administration.place("an event stream"))
        except RsrvError as error:
            return error_answer(error)
        return EventStream(self._events, from_seq, watch.model, held)


class EventStream:
    """The event log as server-sent events: one ``data:`` line of JSON each, and its number as ``id:``.

    A message of the type ``gap`` says that events are lost, and which number comes next.
    """

    content_type = "text/event-stream"
    heartbeat = b": \n\n"

    def __init__(self, events: EventLog, from_seq: int, model: str, held: ExitStack) -> None:
        self.heartbeat_seconds = HEARTBEAT_SECONDS
        self._wake: Callable[[], None] = lambda: None
        self._held = held
        # Now, not when it is started: what happens in between belongs to it.
        self._subscription = events.subscribe(lambda: self._wake(), from_seq=from_seq, model=model)
        self._begun = False

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def read(self) -> bytes:
        gap, events = self._subscription.take()
        parts = [] if self._begun else [_RETRY]
        self._begun = True
        if gap is not None:
            parts.append(b"event: gap\ndata: " + json.dumps({"first_seq": gap}).encode() + b"\n\n")
        parts += [b"id: %d\ndata: %b\n\n" % (event.seq, json.dumps(_fields(event)).encode()) for event in events]
        return b"".join(parts)

    def close(self) -> None:
        self._subscription.close()
        self._held.close()


def _message(kind: type[Request], request: HttpRequest) -> Request:
    if request.method in ("GET", "HEAD"):
        return parse_query(kind, request.parameters())
    if request.query:
        raise InvalidRequest("the query is not looked at here; send the fields as a JSON body")
    return parse_json(kind, request.body)


def _after(last_event_id: str | None) -> int:
    """The number after the one that a reader saw last; 0 = it does not say, or says no number of ours."""
    return int(last_event_id) + 1 if last_event_id is not None and re.fullmatch(_SEEN, last_event_id) else 0


def _fields(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "time": event.time,
        "model": event.model,
        "incarnation": event.incarnation,
        "type": event.type,
        "from": event.old,
        "to": event.new,
        "detail": event.detail,
    }
