"""The state of one server (starting, serving, stopping, …) and the answer to "are you ready, and if not, why?"."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rsrv.core.errors import ServerStopping
from rsrv.serve.loading.progress import ProgramCounts
from rsrv.serve.registry import Progress, ReadyWhen, Registry

State = Literal["starting", "serving", "stopping", "stopped", "failed"]
_RUNNING: tuple[State, ...] = ("starting", "serving")
STATES: tuple[State, ...] = ("starting", "serving", "stopping", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class Readiness:
    """`phase` says what the server does now, `reason` why it is not ready ("" when it is)."""

    ready: bool
    state: State
    phase: str
    reason: str
    progress: Progress
    programs: ProgramCounts


class Lifecycle:
    """Thread safe. `on_change` is called after every change of state.

    `stuck` says which execution has run for too long, if one has: until it returns the server is not ready. `programs`
    counts what was compiled so far.
    """

    def __init__(
        self,
        registry: Registry,
        ready_when: ReadyWhen,
        stuck: Callable[[], str] = lambda: "",
        programs: Callable[[], ProgramCounts] = ProgramCounts,
    ) -> None:
        self._registry = registry
        self._ready_when = ready_when
        self._stuck = stuck
        self._programs = programs
        self._lock = threading.Lock()
        self._state: State = "starting"
        self.phase = "device"
        self.on_change: Callable[[], None] = lambda: None

    @property
    def state(self) -> State:
        return self._state

    @property
    def running(self) -> bool:
        """Whether models may be answered, and changed: the server is coming up, or serves."""
        return self._state in _RUNNING

    def require_running(self) -> None:
        """Raises ServerStopping."""
        state = self._state
        if state not in _RUNNING:
            raise ServerStopping(f"the server is {state} and changes nothing any more")

    def enter(self, state: State, *, only_from: tuple[State, ...] = STATES) -> bool:
        """Change the state; False (and no change) when it is not one of `only_from`."""
        with self._lock:
            if self._state not in only_from:
                return False
            self._state = state
            if state != "starting":
                self.phase = state
        self.on_change()
        return True

    def readiness(self) -> Readiness:
        state = self._state
        if state in _RUNNING:
            reason = self._registry.waiting_for(self._ready_when) or self._stuck()
        else:
            reason = f"the server is {state}"
        return Readiness(not reason, state, self.phase, reason, self._registry.progress(), self._programs())
