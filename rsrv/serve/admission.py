"""How many requests are in the server: those being handled, up to a cap, and those held outside of a closed gate."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from rsrv.core.errors import HeldFull, ServerStopping, Shed

_FEW = 32
"""Dead entries in the heap of deadlines that are not worth a clean-up."""


class Holdable(Protocol):
    """A request that may wait; `target` is the registered name that it waits for."""

    target: str

    def expire(self) -> None:
        """Its deadline passed while it waited."""
        ...


_R = TypeVar("_R", bound=Holdable)


class Admission(Generic[_R]):
    """The ModelInfer calls being handled: at most `limit`, none any more once closed. Thread safe.

    Besides, up to `held_limit` may wait for a model; admin calls that wait, and event streams, share those places.
    """

    def __init__(self, limit: int, held_limit: int = 0) -> None:
        self.limit = limit
        self.held_limit = held_limit
        self.shed = 0
        self._closed = False
        self._open: set[_R] = set()
        # In order of arrival.
        self._held: dict[_R, None] = {}
        self._places = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._due: list[tuple[int, int, _R]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition(self._lock)
        self._watch: threading.Thread | None = None

    @property
    def in_flight(self) -> int:
        return len(self._open)

    @property
    def held(self) -> int:
        """Requests that wait for a model."""
        return len(self._held)

    def enter(self, request: _R) -> None:
        """Raises Shed past the limit, ServerStopping when closed."""
        with self._lock:
            if self._closed:
                raise ServerStopping("the server is stopping and takes no new requests")
            if len(self._open) >= self.limit:
                self.shed += 1
                raise Shed(f"{self.limit} requests are being handled already (endpoints.max_concurrent_requests)")
            self._open.add(request)

    def leave(self, request: _R) -> bool:
        """True the first time; afterwards, and for a request that never entered, False."""
        with self._lock:
            if request in self._held:
                del self._held[request]
                return True
            if request not in self._open:
                return False
            self._open.remove(request)
            if self._closed and not self._open:
                self._idle.notify_all()
            return True

    # --- waiting outside ------------------------------------------------------------------------------------------

    def hold(self, request: _R, deadline_ns: int) -> bool:
        """Let a request that entered wait for its `target`, which takes it out of the cap; False when it has left.

        Raises HeldFull past the limit, ServerStopping when closed.
        """
        with self._lock:
            if request not in self._open:
                return False
            if self._closed:
                raise ServerStopping("the server is stopping, so nothing waits any more")
            self._require_place(f"a request for model {request.target!r}")
            self._open.remove(request)
            self._held[request] = None
            if deadline_ns:
                if len(self._due) > 2 * len(self._held) + _FEW:
                    # Requests that went on are kept alive by their entries.
                    self._due = [due for due in self._due if due[2] in self._held]
                    heapq.heapify(self._due)
                heapq.heappush(self._due, (deadline_ns, next(self._numbers), request))
                if self._watch is None:
                    self._watch = threading.Thread(target=self._expire, name="rsrv-held", daemon=True)
                    self._watch.start()
                self._changed.notify_all()
        return True

    def waits_for(self, target: str) -> bool:
        """Whether any request waits for `target`."""
        with self._lock:
            return any(request.target == target for request in self._held)

    def release(self, target: str) -> list[_R]:
        """Those that wait for `target`, in order of arrival; they are handled again, beyond the cap if it must be."""
        with self._lock:
            released = [request for request in self._held if request.target == target]
            for request in released:
                del self._held[request]
                self._open.add(request)
            return released

    def rename(self, old: str, new: str) -> None:
        """Those that wait for `old` wait for `new`."""
        with self._lock:
            for request in self._held:
                if request.target == old:
                    request.target = new

    @contextmanager
    def place(self, what: str) -> Iterator[None]:
        """One of the places for those that wait, taken by something that is no request. Raises HeldFull."""
        with self._lock:
            self._require_place(what)
            self._places += 1
        try:
            yield
        finally:
            with self._lock:
                self._places -= 1

    def _require_place(self, what: str) -> None:
        waiting = len(self._held) + self._places
        if waiting >= self.held_limit:
            raise HeldFull(
                f"{what} cannot wait: {waiting} requests, admin calls and event streams wait already, at most "
                f"{self.held_limit} may (admission.held_requests)"
            )

    def _expire(self) -> None:
        while True:
            with self._lock:
                while not self._due or self._due[0][0] > time.monotonic_ns():
                    if self._closed:
                        return
                    left = (self._due[0][0] - time.monotonic_ns()) / 1e9 if self._due else None
                    self._changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
                request = heapq.heappop(self._due)[2]
                late = request in self._held
            if late:
                request.expire()

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def wait_idle(self, until: float) -> bool:
        """Wait until no request is open, at most until the monotonic time `until`; True when none is."""
        with self._lock:
            while self._open:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
            return True

    def requests(self) -> list[_R]:
        """Those being handled, and those that wait."""
        with self._lock:
            return [*self._open, *self._held]

    def waiting(self) -> list[_R]:
        """Those that wait."""
        with self._lock:
            return [*self._held]
