"""A log that tells of repeated failures once a second: a fleet that is down fails thousands of requests alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

_MOST = 1024
"""Kinds that are told apart; where there are more, all are forgotten, and told once more."""


class LogLimit:
    """Thread safe. At most one line per kind and `seconds`."""

    def __init__(self, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = Lock()
        self._kinds: dict[object, list[float]] = {}

    def take(self, kind: object) -> int | None:
        """None when a line of this kind was logged just now, else how many have been left out since the last one."""
        now = self._clock()
        with self._lock:
            found = self._kinds.get(kind)
            if found is None:
                if len(self._kinds) >= _MOST:
                    self._kinds.clear()
                self._kinds[kind] = [now + self._seconds, 0]
                return 0
            if now < found[0]:
                found[1] += 1
                return None
            left_out, found[:] = int(found[1]), [now + self._seconds, 0]
            return left_out
