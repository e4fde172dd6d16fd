"""Those who wait until a model has come so far: idle, drained, ready or gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from rsrv.core.errors import ServerStopping, WaitTimeout
from rsrv.serve.registry import Entry, ModelState

if TYPE_CHECKING:
    from rsrv.serve.registry import Registry
    from rsrv.serve.retirement import Retirements

Until = Literal["idle", "drained", "ready", "gone"]

_LOOK_SECONDS = 0.02
"""How often somebody who waits looks: requests that end tell nobody."""

_ENDED = (ModelState.RETIRING, ModelState.RELEASE_FAILED)


class Waits:
    """Thread safe. `busy` says whether an operation on the weights of a model is under way."""

    def __init__(
        self, registry: Registry, retirements: Retirements, busy: Callable[[str], bool], stopping: threading.Event
    ) -> None:
        self._registry = registry
        self._retirements = retirements
        self._busy = busy
        self._stopping = stopping
        self._changed = threading.Condition()

    def notify(self) -> None:
        """An entry changed."""
        with self._changed:
            self._changed.notify_all()

    def accepted(self, entry: Entry) -> int:
        """Requests that entered and are not done, in all incarnations of a model."""
        return entry.accepted + self._retirements.accepted(entry.name)

    def wait(self, name: str, until: Until, timeout_s: float) -> Entry | None:
        """Wait until a model is `idle` (no request in it), `drained`, `ready` or `gone` (None is returned).

        Also returns when it cannot come so far by itself: it failed, or is being removed. Raises UnknownModel (except
        until gone), WaitTimeout, ServerStopping.
        """
        until_s = time.monotonic() + timeout_s
        entry = self._registry.get(name) if until == "gone" else self._registry.find(name)
        first = None if entry is None else entry.incarnation
        while True:
            entry = self._registry.get(name)
            if entry is None or (until == "gone" and entry.incarnation != first):
                # What else the name had, its account and its counters, goes after the entry and under the same lock.
                with self._registry.changing:
                    return None
            if self._is_at(entry, until):
                return entry
            left = until_s - time.monotonic()
            if left <= 0:
                now = f"{entry.state.value}, its gate {entry.gate}, with {self.accepted(entry)} requests"
                raise WaitTimeout(f"model {name!r} is not {until} yet: it is {now}")
            if self._stopping.is_set():
                raise ServerStopping("the server is stopping")
            with self._changed:
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _is_at(self, entry: Entry, until: Until) -> bool:
        match until:
            case "idle":
                return not self.accepted(entry) and not self._busy(entry.name)
            case "drained":
                return entry.gate == "drained" or entry.state in _ENDED
            case "ready":
                return entry.state in (ModelState.READY, ModelState.FAILED, *_ENDED)
            case "gone":
                return entry.state is ModelState.RELEASE_FAILED
