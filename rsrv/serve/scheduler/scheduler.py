"""What the rest of the worker calls: models come and go, requests are accepted, and each is settled exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rsrv.core.errors import DeviceLost, InvalidRequest, ModelUnloaded, ServerStopping
from rsrv.serve.scheduler.dispatch import Dispatcher, Mover
from rsrv.serve.scheduler.oversize import Joined, pieces
from rsrv.serve.scheduler.plan import Variant
from rsrv.serve.scheduler.policy import Policy, require_max_batch_size, require_weight
from rsrv.serve.scheduler.queue import ModelQueue, Result, Ticket
from rsrv.serve.scheduler.stats import BatchReport, ModelStats, snapshot
from rsrv.serve.scheduler.tap import Sample, Tap
from rsrv.serve.scheduler.watchdog import Stuck, Watchdog

if TYPE_CHECKING:
    from rsrv.core.shm.tensor import Tensor
    from rsrv.core.staging import StagingPool
    from rsrv.runtime.device import Device
    from rsrv.serve.scheduler.model import ServableModel, Weights


class Scheduler:
    """Runs the requests of many models on one device, one execution at a time. Thread safe.

    Args:
        device: where programs run.
        policy: how to choose, and what to let in.
        clock: monotonic nanoseconds; deadlines are on this clock.
        on_batch: told of each dispatch on the dispatch thread, after its replies were delivered; must be quick.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy = Policy(),  # noqa: B008
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> None:
        self.policy = policy
        self._clock = clock
        self._dispatcher = dispatcher = Dispatcher(device, policy, clock, on_batch)
        self._lock = dispatcher.lock
        self._backlog = dispatcher.backlog
        self._watchdog = Watchdog(lambda: dispatcher.launcher.outstanding, policy.dispatch_timeout_seconds, clock)
        self._implicit_ns = round(policy.dispatch_timeout_seconds * 1e9) if policy.implicit_deadline else 0
        self._closed = False

    # --- the life of a server -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads; requests submitted before wait until then."""
        if self._closed:
            raise ServerStopping("the scheduler was stopped and cannot start again")
        self._dispatcher.start()
        self._watchdog.start()

    def drain(self, grace: float) -> bool:
        """Wait up to `grace` seconds until every accepted request is settled; returns whether it is so."""
        drained = threading.Event()
        with self._lock:
            if not self._dispatcher.pending:
                return True
            self._dispatcher.drained.append(drained)
        return drained.wait(grace)

    def hurry(self) -> None:
        """Close all batching windows, those to come as well: nobody who stops should wait for company."""
        with self._lock:
            self._backlog.hurry()
            self._dispatcher.wake()

    def reject_all(self, error: BaseException) -> None:
        """Settle everything that no launch has yet with `error`."""
        self._dispatcher.command(lambda: self._dispatcher.revoke(error))

    def stop(self, grace: float = 0.0) -> None:
        """Refuse new requests, let accepted ones finish for `grace` seconds, then reject the rest. Idempotent.

        Rejected requests get `ServerStopping`. Returns when the running execution has ended, and the threads with it.
        """
        with self._lock:
            self._closed = True
            self._backlog.hurry()
            self._dispatcher.wake()
            started = self._dispatcher.started
        if started:
            self.drain(grace)
        self._dispatcher.finish()
        self._watchdog.close()

    # --- models -------------------------------------------------------------------------------------------------------

    def add(self, model: ServableModel) -> None:
        """Accept requests for `model` from now on. Raises ValueError when its name or its incarnation is taken."""
        with self._lock:
            self._require_open(model)
            self._backlog.add(model)

    def replace(self, model: ServableModel) -> None:
        """Accept requests for `model`, a new incarnation of a name that is scheduled, from now on.

        Share, settings, counters and the costs of programs that are the same executables go on with it. The incarnation
        before it keeps its requests, and accepts those that were prepared for it until it is retired.

        Raises UnknownModel for a name that is not scheduled, ValueError when the incarnation is taken.
        """
        with self._lock:
            self._require_open(model)
            self._backlog.roster.replace(model)

    def retire(self, model: ServableModel, *, error: BaseException | None = None, timeout: float | None = None) -> bool:
        """Accept nothing more for this incarnation, and wait until none of its requests is left.

        What is queued runs, or is settled with `error` at once. Returns whether nothing of it is queued, staged,
        running or being answered after `timeout` seconds; False may be asked again, and an incarnation that is not
        scheduled is True at once. Its name stays scheduled, for `replace`, until it is removed. Must not be called from
        a `done` callback, which runs on the thread it waits for.
        """
        with self._lock:
            queue = self._backlog.roster.by_incarnation.get(model.incarnation)
            if queue is None:
                return True
            event = self._close(queue, error)
        if error is not None:
            self._refuse(queue, error)
        return event.wait(timeout)

    def abort(self, model: ServableModel, error: BaseException) -> None:
        """As `retire`, without waiting: what is queued ends with `error`, and what runs does, whatever it gives.

        The device is still busy with what runs; `retire` says when it no longer is.
        """
        with self._lock:
            queue = self._backlog.roster.by_incarnation.get(model.incarnation)
            if queue is None:
                return
            self._close(queue, error)
            queue.discard = error
        self._refuse(queue, error)

    def remove(self, name: str, *, timeout: float | None = None) -> bool:
        """Stop serving `name`, settle what is queued for it with `ModelUnloaded`, and wait until no launch uses it.

        That is for all its incarnations. Returns whether it happened within `timeout` seconds: only then may weights
        and programs be freed. An unknown name is True at once. Must not be called from a `done` callback, which runs on
        the thread it waits for.
        """
        error = ModelUnloaded(f"model {name!r} was unloaded while the request waited")
        with self._lock:
            queues = self._backlog.remove(name)
            events = [self._close(queue, error) for queue in queues]
        for queue in queues:
            self._refuse(queue, error)
        return _all_set(events, timeout)

    def rename(self, old: str, model: ServableModel) -> None:
        """Serve the newest incarnation of `old` as `model`: under another name, otherwise the same.

        Requests, costs, counters and what was set by `set_policy` stay; weight, cap and batching window are otherwise
        those that the configuration has for the new name. Incarnations that are being retired go with it.

        Raises UnknownModel when `old` is not scheduled, ValueError when the new name is taken or it is not the same.
        """
        with self._lock:
            queue = self._backlog.roster.rename(old, model)
            self._replan(queue)
            self._backlog.rewindow(queue)
            self._dispatcher.wake()

    def depth(self, model: ServableModel) -> tuple[int, int]:
        """How many requests of this incarnation are queued, and in batches that are staged, running or answered."""
        with self._lock:
            queue = self._backlog.roster.by_incarnation.get(model.incarnation)
            if queue is None:
                return 0, 0
            queued = self._backlog.depth(queue)
            return queued, queue.pending - queued

    def set_policy(self, name: str, *, weight: float | None = None, max_batch_size: int | None = None) -> None:
        """Change a model's fair share, or the most rows that are merged for it, from the next dispatch on.

        It stays so when the model is replaced or renamed. Raises InvalidRequest for a value that makes no sense,
        UnknownModel for a model that is not scheduled.
        """
        weight = None if weight is None else require_weight(weight)
        cap = None if max_batch_size is None else require_max_batch_size(max_batch_size)
        with self._lock:
            account = self._backlog.roster.newest(name).account
            if weight is not None:
                self._backlog.shares.reweigh(account, weight)
                account.weight_set = True
            if cap is not None:
                account.cap = cap
                for queue in account.queues:
                    queue.cap = cap
                    self._replan(queue)

    # --- programs -----------------------------------------------------------------------------------------------------

    def set_programs(self, model: ServableModel, *, key: int) -> None:
        """Run the programs of `model` from the next launch on: a known incarnation with other executables.

        `key` names the set (`queue.ORIGINAL` is what it was loaded with): each has costs of its own, which are found
        again when it is selected again. Raises UnknownModel, ValueError for programs of other sizes or other weights.
        """
        with self._lock:
            self._replan(self._backlog.roster.set_programs(model, key))

    def forget_programs(self, model: ServableModel, key: int) -> None:
        """Drop what is known of the set `key`, which is not selected and will not be again."""
        with self._lock:
            queue = self._backlog.roster.by_incarnation.get(model.incarnation)
            if queue is not None:
                queue.forget_programs(key)

    def seed_cost(self, model: str | ServableModel, variant: Variant, batch_key: int, seconds: float) -> None:
        """Say what a warm-up of a program took, so that the first requests are planned well.

        `model` is a name, or what was measured: then nothing is noted when other programs are selected by now. Raises
        UnknownModel when it is not scheduled (see `add`).
        """
        with self._lock:
            roster = self._backlog.roster
            queue = roster.newest(model) if isinstance(model, str) else roster.incarnation(model)
            if isinstance(model, str) or queue.model.programs is model.programs:
                queue.costs.seed(variant, batch_key, round(seconds * 1e9), self._clock())
                self._backlog.replan(queue)

    def warmed(self, model: ServableModel, variant: Variant, batch_key: int) -> bool:
        """Whether a program of `model` has run often enough, for this incarnation or one before it, to be measured.

        Raises UnknownModel when the incarnation is not scheduled.
        """
        with self._lock:
            queue = self._backlog.roster.incarnation(model)
            return queue.model.programs is model.programs and queue.costs.warmed(variant, batch_key)

    def tap(self, model: ServableModel, tap: Callable[[Sample], None] | None, share: float = 1.0) -> None:
        """Give `tap` copies of a `share` (0 to 1) of the batches of this incarnation that run well; None ends it.

        It is called on the dispatch thread, before the replies go out, and must be quick. Raises InvalidRequest for
        another share, UnknownModel when the incarnation is not scheduled.
        """
        fresh = None if tap is None else Tap(tap, share)
        with self._lock:
            if fresh is not None:
                self._backlog.roster.incarnation(model).tap = fresh
            elif (queue := self._backlog.roster.by_incarnation.get(model.incarnation)) is not None:
                queue.tap = None

    def _require_open(self, model: ServableModel) -> None:
        if self._closed:
            raise ServerStopping(f"model {model.name!r} cannot be added: the server is stopping")

    def _close(self, queue: ModelQueue, error: BaseException | None) -> threading.Event:
        """Close `queue`; the event is set when nothing of it is left. `error`: see `_refuse`. Lock held."""
        event = threading.Event()
        queue.settled.append(event)
        if error is not None:
            queue.refusal = error
        self._backlog.close(queue)
        self._dispatcher.look_finished(queue)
        # A window that was open no longer is.
        self._dispatcher.wake()
        return event

    def _refuse(self, queue: ModelQueue, error: BaseException) -> None:
        """Settle what waits in a closed queue with `error`."""
        self._dispatcher.command(lambda: self._dispatcher.revoke(error, queue))

    def _replan(self, queue: ModelQueue) -> None:
        """Costs, programs or limits of `queue` have changed. Lock held."""
        self._backlog.replan(queue)
        staged = self._dispatcher.ahead
        if staged is not None and staged.queue is queue:
            self._dispatcher.recall(staged)

    # --- weights ------------------------------------------------------------------------------------------------------

    def attach(self, mover: Mover) -> None:
        """Let `mover` see to it that weights are on the device when a batch needs them; before `start`."""
        self._dispatcher.mover = mover

    def hold(self, weights: Weights) -> bool:
        """Keep `weights` on the device until `release`; False when they are not there, or about to go."""
        with self._lock:
            if not weights.resident:
                return False
            weights.uses += 1
            return True

    def release(self, weights: Weights) -> None:
        """Undo `hold`."""
        with self._lock:
            self._backlog.release(weights)
            if self._backlog.released:
                self._dispatcher.wake()

    def expel(self, several: Sequence[Weights]) -> None:
        """Make no batch any more that uses these weights; the mover is told when the last one that does has ended."""
        with self._lock:
            for weights in several:
                weights.resident = False
                weights.leaving = True

    def command(self, command: Callable[[], None]) -> None:
        """Have `command` run on the dispatch thread before its next dispatch; it must be quick."""
        self._dispatcher.command(command)

    def warm(self, queues: Sequence[ModelQueue]) -> None:
        """The weights of these queues have come. On the dispatch thread."""
        with self._lock:
            for queue in queues:
                self._backlog.warm(queue)

    def prefer(self, queues: Sequence[ModelQueue]) -> None:
        """Run one batch of each of these before anything else. On the dispatch thread."""
        with self._lock:
            for queue in queues:
                self._backlog.prefer(queue)

    def wants(self, queue: ModelQueue) -> bool:
        """Whether requests of `queue` wait."""
        with self._lock:
            return self._backlog.wants(queue)

    def refuse(self, queue: ModelQueue, error: BaseException) -> None:
        """Settle all that waits in `queue` with `error`. On the dispatch thread."""
        self._dispatcher.revoke(error, queue)

    @property
    def staging(self) -> StagingPool:
        """The blocks in which batches are assembled, for whoever gives idle ones back."""
        return self._dispatcher.pool

    # --- requests -----------------------------------------------------------------------------------------------------

    def admit(self, model: ServableModel, deadline_ns: int) -> None:
        """Refuse early what `submit` would refuse anyway, before anybody spends time on preparing the request.

        Raises:
            ServerStopping, ModelUnloaded, DeadlineExceeded, QueueFull: as `submit`.
        """
        if self._closed:
            raise ServerStopping("the server is stopping")
        with self._lock:
            self._backlog.admit(model, deadline_ns, self._clock())

    def submit(
        self,
        model: ServableModel,
        inputs: Mapping[str, Tensor],
        rows: int,
        variant: Variant,
        deadline_ns: int,
        done: Callable[[Result], None],
    ) -> Ticket | Joined:
        """Queue one request: `inputs` are the executable inputs, `rows` long along each one's batch axis.

        The arrays must not change until `done` is called, which happens exactly once, on the dispatch thread. `done`
        must be quick and must not wait. `deadline_ns` is absolute, 0 = none. What is returned can be cancelled.

        Raises:
            InvalidRequest: no compiled program takes these inputs.
            ServerStopping, ModelUnloaded, DeadlineExceeded, QueueFull: refused; `done` is not called.
        """
        if self._closed:
            raise ServerStopping("the server is stopping")
        if self.policy.split_oversize and model.coalescable and rows > model.largest(variant):
            return self._submit_pieces(model, inputs, rows, variant, deadline_ns, done)
        model.check(inputs, rows, variant)
        with self._lock:
            return self._accept(model, inputs, rows, variant, deadline_ns, done, self._clock())

    def _submit_pieces(
        self,
        model: ServableModel,
        inputs: Mapping[str, Tensor],
        rows: int,
        variant: Variant,
        deadline_ns: int,
        done: Callable[[Result], None],
    ) -> Joined:
        model.check_oversize(inputs, rows, variant)
        largest, limit = model.largest(variant), self.policy.max_queue_depth
        if rows > largest * limit:
            raise InvalidRequest(
                f"a request to model {model.name!r} has {rows} rows; at most {largest * limit} can be run in pieces of "
                f"{largest} (scheduler.max_queue_depth: {limit})"
            )
        cut = pieces(inputs, model.input_specs, rows, largest)
        with self._lock:
            now_ns = self._clock()
            # All or none: behind the first piece, the others could only lack room.
            queue = self._backlog.admit(model, deadline_ns, now_ns, requests=len(cut))
            joined = Joined(len(cut), model.output_specs, done, self._run_again, queue.selections)
            for at, (part, n) in enumerate(cut):
                ticket = self._accept(model, part, n, variant, deadline_ns, joined.done(at), now_ns, shed=not at)
                joined.tickets.append(ticket)
        return joined

    def _run_again(self, joined: Joined) -> bool:
        """Whether programs were exchanged between the pieces of a request; then all of them are queued once more."""
        queue = joined.tickets[0].queue
        if joined.selections == queue.selections:
            return False
        with self._lock:
            if queue.refusal is not None:
                raise queue.refusal
            self._dispatcher.resume(queue, joined)
        return True

    def _accept(
        self,
        model: ServableModel,
        inputs: Mapping[str, Tensor],
        rows: int,
        variant: Variant,
        deadline_ns: int,
        done: Callable[[Result], None],
        now_ns: int,
        *,
        shed: bool = True,
    ) -> Ticket:
        if self._closed:
            raise ServerStopping("the server is stopping")
        if not deadline_ns and self._implicit_ns:
            deadline_ns = now_ns + self._implicit_ns
        ticket = self._backlog.accept(model, inputs, rows, variant, deadline_ns, done, now_ns, shed=shed)
        self._dispatcher.arrived(ticket)
        return ticket

    # --- what is going on ---------------------------------------------------------------------------------------------

    @property
    def stuck(self) -> Stuck | None:
        """The execution that takes longer than `dispatch_timeout_seconds`, if one does."""
        return self._watchdog.stuck

    def on_stuck(self, told: Callable[[], None]) -> None:
        """Have `told` called, from a thread of the scheduler, when `stuck` has changed."""
        self._watchdog.on_change = told

    def on_lost(self, told: Callable[[DeviceLost], None]) -> None:
        """Have `told` called when the device turns out to be gone, on the thread that found it; must be quick."""
        self._dispatcher.on_lost = told

    def lose(self, error: DeviceLost) -> None:
        """Tell that the device is gone, found elsewhere than in a batch."""
        self._dispatcher.on_lost(error)

    def stats(self) -> dict[str, ModelStats]:
        """A snapshot of every scheduled model, by name; each is consistent in itself."""
        with self._lock:
            queues = [*self._backlog.queues.items()]
        stats = {}
        for name, queue in queues:
            # One by one, so that a scrape never keeps the dispatch thread waiting for long.
            with self._lock:
                now_ns = self._clock()
                stats[name] = snapshot(queue, self._backlog.shares.recent_seconds(queue.account, now_ns), now_ns)
        return stats


def _all_set(events: Sequence[threading.Event], timeout: float | None) -> bool:
    """Wait for all of them, `timeout` seconds in all; whether they are set."""
    until = None if timeout is None else time.monotonic() + timeout
    return all(event.wait(None if until is None else max(until - time.monotonic(), 0.0)) for event in events)
