"""The budget of second attempts: a share of the traffic, so that servers in trouble are not asked everything twice."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

_SLICES = 10
_HEDGES = 0.5
"""Share of the budget at which no request is hedged any more."""
_LOOK_EVERY = 32
"""Requests after which the clock is looked at; fewer in a window than that earn next to nothing."""


class AttemptBudget:
    """Second attempts in the last window ≤ ``minimum`` + ``ratio`` × requests in it. Thread safe.

    The window moves in tenths, so that what counts is a list of twenty numbers.
    """

    def __init__(self, *, ratio: float, minimum: float, window_seconds: float, clock: Callable[[], float]) -> None:
        self._ratio = ratio
        self._minimum = minimum
        self._window_seconds = window_seconds
        self._clock = clock
        self._lock = Lock()
        self._requests = [0] * _SLICES
        self._retries = [0] * _SLICES
        self._slice = self._now()
        self._present = 0
        """Requests of the present slice, which the request path counts without a lock."""
        self.total = 0
        """Second attempts so far, hedges included."""
        self.refused = 0
        """Second attempts that there was no budget for."""

    def request(self) -> None:
        """A request has come in. A lost update, when two threads count at once, makes the budget a little smaller."""
        self._present += 1
        if self._present % _LOOK_EVERY == 0:
            with self._lock:
                self._advance()

    def take(self, *, hedge: bool = False) -> bool:
        """Whether a second attempt may be made now; counts it. One that is only to be quicker (`hedge`) leaves half of
        the budget to those without which a client gets an error."""
        with self._lock:
            self._advance()
            allowed = self._minimum + self._ratio * (sum(self._requests) + self._present)
            if sum(self._retries) + 1 > (allowed * _HEDGES if hedge else allowed):
                self.refused += not hedge
                return False
            self._retries[self._slice % _SLICES] += 1
            self.total += 1
            return True

    def _now(self) -> int:
        return int(self._clock() / self._window_seconds * _SLICES)

    def _advance(self) -> None:
        now = self._now()
        if now == self._slice:
            return
        present, self._present = self._present, 0
        self._requests[self._slice % _SLICES] = present
        for passed in range(self._slice + 1, min(now, self._slice + _SLICES) + 1):
            self._requests[passed % _SLICES] = 0
            self._retries[passed % _SLICES] = 0
        if now - self._slice > _SLICES:
            self._requests, self._retries = [0] * _SLICES, [0] * _SLICES
        self._slice = now
