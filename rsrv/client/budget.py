"""The time that one request may take, whatever it has to do on the way."""

from __future__ import annotations

import time

from rsrv.core.errors import DeadlineExceeded


class Budget:
    """Counts down from `seconds` since it was made; without a limit for 0, a negative number or None."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds if seconds is not None and seconds > 0 else None
        self._end = None if self.seconds is None else time.monotonic() + self.seconds

    def remaining(self) -> float | None:
        """Seconds left, None without a limit; raises DeadlineExceeded when they are used up."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the deadline of {self.seconds:g} s passed before the request was sent")
        return left

    def at_most(self, seconds: float) -> float:
        """What is left, but no more than `seconds`: the timeout of a call that only prepares the request."""
        left = self.remaining()
        return seconds if left is None else min(left, seconds)
