"""One question to many workers at once, on the channels that are kept for questions, with a watchdog over all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from rsrv.core.errors import Code
from rsrv.gateway.workers.outcome import Outcome

if TYPE_CHECKING:
    from rsrv.gateway.timers import Timers
    from rsrv.gateway.workers.worker import ControlCall, Worker

PROBE_SECONDS = 5.0
"""Deadline of one question."""
WATCHDOG = 1.6
"""The watchdog ends a question after this many deadlines (8 s): a client stack that is stuck keeps no deadline."""

_GIVEN_UP = Outcome(Code.CANCELLED, text="no answer, and no end of the call either")

log = logging.getLogger(__name__)


class Survey:
    """Asks when it is made; the body is empty, which all these questions have. Thread safe.

    `on_all` gets the outcomes once, when all are there, on any thread, possibly before the constructor returns.

    Attributes:
        outcomes: worker's address → how its call ended, of those that are over.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        path: str,
        *,
        timers: Timers,
        seconds: float = PROBE_SECONDS,
        on_all: Callable[[dict[str, Outcome]], None] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._on_all = on_all
        asked = tuple(workers)
        self._left = {worker.url for worker in asked}
        self._calls: list[ControlCall] = []
        self.outcomes: dict[str, Outcome] = {}
        self._watchdog = timers.after(seconds * WATCHDOG, self.give_up)
        if not asked:
            self._finish()
        for worker in asked:
            try:
                self._calls.append(worker.probe(path, b"", timeout=seconds, done=partial(self._ended, worker.url)))
            except Exception as error:
                log.exception("a probe could not be started worker=%s", worker.name)
                self._ended(worker.url, Outcome(Code.INTERNAL, text=str(error), sent=False))

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all calls are over, at most so long; whether they are."""
        return self._over.wait(seconds)

    def give_up(self) -> None:
        """End what is not over, as cancelled."""
        with self._lock:
            left = list(self._left)
        for url in left:
            self._ended(url, _GIVEN_UP)
        for call in self._calls:
            call.cancel()

    def _ended(self, url: str, outcome: Outcome) -> None:
        with self._lock:
            if url not in self._left:
                return
            self._left.discard(url)
            self.outcomes[url] = outcome
            last = not self._left
        if last:
            self._finish()

    def _finish(self) -> None:
        self._watchdog.cancel()
        self._over.set()
        if self._on_all is not None:
            self._on_all(dict(self.outcomes))
