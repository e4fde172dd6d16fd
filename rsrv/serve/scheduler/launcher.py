"""The device thread: it takes the staged batch when the device is free, runs it, and waits for its results.

It touches neither queues nor counters. The one slot in front of it holds the batch that runs next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rsrv.serve.scheduler.batch import Batch

if TYPE_CHECKING:
    from rsrv.runtime.device import Buffer, Device

logger = logging.getLogger(__name__)


class Launcher:
    """Owner of the device thread and of the one outstanding `Launch`.

    Args:
        device: where programs run.
        lock: the scheduler's lock; everything public here is called with it held, except `start` and `join`.
        clock: monotonic nanoseconds.
        taken, finished: called with the lock held when the staged batch is taken, and when it has run.

    Attributes:
        staged: the batch in the slot.
        running: what the device thread has taken.
        finished: what it ran and nobody has settled.
        outstanding: what the device executes now, whichever thread launched it; may be read without the lock.
    """

    def __init__(
        self,
        device: Device,
        lock: threading.Lock,
        clock: Callable[[], int],
        *,
        taken: Callable[[], None],
        finished: Callable[[], None],
    ) -> None:
        self._device = device
        self._lock = lock
        self._clock = clock
        self._on_taken = taken
        self._on_finished = finished
        self._thread = threading.Thread(target=self._run, name="rsrv-device", daemon=True)
        # A lock as a bell: the device thread sleeps in acquire(), whoever has work for it releases.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._sleeping = False
        self._exit = False
        self.staged: Batch | None = None
        self.running: Batch | None = None
        self.finished: list[Batch] = []
        self.outstanding: Batch | None = None

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        """Leave after the running batch."""
        self._exit = True
        self._ring()

    def offer(self, batch: Batch) -> None:
        """Make `batch` the next one. While the device is free nothing is gained by waiting for more requests."""
        self.staged = batch
        if self.running is None:
            batch.final = True
            self._ring()

    def withdraw(self) -> Batch | None:
        """Take the staged batch back, if the device thread has not got it yet."""
        batch, self.staged = self.staged, None
        return batch

    def _ring(self) -> None:
        if self._sleeping:
            self._sleeping = False
            self._bell.release()

    def _next(self) -> Batch | None:
        batch = self.staged
        # With requests behind it that may join, the dispatch thread plans it again first.
        if batch is None or batch.recalled or not (batch.final or not batch.queue.tickets):
            return None
        self.running, self.staged = batch, None
        self._on_taken()
        return batch

    def _run(self) -> None:
        batch: Batch | None = None
        while True:
            with self._lock:
                if batch is not None:
                    self.running = None
                    self.finished.append(batch)
                    self._on_finished()
                batch = self._next()
                if batch is None:
                    if self._exit:
                        return
                    self._sleeping = True
            if batch is None:
                self._bell.acquire()
                continue
            self.execute(batch)

    def execute(self, batch: Batch) -> None:
        """Launch `batch` and wait for it: its `outputs`, `error` and times say what happened. Never raises."""
        batch.launched_ns = started = self._clock()
        self.outstanding = batch
        try:
            self._execute(batch, started)
        except BaseException as error:
            batch.error = error
        self.outstanding = None
        batch.compute_ns = self._clock() - started

    def _execute(self, batch: Batch, started: int) -> None:
        last_start = started + batch.margin_ns
        for position, ticket in enumerate(batch.tickets):
            if ticket.cancelled or 0 < ticket.deadline_ns <= last_start:
                verdict = ticket.verdict(started, batch.margin_ns)
                if verdict is not None:
                    batch.dropped = batch.dropped or {}
                    batch.dropped[position] = verdict
        if batch.dropped and len(batch.dropped) == len(batch.tickets):
            return
        assert batch.staged is not None
        device, model = self._device, batch.queue.model
        # Read once: they may be exchanged at any time.
        programs = batch.programs = model.programs
        executable = programs[batch.tickets[0].variant][batch.batch_key]
        buffers: list[Buffer] = []
        try:
            for array, alias in batch.staged.inputs:
                buffers.append(device.put(array, alias=alias))
            batch.upload_ns = self._clock() - started
            launch = device.launch(executable, [*buffers, *model.weights.buffers])
            batch.outputs = launch.result()
            batch.download_ns = launch.download_ns
        finally:
            try:
                device.free(buffers)
            except Exception:
                # A block that a live buffer may alias must never be lent again. The results are good all the same.
                batch.staged = None
                logger.exception("inputs could not be freed model=%s key=%d", model.name, batch.batch_key)
