"""``rsrv.admin.v1.AdminService``: administration over gRPC. It translates; what is done is `operations`' matter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import Cancelled
from rsrv.protos import admin as pb
from rsrv.rpc.call import reply
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import parse
from rsrv.serve.admin import messages
from rsrv.serve.admin.bearer import with_token
from rsrv.serve.admin.operations import MAX_MOVES
from rsrv.serve.admin.requests import (
    ActivateRequest,
    DeactivateRequest,
    DrainRequest,
    EmptyRequest,
    Operation,
    ReclaimPolicy,
    RegisterRequest,
    RemoveRequest,
    Request,
    ResidencyRequest,
    SelectRequest,
    ShadowRequest,
    StageRequest,
    StatusRequest,
    Target,
    TrimRequest,
    UnregisterRequest,
    WaitRequest,
    WatchRequest,
)
from rsrv.serve.admin.watch import Watch
from rsrv.serve.hook_pool import HookPool, Job

if TYPE_CHECKING:
    from rsrv.rpc.access import BearerToken
    from rsrv.rpc.call import Call
    from rsrv.serve.admin.events import EventLog
    from rsrv.serve.admin.operations import Administration, Gone

SERVICE = "rsrv.admin.v1.AdminService"

SPARE_THREADS = MAX_MOVES + 8
"""Threads for operations beyond those that may wait for something, which the bound of held requests limits: as many as
may move weights, and those of the quick ones."""


class AdminService:
    """The handlers. An operation runs on a thread of the service's own; it goes on when its caller gives up.

    `held` is the server's bound of held requests, and `place` takes one of their places for the time of a context;
    `token` is what calls must carry (None = nothing).
    """

    def __init__(
        self,
        administration: Administration,
        events: EventLog,
        *,
        held: int,
        place: Callable[[str], AbstractContextManager[None]],
        token: BearerToken | None = None,
    ) -> None:
        self._administration = administration
        self._events = events
        self._place = place
        self._token = token
        self._pool = HookPool(held + SPARE_THREADS, name="rsrv-admin")

    def routes(self) -> Routes:
        do = self._administration
        unary: dict[str, tuple[Any, type[Request], Callable[[Any], Any], Callable[[Any], Any]]] = {
            "GetStatus": (pb.StatusRequest, StatusRequest, do.get_status, _status),
            "ListModels": (pb.Empty, EmptyRequest, do.list_models, _catalogue),
            "RegisterModel": (pb.RegisterRequest, RegisterRequest, do.register_model, messages.operation),
            "RetryModel": (pb.Target, Target, do.retry_model, messages.operation),
            "UndrainModel": (pb.Target, Target, do.undrain_model, messages.operation),
            "UnregisterModel": (pb.UnregisterRequest, UnregisterRequest, do.unregister_model, messages.operation),
            "ActivateModel": (pb.ActivateRequest, ActivateRequest, do.activate_model, messages.operation),
            "DeactivateModel": (pb.DeactivateRequest, DeactivateRequest, do.deactivate_model, messages.operation),
            "PinModel": (pb.Target, Target, do.pin_model, messages.operation),
            "UnpinModel": (pb.Target, Target, do.unpin_model, messages.operation),
            "SetReclaim": (pb.ReclaimPolicy, ReclaimPolicy, do.set_reclaim, messages.reclaim),
            "SetResidency": (pb.ResidencyRequest, ResidencyRequest, do.set_residency, messages.residency),
            "StageProgram": (pb.StageRequest, StageRequest, do.stage_program, messages.staged),
            "ListPrograms": (pb.Target, Target, do.list_programs, messages.programs),
            "SelectProgram": (pb.SelectRequest, SelectRequest, do.select_program, messages.selected),
            "RemoveProgram": (pb.RemoveRequest, RemoveRequest, do.remove_program, messages.programs),
            "SetShadow": (pb.ShadowRequest, ShadowRequest, do.set_shadow, messages.staged),
            "TrimDevice": (pb.TrimRequest, TrimRequest, do.trim_device, _status),
            "PollRepository": (pb.Empty, EmptyRequest, do.poll_repository, _status),
        }
        routes = {f"/{SERVICE}/{name}": Route(self._unary(*method)) for name, method in unary.items()}
        waiting: dict[str, tuple[Any, type[Request], Callable[[Any, Gone], Operation]]] = {
            "DrainModel": (pb.DrainRequest, DrainRequest, do.drain_model),
            "WaitModel": (pb.WaitRequest, WaitRequest, do.wait_model),
        }
        for name, (message, kind, wait) in waiting.items():
            routes[f"/{SERVICE}/{name}"] = Route(self._waiting(message, kind, wait))
        routes[f"/{SERVICE}/WatchEvents"] = Route(self._watch, "server_stream")
        return with_token(routes, self._token)

    def close(self) -> None:
        """Answer what has not begun with ServerStopping. Call it when what operations wait for has ended."""
        self._pool.close()

    def _unary(
        self, message: Any, kind: type[Request], method: Callable[[Any], Any], answer: Callable[[Any], Any]
    ) -> Callable[[Call], None]:
        def handle(call: Call) -> None:
            request = messages.read(kind, parse(call, message))
            self._run(call, lambda: answer(method(request)))

        return handle

    def _waiting(
        self, message: Any, kind: type[Request], method: Callable[[Any, Gone], Operation]
    ) -> Callable[[Call], None]:
        """A method that may wait, for no longer than its caller does."""

        def handle(call: Call) -> None:
            request = messages.read(kind, parse(call, message))
            self._run(call, lambda: messages.operation(method(request, lambda: call.cancelled)))

        return handle

    def _run(self, call: Call, operation: Callable[[], Any]) -> None:
        def run() -> Any:
            if call.cancelled:
                raise Cancelled("the caller went away before its turn came")
            return operation()

        def done(message: Any, error: BaseException | None) -> None:
            if error is not None:
                call.fail(error)
            else:
                reply(call, message)

        self._pool.submit(Job(run, done, what=call.path, deadline_ns=call.deadline_ns))

    def _watch(self, call: Call) -> None:
        request = messages.read(WatchRequest, parse(call, pb.WatchRequest))
        held = ExitStack()
        held.enter_context(self._place("an event stream"))
        call.on_end(held.close)
        Watch(call, self._events, request).start()


def _status(answer: Any) -> pb.StatusResponse:
    return pb.StatusResponse(json=messages.document(answer))


def _catalogue(answer: Any) -> pb.ListModelsResponse:
    return pb.ListModelsResponse(json=messages.document(answer))
