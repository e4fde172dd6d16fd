"""The requests that one incarnation of a model has accepted and not finished; once closed, it accepts no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_R = TypeVar("_R")


class Accepted(Generic[_R]):
    """Thread safe. `on_idle` is called, on the thread of the request that left last, when a closed one has none."""

    __slots__ = ("_closed", "_lock", "_requests", "on_idle")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: set[_R] = set()
        self._closed = False
        self.on_idle: Callable[[], None] = lambda: None

    def enter(self, request: _R) -> bool:
        """Accept `request`; False when closed."""
        with self._lock:
            if self._closed:
                return False
            self._requests.add(request)
            return True

    def leave(self, request: _R) -> None:
        """`request` is finished, and nothing works on it any more; a second time does nothing."""
        with self._lock:
            if request not in self._requests:
                return
            self._requests.remove(request)
            idle = self._closed and not self._requests
        if idle:
            self.on_idle()

    def close(self) -> None:
        """Accept no more. `on_idle` is called at once when there is nothing."""
        with self._lock:
            self._closed = True
            idle = not self._requests
        if idle:
            self.on_idle()

    def open(self) -> None:
        """Undo `close`."""
        with self._lock:
            self._closed = False

    def requests(self) -> list[_R]:
        with self._lock:
            return list(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
