"""Activating and deactivating weights as operators do: long work that the server owns, one operation per model.

Whether a model's gate allows it is for the caller to say.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from rsrv.core.errors import RsrvError, ServerStopping, WrongState

if TYPE_CHECKING:
    from rsrv.serve.residency.manager import Residency

log = logging.getLogger(__name__)

Operation = Literal["idle", "waiting", "activating", "deactivating"]

_THREADS = 16
"""Operations under way at once; further ones wait. They do not depend on each other, so none waits for ever."""


@dataclass(frozen=True, slots=True)
class OperationError:
    """Why an operation failed: what it did then, the type of the error, and its text."""

    phase: str
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class ParameterState:
    """What is being done with the weights of a model.

    Attributes:
        operation: ``waiting`` for its programs, or for room; ``activating`` while bytes move and programs are warmed.
        error: of the last operation; None when it succeeded, or another one is under way.
    """

    operation: Operation = "idle"
    error: OperationError | None = None


OnChange = Callable[[str, Operation, Operation, OperationError | None], None]
"""Told of every change: model, from, to, and the error when the operation failed."""


@dataclass(slots=True, eq=False)
class _Running:
    """The last operation of a model; `name` follows when that is renamed."""

    name: str
    state: ParameterState = field(default_factory=ParameterState)
    future: Future[None] | None = None


class ParameterOperations:
    """Runs operations on threads of its own, so that they outlive whoever asked for them. Thread safe.

    Args:
        residency: moves the weights.
        on_change: see `OnChange`; called on the thread that changes the state, without a lock.
    """

    def __init__(self, residency: Residency, *, on_change: OnChange = lambda name, old, new, error: None) -> None:
        self._residency = residency
        self._on_change = on_change
        self._lock = threading.Lock()
        self._by_name: dict[str, _Running] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rsrv-parameters")

    def state(self, name: str) -> ParameterState:
        """Of a model that nothing was ever done with: idle."""
        with self._lock:
            running = self._by_name.get(name)
            return ParameterState() if running is None else running.state

    def busy(self, name: str) -> bool:
        """Whether an operation on the weights of `name` is under way."""
        return self.state(name).operation != "idle"

    # --- what operators ask -------------------------------------------------------------------------------------------

    def activate(
        self, name: str, warm: Callable[[], object], *, prepare: Callable[[], object] | None = None
    ) -> ParameterState:
        """Begin to bring the weights of `name` to the device; then call `warm`, which runs its programs once.

        A model without programs yet is prepared first: `prepare` returns, or raises, when that has ended. Raises
        WrongState (``operation_pending``), UnknownModel, DeviceOutOfMemory when the weights can never fit, or
        ServerStopping; what goes wrong later is the `error` of the state.
        """
        self._require_idle(name, self.state(name))
        if prepare is None:
            self._residency.require_room(name)
        return self._begin(name, "waiting", partial(self._activate, warm, prepare))

    def deactivate(self, name: str, *, host: bool = False) -> ParameterState:
        """Begin to free the device weights of `name`, and with `host` the copy in host memory.

        Raises WrongState (``operation_pending``, ``fixed``, ``pinned``), UnknownModel, or ServerStopping.
        """
        self._require_idle(name, self.state(name))
        self._residency.require_deactivatable(name)

        def free(running: _Running) -> None:
            self._residency.deactivate(running.name, host=host)

        return self._begin(name, "deactivating", free)

    # --- models come, go and are renamed ------------------------------------------------------------------------------

    def forget(self, name: str) -> None:
        """The model is gone. What is under way for it goes on, and nobody is told any more."""
        with self._lock:
            self._by_name.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        """The model `old` is known as `new`."""
        with self._lock:
            running = self._by_name.pop(old, None)
            if running is not None:
                running.name = new
                self._by_name[new] = running

    def close(self) -> None:
        """Refuse new operations, and end those that have not begun. Does not wait: see `join`."""
        with self._lock:
            self._closed = True
            pending = [running for running in self._by_name.values() if running.future and running.future.cancel()]
        self._threads.shutdown(wait=False)
        for running in pending:
            self._end(running, ServerStopping("the server is stopping"))

    def join(self) -> None:
        """Wait for the end of what is under way, which comes when `Residency.stop` has been called."""
        self._threads.shutdown(wait=True)

    # --- on the threads -----------------------------------------------------------------------------------------------

    def _require_idle(self, name: str, state: ParameterState) -> None:
        if state.operation != "idle":
            raise WrongState(
                f"an operation on the weights of model {name!r} is under way: {state.operation}",
                reason="operation_pending",
                hint="wait until parameter_operation is idle",
            )

    def _begin(self, name: str, operation: Operation, work: Callable[[_Running], None]) -> ParameterState:
        running = _Running(name, ParameterState(operation))
        with self._lock:
            if self._closed:
                raise ServerStopping(f"the weights of model {name!r} are left alone: the server is stopping")
            if name in self._by_name:
                self._require_idle(name, self._by_name[name].state)
            self._by_name[name] = running
        self._on_change(name, "idle", operation, None)
        try:
            future = self._threads.submit(self._run, running, work)
        except RuntimeError:  # closed meanwhile
            self._end(running, ServerStopping("the server is stopping"))
        else:
            running.future = future
        return running.state

    def _run(self, running: _Running, work: Callable[[_Running], None]) -> None:
        error: BaseException | None = None
        try:
            work(running)
        except BaseException as raised:
            error = raised
        self._end(running, error)

    def _activate(self, warm: Callable[[], object], prepare: Callable[[], object] | None, running: _Running) -> None:
        if prepare is not None:
            prepare()
        self._residency.activate(running.name, moving=partial(self._set, running, ParameterState("activating")))
        self._set(running, ParameterState("activating"))
        warm()

    def _end(self, running: _Running, error: BaseException | None) -> None:
        if error is None:
            self._set(running, ParameterState())
            return
        phase = running.state.operation
        if not isinstance(error, ServerStopping):
            log.warning(
                "parameter operation failed model=%s phase=%s why=%s",
                running.name,
                phase,
                error,
                exc_info=not isinstance(error, RsrvError),
            )
        self._set(running, ParameterState("idle", OperationError(phase, type(error).__name__, str(error))))

    def _set(self, running: _Running, state: ParameterState) -> None:
        with self._lock:
            old, running.state = running.state, state
            name, known = running.name, self._by_name.get(running.name) is running
        if known and old.operation != state.operation:
            self._on_change(name, old.operation, state.operation, state.error)
