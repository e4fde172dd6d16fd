"""The time that one request may take, whatever it has to do on the way."""

from __future__ import annotations

import time
from collections.abc import Callable

from rsrv.core.errors import DeadlineExceeded

SETUP_SECONDS = 10.0
"""The most that one call may take which only prepares requests."""


class Budget:
    """Counts down from `seconds` since it was made; without a limit for 0, a negative number or None."""

    __slots__ = ("_clock", "_end", "seconds")

    def __init__(self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds = seconds if seconds is not None and seconds > 0 else None
        self._end = None if self.seconds is None else clock() + self.seconds

    def resumed(self, left: float | None) -> Budget:
        """The same request's, with the seconds `left` from now on: what took the time meanwhile was not the request."""
        again = Budget(left, clock=self._clock)
        again.seconds = self.seconds
        return again

    @property
    def left(self) -> float | None:
        """Seconds left, 0 or less when they are used up, None without a limit."""
        return None if self._end is None else self._end - self._clock()

    def remaining(self) -> float | None:
        """Seconds left, None without a limit; raises DeadlineExceeded when they are used up."""
        left = self.left
        if left is not None and left <= 0:
            raise DeadlineExceeded(f"the deadline of {self.seconds:g} s passed before the request was sent")
        return left

    def end(self) -> float | None:
        """When it is used up, on the clock, None without a limit; raises DeadlineExceeded when that has passed."""
        self.remaining()
        return self._end

    def at_most(self, seconds: float) -> float:
        """What is left, but no more than `seconds`: the timeout of a call that only prepares the request."""
        left = self.remaining()
        return seconds if left is None else min(left, seconds)
