"""RepositoryModelLoad and RepositoryModelUnload of KServe V2, by which Triton's clients change what a server serves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsrv.bundle.files import MANIFEST, require_name
from rsrv.core.errors import (
    BundleError,
    Cancelled,
    IncarnationChanged,
    InvalidRequest,
    NameTaken,
    Shed,
    UnknownModel,
    WaitTimeout,
    WrongState,
)
from rsrv.protos import inference as pb
from rsrv.rpc.call import reply
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import parse
from rsrv.serve.admin.bearer import with_token
from rsrv.serve.admin.requests import RegisterRequest, UnregisterRequest, parse_fields
from rsrv.serve.hook_pool import HookPool, Job
from rsrv.serve.registry import ModelState
from rsrv.serve.services import SERVICE

if TYPE_CHECKING:
    from rsrv.rpc.access import BearerToken
    from rsrv.rpc.call import Call
    from rsrv.serve.admin.operations import Administration
    from rsrv.serve.registrations import Registrations
    from rsrv.serve.registry import Entry, Registry

MAX_OPEN = 16
"""Loads and unloads at a time. Each holds a thread of the engine, of which there are 32 besides those of inference."""
LONGEST_SECONDS = 3600.0
"""How long a call without a deadline waits."""
_LOOK_SECONDS = 0.25
"""How often it is looked whether a caller who waits is still there."""
_UNLOAD_PARAMETERS = {"unload_dependents"}


class RepositoryService:
    """The handlers. A call is answered when the model is ready, failed or gone; it goes on when its caller gives up.

    `model_dirs` are where bundles are looked for, `static` says that the server changes nothing, `token` is what calls
    must carry (None = nothing).
    """

    def __init__(
        self,
        administration: Administration,
        registrations: Registrations,
        registry: Registry,
        *,
        model_dirs: Sequence[str],
        static: bool,
        token: BearerToken | None = None,
    ) -> None:
        self._administration = administration
        self._registrations = registrations
        self._registry = registry
        self._model_dirs = model_dirs
        self._static = static
        self._token = token
        self._pool = HookPool(MAX_OPEN, name="rsrv-repository")
        self._lock = threading.Lock()
        self._open = 0

    def routes(self) -> Routes:
        methods = {
            "RepositoryModelLoad": self._handler(pb.RepositoryModelLoadRequest, self.load),
            "RepositoryModelUnload": self._handler(pb.RepositoryModelUnloadRequest, self.unload),
        }
        return with_token({f"/{SERVICE}/{name}": Route(handler) for name, handler in methods.items()}, self._token)

    def close(self) -> None:
        """Answer what has not begun with ServerStopping. Call it when the registrations have ended."""
        self._pool.close()

    # --- methods ----------------------------------------------------------------------------------------------------

    def load(self, request: pb.RepositoryModelLoadRequest, wait: Wait) -> pb.RepositoryModelLoadResponse:
        """Serve the bundle of that name, anew when it is served already; returns when it is ready.

        Who loads a name at the same time as others gets what they get. Raises what the preparation failed with,
        UnknownModel when no directory has the name, WrongState when the server is static or the model is being removed.
        """
        name = request.model_name
        _require_no_parameters(request, allowed=frozenset())
        if self._static:
            raise WrongState(f"model {name!r} is not loaded: model_control_mode is static", reason="static")
        entry = self._registry.get(name)
        if entry is None:
            fields = {"model": name, "directory": str(self._directory(name))}
            with suppress(NameTaken):
                self._administration.register_model(parse_fields(RegisterRequest, fields))
        if entry is not None and entry.state in (ModelState.READY, ModelState.FAILED):
            settled = self._registrations.reload(name)
        else:
            settled = self._prepare(name)
        if not wait.until(lambda slice_s: _is_settled(settled, slice_s)):
            raise WaitTimeout(f"model {name!r} was not ready within {wait.seconds:g} s; its preparation goes on")
        settled.result()
        entry = self._registry.find(name)
        if entry.gate in ("draining", "drained"):
            self._registrations.undrain(name)
        return pb.RepositoryModelLoadResponse()

    def unload(self, request: pb.RepositoryModelUnloadRequest, wait: Wait) -> pb.RepositoryModelUnloadResponse:
        """Remove a model, after its requests; returns when it is gone. Raises UnknownModel, and WrongState when its
        memory cannot be freed."""
        name = request.model_name
        _require_no_parameters(request, allowed=_UNLOAD_PARAMETERS)
        begun = self._administration.unregister_model(parse_fields(UnregisterRequest, {"model": name}))
        if not wait.until(lambda slice_s: self._is_gone(name, begun.incarnation, slice_s)):
            raise WaitTimeout(f"model {name!r} was not gone within {wait.seconds:g} s; its removal goes on")
        return pb.RepositoryModelUnloadResponse()

    def _is_gone(self, name: str, incarnation: int, seconds: float) -> bool:
        """Wait so long for that."""
        try:
            entry = self._registrations.wait(name, "gone", seconds, if_incarnation=incarnation)
        except WaitTimeout:
            return False
        except (UnknownModel, IncarnationChanged):  # gone already, and perhaps somebody has loaded it again
            return True
        if entry is not None:
            raise WrongState(f"model {name!r} could not be released: {entry.reason}", reason=entry.state.value)
        return True

    # --- small parts ------------------------------------------------------------------------------------------------

    def _prepare(self, name: str) -> Future[Entry]:
        try:
            return self._registrations.prepare(name)
        except WrongState:  # it has failed meanwhile, or is being removed
            entry = self._registry.find(name)
            if entry.failure is None:
                raise
            raise entry.unavailable() from None

    def _directory(self, name: str) -> Path:
        """The first bundle of that name."""
        try:
            require_name(name)
        except BundleError as error:
            raise InvalidRequest(f"no model can be called {name!r}: {error.message}") from None
        for root in self._model_dirs:
            found = Path(root, name)
            if os.path.exists(found / MANIFEST):  # also of a name that no file can have
                return found
        raise UnknownModel(
            f"no directory {name!r} with a {MANIFEST} in {', '.join(map(str, self._model_dirs))}",
            hint="`rsrv ctl register` takes a directory that is elsewhere",
        )

    def _handler(self, message: Any, method: Callable[[Any, Wait], Any]) -> Callable[[Call], None]:
        def handle(call: Call) -> None:
            request = parse(call, message)
            with self._lock:
                if self._open >= MAX_OPEN:
                    raise Shed(f"{self._open} models are being loaded and unloaded by clients; at most {MAX_OPEN} may")
                self._open += 1

            def run() -> Any:
                if call.cancelled:
                    raise Cancelled("the caller went away before its turn came")
                return method(request, Wait(_seconds_left(call), lambda: call.cancelled))

            def done(answer: Any, error: BaseException | None) -> None:
                with self._lock:
                    self._open -= 1
                if error is not None:
                    call.fail(error)
                else:
                    reply(call, answer)

            self._pool.submit(Job(run, done, what=call.path, deadline_ns=call.deadline_ns))

        return handle


class Wait:
    """For how long a caller waits: `seconds` at most, and no longer than it is there."""

    def __init__(self, seconds: float, gone: Callable[[], bool] = lambda: False) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._gone = gone

    def until(self, happened: Callable[[float], bool]) -> bool:
        """Ask `happened`, which waits for as many seconds as it is told, until it says yes; False when time is up.

        Raises Cancelled when nobody waits for the answer any more.
        """
        while True:
            left = self._end - time.monotonic()
            if happened(max(0.0, min(left, _LOOK_SECONDS))):
                return True
            if left <= _LOOK_SECONDS:
                return False
            if self._gone():
                raise Cancelled("the caller went away before what it waited for had happened")


def _is_settled(outcome: Future[Any], seconds: float) -> bool:
    """Wait so long for that."""
    return bool(wait_for([outcome], seconds).done)


def _seconds_left(call: Call) -> float:
    if not call.deadline_ns:
        return LONGEST_SECONDS
    return max(0.0, (call.deadline_ns - time.monotonic_ns()) / 1e9)


def _require_no_parameters(request: Any, *, allowed: frozenset[str] | set[str]) -> None:
    refused = sorted(set(request.parameters) - allowed)
    if refused:
        raise InvalidRequest(
            f"parameter {refused[0]!r} of model {request.model_name!r} is not supported: a bundle is loaded as it lies "
            "on the server's disk",
            hint="register another directory with `rsrv ctl register`",
        )
