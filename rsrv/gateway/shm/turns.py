"""Whose turn it is: operations on names, one at a time per name, so that all workers see them in the same order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rsrv.core.errors import Shed

EVERY_NAME = ""
"""The name of an operation that concerns all names: it waits for all before it, and all after it wait for it."""


@dataclass(eq=False, slots=True)
class Turn:
    """A place in the line; `begin` is called when it has come, and the owner leaves when the operation has ended."""

    name: str
    begin: Callable[[], None]
    begun: bool = False


class Turns:
    """First come, first served, per name. Thread safe; `begin` is called without a lock and must be quick.

    At most `limit` operations are in line, those that have begun included.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._line: list[Turn] = []
        self._starting = False

    def take(self, turn: Turn) -> None:
        """Stand in line; `begin` may be called before this returns. Raises Shed."""
        with self._lock:
            if len(self._line) >= self._limit:
                raise Shed(f"{len(self._line)} operations on shared memory are open; at most {self._limit} may be")
            self._line.append(turn)
        self._begin_what_may()

    def leave(self, turn: Turn) -> None:
        """Called once by every turn that has begun."""
        with self._lock:
            self._line.remove(turn)
        self._begin_what_may()

    def _begin_what_may(self) -> None:
        # A loop instead of each turn beginning the next: a long line that ends at once must not become a deep stack.
        while True:
            with self._lock:
                turn = None if self._starting else self._next()
                if turn is None:
                    return
                turn.begun = self._starting = True
            try:
                turn.begin()
            finally:
                with self._lock:
                    self._starting = False

    def _next(self) -> Turn | None:
        """The first turn that nothing before it stands in the way of. Under the lock."""
        before: set[str] = set()
        for turn in self._line:
            if not turn.begun and not self._blocked(turn.name, before):
                return turn
            before.add(turn.name)
        return None

    @staticmethod
    def _blocked(name: str, before: set[str]) -> bool:
        return bool(before) if name == EVERY_NAME else not before.isdisjoint((name, EVERY_NAME))
