"""What is to happen at a time: one thread for all waits that end by a deadline, so that no call needs its own."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from itertools import count

log = logging.getLogger(__name__)

_PURGE_AT = 1024


class Timer:
    """One function that is to run. It runs once at most; `cancel` may come too late."""

    __slots__ = ("_fn", "_owner")

    def __init__(self, fn: Callable[[], object], owner: Timers) -> None:
        self._fn: Callable[[], object] | None = fn
        self._owner = owner

    @property
    def over(self) -> bool:
        """Whether it has run, or never will."""
        return self._fn is None

    def cancel(self) -> None:
        if self._fn is not None:
            self._fn = None
            self._owner.cancelled()

    def run(self) -> None:
        fn, self._fn = self._fn, None
        if fn is not None:
            try:
                fn()
            except Exception:
                log.exception("a timer's function failed")


class Timers:
    """Thread safe. Functions run one after the other on the thread ``rsrv-gateway-timer`` and must be quick."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[int, int, Timer]] = []
        self._order = count()
        self._cancelled = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rsrv-gateway-timer", daemon=True)
        self._thread.start()

    def at(self, deadline_ns: int, fn: Callable[[], object]) -> Timer:
        """Run `fn` at `deadline_ns` on ``time.monotonic_ns()``, or as soon as possible when that has passed."""
        timer = Timer(fn, self)
        with self._condition:
            if self._cancelled > _PURGE_AT and self._cancelled * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if not entry[2].over]
                heapq.heapify(self._heap)
                self._cancelled = 0
            entry = (deadline_ns, next(self._order), timer)
            heapq.heappush(self._heap, entry)
            if self._heap[0] is entry:
                self._condition.notify()
        return timer

    def after(self, seconds: float, fn: Callable[[], object]) -> Timer:
        return self.at(time.monotonic_ns() + int(seconds * 1e9), fn)

    def cancelled(self) -> None:
        """Called by a timer that was cancelled; a lost update of this count costs a later purge, nothing else."""
        self._cancelled += 1

    def close(self) -> None:
        """End the thread; what has not run yet never will. Idempotent."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closed and not (self._heap and self._heap[0][0] <= time.monotonic_ns()):
                    wait = (self._heap[0][0] - time.monotonic_ns()) / 1e9 if self._heap else None
                    self._condition.wait(wait if wait is None else min(max(wait, 0.0), threading.TIMEOUT_MAX))
                if self._closed:
                    return
                timer = heapq.heappop(self._heap)[2]
            timer.run()
