"""Notices an execution that takes too long. Nothing is done to it: it is said, once, until it returns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.serve.scheduler.batch import Batch

logger = logging.getLogger(__name__)

_LOOKS = 4
"""How often the thread looks in the time that an execution may take."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """An execution beyond its time."""

    model: str
    batch_key: int
    age_seconds: float

    def __str__(self) -> str:
        return f"an execution of model {self.model!r} (batch key {self.batch_key}) runs for {self.age_seconds:.1f} s"


def stuck(batch: Batch | None, now_ns: int, timeout_ns: int) -> Stuck | None:
    """Whether the outstanding execution takes longer than `timeout_ns`."""
    if batch is None or now_ns - batch.launched_ns <= timeout_ns:
        return None
    return Stuck(batch.queue.model.name, batch.batch_key, (now_ns - batch.launched_ns) / 1e9)


class Watchdog:
    """Looks at the outstanding execution from a thread of its own, and says when it becomes stuck and when it returns.

    Args:
        outstanding: the batch that the device runs, None when it is free; read without a lock.
        timeout_seconds: how long an execution may take.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self, outstanding: Callable[[], Batch | None], timeout_seconds: float, clock: Callable[[], int]
    ) -> None:
        self._outstanding = outstanding
        self._timeout_ns = round(timeout_seconds * 1e9)
        self._clock = clock
        self._said: Batch | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rsrv-watchdog", daemon=True)
        self.on_change: Callable[[], None] = lambda: None

    @property
    def stuck(self) -> Stuck | None:
        """The execution that is stuck now."""
        return stuck(self._outstanding(), self._clock(), self._timeout_ns)

    def look(self) -> None:
        """Log an execution that became stuck, or that returned after all; each once."""
        batch = self._outstanding()
        found = stuck(batch, self._clock(), self._timeout_ns)
        if found is not None and batch is not self._said:
            self._said = batch
            logger.error("dispatch stuck model=%s key=%d age=%.1f", found.model, found.batch_key, found.age_seconds)
        elif found is None and self._said is not None:
            logger.warning("dispatch returned model=%s key=%d", self._said.queue.model.name, self._said.batch_key)
            self._said = None
        else:
            return
        self.on_change()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(min(max(self._timeout_ns / _LOOKS / 1e9, 0.01), 5.0)):
            try:
                self.look()
            except Exception:
                logger.exception("the watchdog could not look")
