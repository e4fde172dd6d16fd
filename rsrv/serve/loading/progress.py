"""How far the loading is, counted in programs: a model may have one, or fifty that take a minute each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Origin = Literal["cache", "compiled", "shared"]
"""Where an executable came from; `shared` = another model brought the same program along."""


@dataclass(frozen=True, slots=True)
class ProgramCounts:
    """Programs of the bundles that were opened, and how many of them are ready, by origin."""

    total: int = 0
    cache: int = 0
    compiled: int = 0
    shared: int = 0
    compile_seconds: float = 0.0

    @property
    def done(self) -> int:
        return self.cache + self.compiled + self.shared

    def __str__(self) -> str:
        found = f", {self.cache} from cache" if self.cache else ""
        return f"compiled {self.done}/{self.total}{found}"


class LoadProgress:
    """Thread safe. `on_change` is called after every change, on the thread that made it."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._counts = ProgramCounts()
        self.on_change = on_change

    @property
    def counts(self) -> ProgramCounts:
        return self._counts

    def expect(self, programs: int) -> None:
        with self._lock:
            self._counts = replace(self._counts, total=self._counts.total + programs)
        self.on_change()

    def done(self, origin: Origin, compile_seconds: float = 0.0) -> None:
        with self._lock:
            counts = self._counts
            changes = {origin: getattr(counts, origin) + 1, "compile_seconds": counts.compile_seconds + compile_seconds}
            done = replace(counts, **changes)
            # Nobody says before how many programs of later versions there will be.
            self._counts = replace(done, total=max(done.total, done.done))
        self.on_change()
