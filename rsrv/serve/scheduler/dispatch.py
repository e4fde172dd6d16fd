"""The dispatch thread: it takes requests off the queues, merges them, keeps the device busy, and settles what ran."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rsrv.core.errors import DeviceLost, ServerStopping
from rsrv.core.staging import StagingPool
from rsrv.serve.scheduler.backlog import Backlog
from rsrv.serve.scheduler.batch import Batch, stage
from rsrv.serve.scheduler.launcher import Launcher
from rsrv.serve.scheduler.queue import Dropped, ModelQueue, Result, Ticket
from rsrv.serve.scheduler.settle import Settled, count, cut, discard, may_retry, results
from rsrv.serve.scheduler.stats import BatchReport

if TYPE_CHECKING:
    from rsrv.runtime.device import Device
    from rsrv.serve.scheduler.model import Weights
    from rsrv.serve.scheduler.oversize import Joined
    from rsrv.serve.scheduler.policy import Policy
    from rsrv.serve.scheduler.settle import Replies
    from rsrv.serve.scheduler.tap import Tap

logger = logging.getLogger(__name__)

QUICK_NS = 500_000
"""A program that takes less is run by the dispatch thread itself when the device is free: two hand-overs between
threads cost as much as a tiny program, and there is no time to stage a look-ahead in. Full batches that wait are run
one after the other for about as long before their replies go out: every reply wakes a thread that wants the GIL."""


class Mover(Protocol):
    """Whoever brings weights to the device and takes them away; called on the dispatch thread, without the lock."""

    def used(self, weights: Weights) -> None:
        """A batch that uses `weights` is about to be staged."""
        ...

    def look(self, wanted: Sequence[ModelQueue], released: Sequence[Weights]) -> None:
        """Queues became cold, weights that are leaving are no longer used, requests went away, or a command ran.

        Must not block.
        """
        ...


class Dispatcher:
    """The thread, and all state that it shares with those who submit.

    Attributes:
        lock: guards everything here, and launcher and backlog; held to enqueue, choose, hand over and count, never
            longer.
        pending: accepted requests that are not settled.
        mover: None while all weights are resident for good.
        on_lost: told, on the dispatch thread, of each batch that found the device gone.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        clock: Callable[[], int],
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.backlog = Backlog(policy, clock())
        self.launcher = Launcher(device, self.lock, clock, taken=self._wake_if_waiting, finished=self.wake)
        self.pool = StagingPool()
        self.pending = 0
        self.mover: Mover | None = None
        self.drained: list[threading.Event] = []
        self.on_lost: Callable[[DeviceLost], None] = lambda error: None
        self._edf = policy.discipline == "edf"
        self._on_batch = on_batch
        self._thread = threading.Thread(target=self._run, name="rsrv-dispatch", daemon=True)
        # A lock as a bell: the dispatch thread sleeps in acquire(); the cheapest wait that CPython has.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._sleeping = False
        self._threaded = False
        self._exit = False
        self._commands: deque[Callable[[], None]] = deque()
        self._merging: Batch | None = None
        # The dispatch thread alone: whether its last batch had room left, and what it ran itself and has not settled.
        self._unfilled = True
        self._ran: list[Batch] = []
        self._ran_ns = 0

    # --- called by any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        with self.lock:
            self._threaded = True
        self.launcher.start()
        self._thread.start()

    def command(self, command: Callable[[], None], *, last: bool = False) -> None:
        """Have `command` run on the dispatch thread before its next dispatch, or here when that thread is not there."""
        with self.lock:
            self._exit = self._exit or last
            threaded = self._threaded
            if threaded:
                self._commands.append(command)
                self.wake()
        if not threaded:
            command()

    def join(self) -> None:
        """Wait for the end of both threads after the last command, and close."""
        if self._thread.ident is not None:
            self._thread.join()
            self.launcher.join()
        self.pool.close()

    @property
    def started(self) -> bool:
        return self._threaded

    # --- called with the lock held ------------------------------------------------------------------------------------

    def wake(self) -> None:
        if self._sleeping:
            self._sleeping = False
            self._bell.release()

    def arrived(self, ticket: Ticket) -> None:
        """A request was queued."""
        self.pending += 1
        ticket.queue.pending += 1
        staged = self.ahead
        # With a batch staged nothing can be done until the device is free, so the dispatch thread may sleep on.
        if staged is None or self.backlog.dropped:
            self.wake()
        elif self.backlog.precedes(ticket, staged):
            self.recall(staged)

    def resume(self, queue: ModelQueue, joined: Joined) -> None:
        """The pieces of a request have to run once more. On the dispatch thread."""
        if self._exit:
            raise ServerStopping("the server is stopping")
        joined.restart(queue.selections)
        self.backlog.resume(queue, joined.tickets)
        self.pending += len(joined.tickets)
        queue.pending += len(joined.tickets)

    @property
    def ahead(self) -> Batch | None:
        """What runs next as things are: the staged batch, or the one that is being merged now."""
        staged = self.launcher.staged
        return self._merging if staged is None else staged

    def recall(self, staged: Batch) -> None:
        """Plan the batch that is `ahead` again, unless the device thread is about to take it."""
        if self.launcher.running is not None:
            staged.recalled = True
            self.wake()

    def look_finished(self, queue: ModelQueue) -> None:
        """Whether nothing of a closed queue is left; then those who wait for that are told."""
        if not (queue.pending or queue.in_flight) and queue in self.backlog.roster.closing:
            self.backlog.roster.finished(queue)
            _set(queue.settled)

    def _wake_if_waiting(self) -> None:
        if self.backlog.waiting or self.backlog.due_ns is not None:
            self.wake()

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
                    self.revoke(error)

    def _step(self) -> bool:
        """One iteration; False when it was the last."""
        launcher, backlog = self.launcher, self.backlog
        command: Callable[[], None] | None = None
        batch: Batch | None = None
        finished: list[Batch] = []
        wanted: list[ModelQueue] = []
        released: list[Weights] = []
        if self._unfilled and launcher.running is None:
            # Threads that are about to submit go first. Not a wait, and free when there are none; but with 8 clients of
            # a tiny model two looks make the batches twice as large, and the CPU per request a tenth smaller. Batches
            # that are full as it is gain nothing, and on a machine that is short of cores every look can cost a slice.
            os.sched_yield()
            os.sched_yield()
        with self.lock:
            if self._commands:
                command = self._commands.popleft()
            else:
                # A free device comes first, replies second, the look-ahead last.
                if launcher.running is None or not launcher.finished:
                    batch = self._choose()
                if launcher.finished:
                    finished, launcher.finished = launcher.finished, finished
            self._merging = batch
            dropped = backlog.dropped
            if dropped:
                backlog.dropped = []
            if backlog.wanted:
                wanted, backlog.wanted = backlog.wanted, wanted
            if backlog.released:
                released, backlog.released = backlog.released, released
            asleep = not (command or batch or finished or dropped or self._ran or wanted or released)
            if asleep:
                if self._exit and launcher.running is None and launcher.staged is None:
                    self._threaded = False
                    launcher.stop()
                    return False
                self._sleeping = True
                # With a batch staged nothing is chosen before it is taken, which rings.
                due_ns = None if launcher.staged is not None else backlog.due_ns
        if asleep:
            self._sleep(due_ns)
        if command:
            command()
        if batch:
            self._stage(batch)
        if self._ran and (batch is None or self._unfilled or self._ran_ns > QUICK_NS):
            finished += self._ran
            self._ran, self._ran_ns = [], 0
        for batch in finished:
            self._finish(batch)
        if dropped:
            self._drop(dropped)
        if self.mover is not None and (wanted or released or dropped or command):
            self.mover.look(wanted, released)
        return True

    def _sleep(self, until_ns: int | None) -> None:
        """Sleep until somebody rings, or until then."""
        if until_ns is None:
            self._bell.acquire()
            return
        if not self._bell.acquire(timeout=max(until_ns - self.clock(), 0) / 1e9):
            with self.lock:
                if self._sleeping:
                    self._sleeping = False
                    return
            # Somebody rang between the two.
            self._bell.acquire()

    def _choose(self) -> Batch | None:
        """What to stage now, taken off its queue; None also when the slot before the device is taken. Lock held."""
        launcher, backlog = self.launcher, self.backlog
        staged, running = launcher.staged, launcher.running
        if running is not None and running.quick:
            return None
        now_ns = self.clock()
        if staged is not None and staged.recalled:
            launcher.withdraw()
            staged.release(self.pool)
            backlog.put_back(staged)
            staged = None
        if staged is None:
            busy_ns = 0
            if running is not None and self._edf:
                spent_ns = now_ns - running.launched_ns if running.launched_ns else 0
                busy_ns = running.queue.costs.remaining_ns(running.tickets[0].variant, running.batch_key, spent_ns)
            return backlog.next(now_ns, busy_ns)
        if running is not None:
            return None
        # The device is free: what arrived behind the staged batch and fits runs with it.
        batch = None if staged.final else backlog.grow(staged, now_ns)
        if batch is None:
            launcher.offer(staged)
        else:
            launcher.withdraw()
            staged.release(self.pool)
        return batch

    def _stage(self, batch: Batch) -> None:
        queue, key, variant = batch.queue, batch.batch_key, batch.tickets[0].variant
        self._unfilled = not batch.final
        fastest_ns = queue.costs.fastest_ns(variant, key)
        batch.quick = fastest_ns is not None and fastest_ns < QUICK_NS
        if self.mover is not None:
            self.mover.used(queue.model.weights)
        if self._edf:
            batch.margin_ns = queue.costs.margin_ns(variant, key, self.clock())
        try:
            batch.staged = stage(queue.model, batch.tickets, key, self.pool)
        except BaseException as error:
            batch.error = error
            self._finish(batch)
            return
        launcher = self.launcher
        # Without the lock: the device thread takes what this one offers, and nothing else.
        if batch.quick and launcher.running is None and launcher.staged is None:
            launcher.execute(batch)
            self._ran.append(batch)
            self._ran_ns += batch.compute_ns
        else:
            with self.lock:
                self._merging = None
                launcher.offer(batch)

    def _finish(self, batch: Batch) -> None:
        """Settle the requests of a batch that was launched, or could not be staged."""
        queue = batch.queue
        try:
            if queue.discard is not None:
                batch.release(self.pool)
                discard(batch, queue.discard)
                replies: Replies = []
            elif queue.tap is None:
                batch.release(self.pool)
                replies = cut(batch)
            else:
                replies = self._cut_and_sample(batch, queue.tap)
            with self.lock:
                retried = self._record(batch)
            settled = results(batch, replies, retried=retried)
        except BaseException as error:
            logger.exception("batch could not be settled model=%s", queue.model.name)
            settled = [(ticket, Result(error=error)) for ticket in batch.tickets]
        self._deliver(settled, queue, ended=True)
        if batch.error is not None and isinstance(batch.error, DeviceLost):
            self.on_lost(batch.error)
        if self._on_batch is not None:
            try:
                self._on_batch(BatchReport.of(batch))
            except BaseException:
                logger.exception("batch observer failed model=%s", batch.queue.model.name)

    def _cut_and_sample(self, batch: Batch, tap: Tap) -> Replies:
        try:
            replies = cut(batch)
            # What other programs gave that were exchanged meanwhile is no reference any more.
            if batch.error is None and batch.outputs is not None and batch.programs is batch.queue.model.programs:
                tap.offer(batch)
        finally:
            batch.release(self.pool)
        return replies

    def _record(self, batch: Batch) -> bool:
        """Count `batch`; whether its requests will be run again, one by one. Lock held."""
        count(batch)
        queue, backlog = batch.queue, self.backlog
        if batch.launched_ns:
            now_ns = batch.launched_ns + batch.compute_ns
            # Time that a failure took was used as well, but says nothing about the program.
            backlog.shares.charge(queue.account, batch.compute_ns / 1e9, now_ns)
            # A run of programs that were exchanged meanwhile says nothing about those that took their place.
            if batch.error is None and batch.outputs is not None and batch.programs is queue.model.programs:
                backlog.measured(queue, batch.tickets[0].variant, batch.batch_key, batch.compute_ns, now_ns)
        if batch.error is not None and may_retry(batch) and queue.refusal is None and not self._exit:
            backlog.retry(queue, batch.live)
            return True
        return False

    def _drop(self, dropped: Sequence[Dropped]) -> None:
        """Settle requests that never ran, each with its error."""
        now_ns = self.clock()
        by_queue: dict[ModelQueue, Settled] = {}
        with self.lock:
            for ticket, reason, error in dropped:
                ticket.queue.counters.dropped[reason] += 1
                result = Result(error=error, queue_ns=now_ns - ticket.enqueued_ns)
                by_queue.setdefault(ticket.queue, []).append((ticket, result))
        for queue, settled in by_queue.items():
            self._deliver(settled, queue)

    def _deliver(self, settled: Settled, queue: ModelQueue, *, ended: bool = False) -> None:
        """Call every `done` of requests of `queue`; `ended`: and then one of its batches is no longer in flight."""
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
        with self.lock:
            self.pending -= delivered
            queue.pending -= delivered
            if ended:
                self.backlog.settled(queue)
            if queue.closed:
                self.look_finished(queue)
            if not self.pending and self.drained:
                _set(self.drained)

    # --- commands -----------------------------------------------------------------------------------------------------

    def revoke(self, error: BaseException, only: ModelQueue | None = None) -> None:
        """Settle with `error` what no launch has yet: of one queue, or of all."""
        staged = None
        with self.lock:
            tickets = self.backlog.clear(self.clock(), only)
            if self.launcher.staged is not None and only in (None, self.launcher.staged.queue):
                staged = self.launcher.withdraw()
        if staged is not None:
            staged.release(self.pool)
            self._drop([Dropped.because(ticket, error) for ticket in staged.tickets])
            self._deliver([], staged.queue, ended=True)
        self._drop([Dropped.because(ticket, error) for ticket in tickets])

    def finish(self) -> None:
        """End both threads after the running batch; what has not been launched by then is refused."""
        self.command(lambda: self.revoke(ServerStopping("the server is stopping")), last=True)
        self.join()


def _set(events: list[threading.Event]) -> None:
    for event in events:
        event.set()
    events.clear()
