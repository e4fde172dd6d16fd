"""The scheduler: accepts requests from any thread and settles each of them exactly once, from one dispatch thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rsrv.core.errors import DeviceError, ModelUnloaded, RsrvError, ServerStopping
from rsrv.core.staging import StagingPool
from rsrv.serve.scheduler.backlog import Backlog
from rsrv.serve.scheduler.batch import Batch, split, stage
from rsrv.serve.scheduler.launcher import Launcher
from rsrv.serve.scheduler.plan import Variant
from rsrv.serve.scheduler.queue import Dropped, ModelQueue, Result, Ticket
from rsrv.serve.scheduler.stats import BatchReport, ModelStats, reason_of

if TYPE_CHECKING:
    from rsrv.core.shm.tensor import Tensor
    from rsrv.runtime.device import Device
    from rsrv.serve.scheduler.model import ServableModel

logger = logging.getLogger(__name__)

QUICK_NS = 500_000
"""A program that takes less is run by the dispatch thread itself when the device is free: two hand-overs between
threads cost as much as a tiny program, and there is no time to stage a look-ahead in. Full batches that wait are run
one after the other for about as long before their replies go out: every reply wakes a thread that wants the GIL."""

Settled = list[tuple[Ticket, Result]]


class Scheduler:
    """Runs the requests of many models on one device: one execution at a time, the model with the oldest request first.

    Args:
        device: where programs run.
        max_queue_depth: most requests that wait for one model.
        clock: monotonic nanoseconds; deadlines are on this clock.
        on_batch: told of each dispatch on the dispatch thread, after its replies were delivered; must be quick.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_queue_depth: int = 1024,
        clock: Callable[[], int] = time.monotonic_ns,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> None:
        self._clock = clock
        self._on_batch = on_batch
        self._pool = StagingPool()
        # Guards everything below, and launcher and backlog; held to enqueue, choose, hand over and count, never longer.
        self._lock = threading.Lock()
        self._backlog = Backlog(max_queue_depth)
        self._launcher = Launcher(device, self._lock, clock, taken=self._wake_if_waiting, finished=self._wake)
        self._thread = threading.Thread(target=self._run, name="rsrv-dispatch", daemon=True)
        # A lock as a bell: the dispatch thread sleeps in acquire(); the cheapest wait that CPython has.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._sleeping = False
        self._threaded = False
        self._closed = False
        self._exit = False
        self._commands: deque[Callable[[], None]] = deque()
        # The dispatch thread alone: whether its last batch had room left, and what it ran itself and has not settled.
        self._unfilled = False
        self._ran: list[Batch] = []
        self._pending = 0
        self._drained: list[threading.Event] = []

    # --- called by any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both threads; requests submitted before wait until then."""
        with self._lock:
            if self._closed:
                raise ServerStopping("the scheduler was stopped and cannot start again")
            self._threaded = True
        self._launcher.start()
        self._thread.start()

    def add(self, model: ServableModel) -> None:
        """Accept requests for `model` from now on. Raises ValueError when its name is taken."""
        with self._lock:
            if self._closed:
                raise ServerStopping(f"model {model.name!r} cannot be added: the server is stopping")
            self._backlog.add(model)

    def remove(self, name: str, *, timeout: float | None = None) -> bool:
        """Stop serving `name`, settle what is queued for it with `ModelUnloaded`, and wait until no launch uses it.

        Returns whether that happened within `timeout` seconds: only then may its weights and programs be freed. An
        unknown name is True at once. Must not be called from a `done` callback, which runs on the thread it waits for.
        """
        with self._lock:
            queue = self._backlog.remove(name)
        if queue is None:
            return True
        settled = threading.Event()
        self._command(lambda: self._unload(queue, settled))
        return settled.wait(timeout)

    def submit(
        self,
        model: ServableModel,
        inputs: Mapping[str, Tensor],
        rows: int,
        variant: Variant,
        deadline_ns: int,
        done: Callable[[Result], None],
    ) -> Ticket:
        """Queue one request: `inputs` are the executable inputs, `rows` long along each one's batch axis.

        The arrays must not change until `done` is called, which happens exactly once, on the dispatch thread. `done`
        must be quick and must not wait. `deadline_ns` is absolute, 0 = none.

        Raises:
            InvalidRequest: no compiled program takes these inputs.
            ServerStopping, ModelUnloaded, DeadlineExceeded, QueueFull: refused; `done` is not called.
        """
        if self._closed:
            raise ServerStopping("the server is stopping")
        model.check(inputs, rows, variant)
        with self._lock:
            if self._closed:
                raise ServerStopping("the server is stopping")
            ticket = self._backlog.accept(model, inputs, rows, variant, deadline_ns, done, self._clock())
            self._pending += 1
            # With a batch staged nothing can be done until the device is free, so the dispatch thread may sleep on.
            if self._launcher.staged is None or self._backlog.dropped:
                self._wake()
        return ticket

    def stats(self) -> dict[str, ModelStats]:
        """A snapshot of every scheduled model, by name."""
        with self._lock:
            queues = [*self._backlog.queues.items()]
            return {name: q.counters.snapshot(name, q.model.incarnation, len(q.tickets)) for name, q in queues}

    def drain(self, grace: float) -> bool:
        """Wait up to `grace` seconds until every accepted request is settled; returns whether it is so."""
        drained = threading.Event()
        with self._lock:
            if not self._pending:
                return True
            self._drained.append(drained)
        return drained.wait(grace)

    def reject_all(self, error: BaseException) -> None:
        """Settle everything that no launch has yet with `error`."""
        self._command(lambda: self._revoke(error))

    def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, let accepted ones finish for `grace` seconds, then reject the rest. Idempotent.

        Rejected requests get `ServerStopping`. Returns when the running execution has ended, and both threads with it.
        """
        with self._lock:
            self._closed = True
            started = self._threaded
        if started:
            self.drain(grace)
        self._command(lambda: self._revoke(ServerStopping("the server is stopping")), last=True)
        if self._thread.ident is not None:
            self._thread.join()
            self._launcher.join()
        self._pool.close()

    def _command(self, command: Callable[[], None], *, last: bool = False) -> None:
        """Have `command` run on the dispatch thread before its next dispatch, or here when that thread is not there."""
        with self._lock:
            self._exit = self._exit or last
            threaded = self._threaded
            if threaded:
                self._commands.append(command)
                self._wake()
        if not threaded:
            command()

    def _wake(self) -> None:
        if self._sleeping:
            self._sleeping = False
            self._bell.release()

    def _wake_if_waiting(self) -> None:
        if self._backlog.waiting:
            self._wake()

    # --- the dispatch thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self._step():
                    return
            except BaseException as error:
                # A bug. Nobody may wait forever because of it, and the requests to come deserve a running loop.
                logger.exception("dispatch iteration failed")
                with contextlib.suppress(BaseException):
                    self._revoke(error)

    def _step(self) -> bool:
        """One iteration; False when it was the last."""
        launcher, backlog = self._launcher, self._backlog
        command: Callable[[], None] | None = None
        batch: Batch | None = None
        finished: list[Batch] = []
        if launcher.running is None:
            # Threads that are about to submit go first. Not a wait, and free when there are none; but with 8 clients of
            # a tiny model two looks make the batches twice as large, and the CPU per request a tenth smaller.
            os.sched_yield()
            os.sched_yield()
        with self._lock:
            if self._commands:
                command = self._commands.popleft()
            else:
                # A free device comes first, replies second, the look-ahead last.
                if launcher.running is None or not launcher.finished:
                    batch = self._choose()
                if launcher.finished:
                    finished, launcher.finished = launcher.finished, finished
            dropped = backlog.dropped
            if dropped:
                backlog.dropped = []
            asleep = not (command or batch or finished or dropped or self._ran)
            if asleep:
                if self._exit and launcher.running is None and launcher.staged is None:
                    self._threaded = False
                    launcher.stop()
                    return False
                self._sleeping = True
        if asleep:
            self._bell.acquire()
        if command:
            command()
        if batch:
            self._stage(batch)
        if self._ran and (batch is None or self._unfilled or sum(b.compute_ns for b in self._ran) > QUICK_NS):
            finished += self._ran
            self._ran = []
        for batch in finished:
            self._finish(batch)
        if dropped:
            self._drop(dropped)
        return True

    def _choose(self) -> Batch | None:
        """What to stage now, taken off its queue; None also when the slot before the device is taken. Lock held."""
        launcher, backlog = self._launcher, self._backlog
        staged, running = launcher.staged, launcher.running
        if running is not None and running.quick:
            return None
        if staged is None:
            return backlog.next(self._clock())
        if running is not None:
            return None
        # The device is free: what arrived behind the staged batch and fits runs with it.
        batch = None if staged.final else backlog.grow(staged)
        if batch is None:
            launcher.offer(staged)
        else:
            launcher.withdraw()
            staged.release(self._pool)
        return batch

    def _stage(self, batch: Batch) -> None:
        queue, key = batch.queue, batch.batch_key
        self._unfilled = not batch.final
        estimate_ns = queue.estimates_ns.get((batch.tickets[0].variant, key))
        batch.quick = estimate_ns is not None and estimate_ns < QUICK_NS
        try:
            batch.staged = stage(queue.model, batch.tickets, key, self._pool)
        except BaseException as error:
            batch.error = error
            self._finish(batch)
            return
        with self._lock:
            launcher = self._launcher
            inline = batch.quick and launcher.running is None
            if not inline:
                launcher.offer(batch)
        if inline:
            launcher.execute(batch)
            self._ran.append(batch)

    def _finish(self, batch: Batch) -> None:
        """Settle the requests of a batch that was launched, or could not be staged."""
        try:
            batch.release(self._pool)
            settled = self._outcome(batch)
        except BaseException as error:
            logger.exception("batch could not be settled model=%s", batch.queue.model.name)
            settled = [(ticket, Result(error=error)) for ticket in batch.tickets]
        self._deliver(settled, batch.queue)
        if self._on_batch is not None:
            try:
                self._on_batch(BatchReport.of(batch))
            except BaseException:
                logger.exception("batch observer failed model=%s", batch.queue.model.name)

    def _outcome(self, batch: Batch) -> Settled:
        """Cut the results and count. Requests that will be re-run alone are left out."""
        queue, tickets, key = batch.queue, batch.tickets, batch.batch_key
        replies: list[dict[str, np.ndarray]] = []
        if batch.error is None and batch.outputs is not None:
            try:
                replies = split(queue.model, batch.outputs, [ticket.rows for ticket in tickets], key)
            except DeviceError as mismatch:
                batch.error = mismatch
        if batch.error is not None or batch.dropped:
            return self._partial_outcome(batch, replies)
        launched, compute, rows = batch.launched_ns, batch.compute_ns, batch.live_rows
        waits = [launched - ticket.enqueued_ns for ticket in tickets]
        with self._lock:
            queue.counters.record(key, rows, key - rows if key else 0, compute, waits)
            queue.measured(tickets[0].variant, key, compute)
        return [
            (ticket, Result(reply, None, wait, compute, key, rows))
            for ticket, reply, wait in zip(tickets, replies, waits, strict=True)
        ]

    def _partial_outcome(self, batch: Batch, replies: Sequence[dict[str, np.ndarray]]) -> Settled:
        """`_outcome` of a batch that failed, or of which requests were dropped at the launch."""
        queue, key, error, dropped = batch.queue, batch.batch_key, batch.error, batch.dropped or {}
        live, rows, retried = batch.live, batch.live_rows, False
        if error is not None:
            level = logging.WARNING if isinstance(error, RsrvError) else logging.ERROR
            message = "dispatch failed model=%s key=%d requests=%d"
            logger.log(level, message, queue.model.name, key, len(live), exc_info=error)
        with self._lock:
            for verdict in dropped.values():
                queue.counters.dropped[verdict.reason] += 1
            if error is not None:
                queue.counters.errors[reason_of(error)] += 1
                # One bad request must not fail its neighbours; but what a broken device fails, it would fail again.
                if len(batch.tickets) > 1 and not isinstance(error, DeviceError) and not (queue.removed or self._exit):
                    self._backlog.retry(queue, live)
                    retried = True
            elif live:
                waits = [batch.launched_ns - ticket.enqueued_ns for ticket in live]
                queue.counters.record(key, rows, key - rows if key else 0, batch.compute_ns, waits)
        settled: Settled = []
        for position, ticket in enumerate(batch.tickets):
            waited = max(batch.launched_ns - ticket.enqueued_ns, 0)
            if position in dropped:
                settled.append((ticket, Result(error=dropped[position], queue_ns=waited)))
            elif error is None:
                settled.append((ticket, Result(replies[position], None, waited, batch.compute_ns, key, rows)))
            elif not retried:
                settled.append((ticket, Result(None, error, waited, batch.compute_ns, key, rows)))
        return settled

    def _drop(self, dropped: list[Dropped]) -> None:
        """Settle requests that never ran, each with its error."""
        now = self._clock()
        with self._lock:
            for ticket, error in dropped:
                ticket.queue.counters.dropped[reason_of(error)] += 1
        self._deliver([(ticket, Result(error=error, queue_ns=now - ticket.enqueued_ns)) for ticket, error in dropped])

    def _deliver(self, settled: Settled, queue: ModelQueue | None = None) -> None:
        """Call every `done`; then one batch of `queue` is no longer in flight."""
        delivered = 0
        for ticket, result in settled:
            done, ticket.done = ticket.done, None
            if done is None:
                continue
            delivered += 1
            try:
                done(result)
            except BaseException:
                logger.exception("done callback failed model=%s", ticket.queue.model.name)
        with self._lock:
            self._pending -= delivered
            if not self._pending and self._drained:
                _set(self._drained)
            if queue is not None:
                queue.in_flight -= 1
                if not queue.in_flight and queue.settled:
                    _set(queue.settled)

    def _revoke(self, error: BaseException, only: ModelQueue | None = None) -> None:
        """Settle with `error` what no launch has yet: of one queue, or of all."""
        staged = None
        with self._lock:
            tickets = self._backlog.clear(only)
            if self._launcher.staged is not None and only in (None, self._launcher.staged.queue):
                staged = self._launcher.withdraw()
        if staged is not None:
            staged.release(self._pool)
            self._drop([(ticket, error) for ticket in staged.tickets])
            self._deliver([], staged.queue)
        self._drop([(ticket, error) for ticket in tickets])

    def _unload(self, queue: ModelQueue, settled: threading.Event) -> None:
        self._revoke(ModelUnloaded(f"model {queue.model.name!r} was unloaded while the request waited"), queue)
        with self._lock:
            queue.settled.append(settled)
            if not queue.in_flight:
                _set(queue.settled)


def _set(events: list[threading.Event]) -> None:
    for event in events:
        event.set()
    events.clear()
