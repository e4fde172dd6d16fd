"""The transfer thread: it moves bytes between files, host memory and the device, one job after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.serve.residency.handle import ModelWeights

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0
"""How long a server that stops waits for the job under way. Reading ends with its part, so more is a disk, or a device,
that does not answer."""

Outcome = BaseException | None
Then = Callable[[Outcome], None]


@dataclass(eq=False)
class Job:
    """Something that moves bytes.

    Attributes:
        move: called on the transfer thread.
        then: called on the dispatch thread with what `move` raised, or None.
        waits: weights that `move` frees; it has to wait until no batch uses them.
        target: weights that are on the device afterwards, unless it fails.
        running: the transfer thread has it.
    """

    move: Callable[[], None]
    then: Then
    waits: list[ModelWeights] = field(default_factory=list)
    target: ModelWeights | None = None
    running: bool = False


class Transfer:
    """Runs jobs on a thread of its own. `post` brings a callable to the dispatch thread.

    Attributes:
        left: `stop` did not wait for the end of a job. What it moves must not be freed until `is_alive` is False.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self.left = False
        self._post = post
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._busy = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rsrv-transfer", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Job) -> None:
        job.running = True
        self._jobs.put(job)

    def stop(self) -> None:
        """Return when the job that is under way has ended, or hangs: then its end is not told to anybody any more.

        Others are not begun.
        """
        if self._thread.ident is None:
            return
        self._jobs.put(None)
        self._thread.join(_PATIENCE_SECONDS)
        with self._lock:
            self.left = self._busy and self._thread.is_alive()
        if self.left:
            log.warning("weights are still being moved; the server stops all the same seconds=%g", _PATIENCE_SECONDS)
        else:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._busy = True
            outcome: Outcome = None
            try:
                job.move()
            except BaseException as error:
                outcome = error
            with self._lock:
                if self.left:
                    return
                self._busy = False
            # Not kept in this frame: a traceback holds views of memory that has to be unmapped.
            self._post(_ending(job, outcome))
            del job, outcome


def _ending(job: Job, outcome: Outcome) -> Callable[[], None]:
    return lambda: job.then(outcome)
