"""All requests that wait, and the choice of what runs next. Locking and the time are the caller's business."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rsrv.core.errors import DeadlineExceeded, ModelUnloaded, QueueFull
from rsrv.serve.scheduler.batch import Batch
from rsrv.serve.scheduler.costs import UNMEASURED_SECONDS
from rsrv.serve.scheduler.plan import Plan, Variant, fitting_key
from rsrv.serve.scheduler.policy import Policy
from rsrv.serve.scheduler.queue import Dropped, ModelQueue, Result, Ticket
from rsrv.serve.scheduler.roster import Roster
from rsrv.serve.scheduler.select import most_owed, most_urgent, oldest
from rsrv.serve.scheduler.shares import Shares

if TYPE_CHECKING:
    from rsrv.core.shm.tensor import Tensor
    from rsrv.serve.scheduler.model import ServableModel, Weights

logger = logging.getLogger(__name__)

_NEVER = 1 << 63


class Backlog:
    """What waits in the queues of all scheduled models.

    A queue with requests is *ready*, or *waits* for company when its model has a batching window, or is *cold*: it was
    chosen while its weights were not on the device, and is out of the choice until they are (`warm`).

    Attributes:
        dropped: requests that were found cancelled, expired or hopeless, for whoever settles them.
        wanted, released: queues that have become cold, in the order in which they were chosen, and weights that are to
            leave and that no batch uses any more; both for whoever moves weights.
        shares: the accounts of the fair discipline, kept under every discipline.
        roster: which queues there are; `queues` are the newest of each name.
    """

    def __init__(self, policy: Policy, now_ns: int = 0) -> None:
        self.policy = policy
        self.dropped: list[Dropped] = []
        self.wanted: list[ModelQueue] = []
        self.released: list[Weights] = []
        self._all_prepared = policy.fair_population == "prepared"
        self.shares = Shares(policy.ema_halflife_seconds, credit_idle=self._all_prepared, now_ns=now_ns)
        self.roster = Roster(policy, self.shares)
        self.queues = self.roster.queues
        self._by_incarnation = self.roster.by_incarnation
        self._ready: dict[ModelQueue, None] = {}
        self._waiting: dict[ModelQueue, None] = {}
        self._cold: dict[ModelQueue, None] = {}
        self._preferred: dict[ModelQueue, None] = {}
        self._unplanned: dict[ModelQueue, None] = {}
        self._retries: deque[tuple[ModelQueue, Ticket]] = deque()
        self._cancelled = self.roster.cancelled
        # No deadline passes before this.
        self._expiry_ns = _NEVER
        self._hurried = False

    @property
    def waiting(self) -> bool:
        """Whether anything waits, ready or not."""
        return bool(self._ready or self._retries or self._waiting)

    @property
    def ripe_ns(self) -> int | None:
        """When the first batching window closes, None when none is open."""
        return min([queue.ripe_ns for queue in self._waiting]) if self._waiting else None

    @property
    def due_ns(self) -> int | None:
        """When something is to be done without a request that comes: a batching window closes, or the deadline of one
        whose weights are elsewhere passes."""
        ripe_ns = self.ripe_ns
        if not self._cold or self._expiry_ns == _NEVER:
            return ripe_ns
        return self._expiry_ns if ripe_ns is None else min(ripe_ns, self._expiry_ns)

    def add(self, model: ServableModel) -> ModelQueue:
        """Raises ValueError when the name, or the incarnation, is taken."""
        return self.roster.add(model)

    def remove(self, name: str) -> Sequence[ModelQueue]:
        """Accept nothing more for `name`; what is queued for it stays queued."""
        return self.roster.remove(name)

    def close(self, queue: ModelQueue) -> None:
        """Accept nothing more for `queue`. What waits there runs, and waits for company no longer."""
        self.roster.close(queue)
        queue.max_wait_ns = 0
        if queue in self._waiting:
            del self._waiting[queue]
            self._ready[queue] = None

    def rewindow(self, queue: ModelQueue) -> None:
        """The batching window of `queue` has changed."""
        if queue in self._waiting and queue.max_wait_ns:
            queue.ripe_ns = queue.ripens()
        elif queue in self._waiting:
            del self._waiting[queue]
            self._ready[queue] = None

    def depth(self, queue: ModelQueue) -> int:
        """Requests of `queue` that no batch has."""
        return queue.depth + sum([other is queue for other, _ in self._retries])

    # --- what comes in ------------------------------------------------------------------------------------------------

    def admit(self, model: ServableModel, deadline_ns: int, now_ns: int, requests: int = 1) -> ModelQueue:
        """The queue for so many requests to `model`. Raises ModelUnloaded, DeadlineExceeded or QueueFull."""
        queue = self._by_incarnation.get(model.incarnation)
        if queue is None or queue.closed:
            raise ModelUnloaded(f"model {model.name!r} (incarnation {model.incarnation}) is no longer served")
        if deadline_ns and now_ns >= deadline_ns:
            queue.counters.dropped["deadline"] += 1
            raise DeadlineExceeded(f"the deadline passed {(now_ns - deadline_ns) / 1e6:.1f} ms before queueing")
        limit = self.policy.max_queue_depth
        if queue.depth + requests > limit:
            self._clear_out(now_ns)
            if queue.depth + requests > limit:
                queue.counters.dropped["queue_full"] += 1
                more = f", and this one is {requests} pieces" if requests > 1 else ""
                raise QueueFull(
                    f"the queue of model {model.name!r} is full: {queue.depth} requests wait, at most {limit} may{more}"
                )
        return queue

    def accept(
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
        """Append a request. Raises ModelUnloaded, DeadlineExceeded or QueueFull.

        `shed`: it may be refused for what is queued before it (`Policy.shed_late`).
        """
        queue = self.admit(model, deadline_ns, now_ns)
        if deadline_ns:
            if shed and queue.depth and self.policy.shed_late:
                self._require_in_time(queue, rows, variant, deadline_ns, now_ns)
            self._expiry_ns = min(self._expiry_ns, deadline_ns)
        ticket = Ticket(queue, inputs, rows, variant, deadline_ns, done, now_ns)
        queue.append(ticket)
        self._queued(queue, now_ns)
        return ticket

    def _require_in_time(self, queue: ModelQueue, rows: int, variant: Variant, deadline_ns: int, now_ns: int) -> None:
        """Refuse a request that would be late even if the device did nothing but this queue, and nobody gave up."""
        keys = queue.model.batch_keys(variant)
        needed_ns = queue.costs.at_least_ns(variant, keys, queue.rows, rows) if keys else 0
        if now_ns + needed_ns >= deadline_ns > 0 and needed_ns:
            queue.counters.dropped["predicted"] += 1
            raise DeadlineExceeded(
                f"model {queue.model.name!r} has {queue.rows} rows to run first, so the request would take at least "
                f"{needed_ns / 1e6:.1f} ms; its deadline is in {(deadline_ns - now_ns) / 1e6:.1f} ms"
            )

    def _queued(self, queue: ModelQueue, now_ns: int) -> None:
        """`queue` has requests: it is ready, or opens a window."""
        if not self._all_prepared:
            self.shares.enter(queue.account)
        if queue.planned is None:
            self._unplanned[queue] = None
        if queue in self._ready or queue in self._cold:
            return
        if queue.max_wait_ns and not self._hurried:
            queue.ripe_ns = queue.ripens()
            if now_ns < queue.ripe_ns and not queue.next_plan().full:
                self._waiting[queue] = None
                return
            self._waiting.pop(queue, None)
        self._ready[queue] = None

    def hurry(self) -> None:
        """Close every batching window, those to come as well."""
        self._hurried = True
        self._ready.update(self._waiting)
        self._waiting.clear()

    # --- what goes out ------------------------------------------------------------------------------------------------

    def next(self, now_ns: int, busy_ns: int = 0) -> Batch | None:
        """Take the next requests to run: one to be retried alone, else of the model that the discipline chooses.

        `busy_ns` is for how long the device is still expected to be busy.
        """
        if self._cancelled or now_ns >= self._expiry_ns:
            self._clear_out(now_ns)
        if self._retries:
            batch = self._retry_alone(now_ns)
            if batch is not None:
                return batch
        if self._waiting:
            self._open_ripe(now_ns)
        while self._preferred:
            queue = next(iter(self._preferred))
            del self._preferred[queue]
            if queue in self._ready and queue.model.weights.resident:
                batch = self._batch(queue, now_ns, now_ns + busy_ns)
                if batch is not None:
                    return batch
        while self._ready:
            queue = self._choose()
            if not queue.model.weights.resident:
                self._park(queue)
                continue
            batch = self._batch(queue, now_ns, now_ns + busy_ns)
            if batch is not None:
                return batch
        return None

    def _retry_alone(self, now_ns: int) -> Batch | None:
        for queue, ticket in [*self._retries]:
            if queue.model.weights.resident:
                self._retries.remove((queue, ticket))
                key = fitting_key(queue.model.batch_keys(ticket.variant), ticket.rows)
                self._taken(queue)
                return Batch(queue, [ticket], key, final=True, alone=True)
            verdict = ticket.verdict(now_ns)
            if verdict is None:
                self._park(queue)
            else:
                self._retries.remove((queue, ticket))
                self.dropped.append(verdict)
        return None

    def _park(self, queue: ModelQueue) -> None:
        """The weights of `queue` are not on the device: it is cold until they are."""
        self._ready.pop(queue, None)
        if queue not in self._cold:
            self._cold[queue] = None
            self.wanted.append(queue)

    def warm(self, queue: ModelQueue) -> None:
        """The weights of `queue` have come, or will not: it takes part in the choice again."""
        if queue in self._cold:
            del self._cold[queue]
            if queue.depth:
                self._ready[queue] = self._unplanned[queue] = None

    def prefer(self, queue: ModelQueue) -> None:
        """One batch of `queue` goes before those of all others, whatever the discipline says."""
        self._preferred[queue] = None
        if queue in self._waiting:
            del self._waiting[queue]
            self._ready[queue] = None

    def wants(self, queue: ModelQueue) -> bool:
        """Whether anybody still waits for the weights of `queue`."""
        return bool(queue.depth) or any(other is queue for other, _ in self._retries)

    def _choose(self) -> ModelQueue:
        ready = self._ready
        if len(ready) == 1:
            return next(iter(ready))
        match self.policy.discipline:
            case "fifo":
                return oldest(ready)
            case "edf":
                return most_urgent(ready)
            case "fair":
                self._plan_all()
                cap = self.policy.recency_penalty_cap
                queue = most_owed(ready, self.shares, cap, always_divide=self._all_prepared)
                if len(queue.account.queues) > 1:
                    # Incarnations of one model are owed the same. The cheaper must not keep the other waiting for ever.
                    return oldest([other for other in queue.account.queues if other in ready])
                return queue

    def _plan_all(self) -> None:
        """Bring the prices of all ready models up to date."""
        for queue in self._unplanned:
            if queue.depth:
                try:
                    queue.reprice()
                except Exception:
                    # The planning of its batch fails in the same way, and is dealt with there.
                    queue.price = UNMEASURED_SECONDS
        self._unplanned.clear()

    def _batch(self, queue: ModelQueue, now_ns: int, start_ns: int) -> Batch | None:
        """Take the next batch of `queue`, to start at `start_ns`; None when nobody in it would be in time."""
        try:
            plan = queue.next_plan()
            urgent = self.policy.discipline == "edf" and self._may_be_late(queue, plan, start_ns)
            if urgent:
                plan = queue.plan(in_time=_in_time(queue, start_ns)) or plan
        except Exception as error:
            # A bug, and it would hold up every model; the request that showed it pays.
            logger.exception("planning failed model=%s", queue.model.name)
            head = queue.tickets[0]
            self._drop(Dropped.because(head, error))
            return None
        if urgent and self._drop_late(queue, plan, now_ns, start_ns):
            return None
        tickets = queue.take(plan)
        # Counted first: a model stays in the population while its work is executing.
        self._taken(queue)
        self._left(queue, now_ns)
        return Batch(queue, tickets, plan.batch_key, final=plan.full)

    def _may_be_late(self, queue: ModelQueue, plan: Plan, start_ns: int) -> bool:
        """Whether a batch that starts at `start_ns` might end after a deadline of anybody in `queue`."""
        if not queue.urgent_ns:
            return False
        margin_ns = queue.costs.margin_ns(queue.tickets[0].variant, plan.batch_key, start_ns)
        return start_ns + margin_ns >= queue.urgent_ns

    def _drop_late(self, queue: ModelQueue, plan: Plan, now_ns: int, start_ns: int) -> bool:
        """Drop those of `plan` that would end after their deadlines; whether there were any."""
        picks = plan.picks or range(plan.take)
        waiting = [*islice(queue.live(), picks[-1] + 1)]
        needed_ns = start_ns - now_ns + queue.costs.margin_ns(waiting[0].variant, plan.batch_key, start_ns)
        verdicts = [verdict for at in picks if (verdict := waiting[at].verdict(now_ns, needed_ns)) is not None]
        for verdict in verdicts:
            self._drop(verdict)
        return bool(verdicts)

    def grow(self, batch: Batch, now_ns: int) -> Batch | None:
        """`batch` and the queued requests that can join it; None when none can."""
        queue, tickets = batch.queue, batch.tickets
        urgent = self.policy.discipline == "edf"
        plan = queue.plan(tickets, _in_time(queue, now_ns) if urgent else None)
        n = len(tickets)
        if plan is None or plan.take <= n or (plan.picks and plan.picks[:n] != tuple(range(n))):
            return None
        picks = tuple([at - n for at in plan.picks[n:]])
        joining = queue.take(plan._replace(take=plan.take - n, picks=picks))
        self._left(queue, now_ns)
        return Batch(queue, tickets + joining, plan.batch_key, final=True)

    def precedes(self, ticket: Ticket, staged: Batch) -> bool:
        """Whether a request that has just come should run before a batch that is staged."""
        if staged.alone or self.policy.discipline != "edf" or not ticket.deadline_ns or ticket.queue is staged.queue:
            return False
        if not staged.urgent_ns:
            staged.urgent_ns = min([other.deadline_ns for other in staged.tickets if other.deadline_ns], default=_NEVER)
        return ticket.deadline_ns < staged.urgent_ns

    def put_back(self, batch: Batch) -> None:
        """Undo `next`: the requests of `batch` stand at the front of their queue again, in order."""
        queue = batch.queue
        self._ended(queue)
        if batch.alone:
            self._retries.appendleft((queue, batch.tickets[0]))
            return
        self._stand_first(queue, batch.tickets)

    def resume(self, queue: ModelQueue, tickets: Sequence[Ticket]) -> None:
        """Let requests of `queue` that have run do so again, before all others of it."""
        if not self._all_prepared:
            self.shares.enter(queue.account)
        self._stand_first(queue, tickets)

    def _stand_first(self, queue: ModelQueue, tickets: Sequence[Ticket]) -> None:
        queue.put_back(tickets)
        self._expiry_ns = min(self._expiry_ns, queue.urgent_ns or _NEVER)
        self._waiting.pop(queue, None)
        self._ready[queue] = self._unplanned[queue] = None

    def retry(self, queue: ModelQueue, tickets: Sequence[Ticket]) -> None:
        """Run each of `tickets` alone, before anything else."""
        self._retries.extend((queue, ticket) for ticket in tickets)

    def clear(self, now_ns: int, only: ModelQueue | None = None) -> list[Ticket]:
        """Take everything that waits, or what waits in one queue."""
        tickets = [ticket for queue, ticket in self._retries if only is None or queue is only]
        self._retries = deque((queue, ticket) for queue, ticket in self._retries if not (only is None or queue is only))
        for queue in [*self._ready, *self._waiting, *self._cold] if only is None else [only]:
            tickets += queue.take_all()
            self._left(queue, now_ns)
        return tickets

    # --- what became of it --------------------------------------------------------------------------------------------

    def measured(self, queue: ModelQueue, variant: Variant, batch_key: int, compute_ns: int, now_ns: int) -> None:
        """A program of `queue` ran once."""
        if queue.costs.measured(variant, batch_key, compute_ns, now_ns):
            queue.replan()
        if queue.depth:
            # Its price has changed.
            self._unplanned[queue] = None

    def settled(self, queue: ModelQueue) -> None:
        """A batch of `queue` is no longer in flight."""
        self._ended(queue)
        if not queue.in_flight and not queue.depth and not self._all_prepared and not queue.account.busy:
            self.shares.leave(queue.account)

    def replan(self, queue: ModelQueue) -> None:
        """Costs or limits have changed."""
        queue.replan()
        if queue.depth:
            self._unplanned[queue] = None

    # --- small parts --------------------------------------------------------------------------------------------------

    def _taken(self, queue: ModelQueue) -> None:
        """A batch of `queue` is in flight, and its weights must stay."""
        queue.in_flight += 1
        queue.model.weights.uses += 1

    def _ended(self, queue: ModelQueue) -> None:
        queue.in_flight -= 1
        self.release(queue.model.weights)

    def release(self, weights: Weights) -> None:
        """One user less."""
        weights.uses -= 1
        if weights.leaving and not weights.uses:
            self.released.append(weights)

    def _left(self, queue: ModelQueue, now_ns: int) -> None:
        """Requests left `queue`."""
        if queue.depth:
            self._unplanned[queue] = None
            if queue.max_wait_ns and queue not in self._cold:
                self._ready.pop(queue, None)
                self._queued(queue, now_ns)
            return
        self._ready.pop(queue, None)
        self._waiting.pop(queue, None)
        self._cold.pop(queue, None)
        self._unplanned.pop(queue, None)
        if not queue.in_flight and not self._all_prepared and not queue.account.busy:
            self.shares.leave(queue.account)

    def _open_ripe(self, now_ns: int) -> None:
        for queue in [queue for queue in self._waiting if now_ns >= queue.ripe_ns]:
            del self._waiting[queue]
            self._ready[queue] = None

    def _clear_out(self, now_ns: int) -> None:
        """Drop what is cancelled or expired, wherever it stands."""
        while self._cancelled:
            ticket = self._cancelled.popleft()
            if ticket.queued:
                self._drop_for_good(ticket, now_ns)
        if now_ns < self._expiry_ns:
            return
        for queue in [*self._ready, *self._waiting, *self._cold]:
            if queue.urgent_ns and queue.urgent_ns <= now_ns:
                for ticket in queue.expired(now_ns):
                    self._drop_for_good(ticket, now_ns)
        self._expiry_ns = min(
            [
                queue.urgent_ns
                for queues in (self._ready, self._waiting, self._cold)
                for queue in queues
                if queue.urgent_ns
            ],
            default=_NEVER,
        )

    def _drop_for_good(self, ticket: Ticket, now_ns: int) -> None:
        verdict = ticket.verdict(now_ns)
        if verdict is not None:
            self._drop(verdict)

    def _drop(self, dropped: Dropped) -> None:
        queue = dropped.ticket.queue
        self.dropped.append(dropped)
        queue.drop(dropped.ticket)
        if queue.depth:
            self._unplanned[queue] = None
        else:
            self._left(queue, 0)


def _in_time(queue: ModelQueue, start_ns: int) -> Callable[[int, Sequence[Ticket]], int]:
    """How many of the requests that start at `start_ns` on a program end before their deadlines."""

    def in_time(batch_key: int, tickets: Sequence[Ticket]) -> int:
        end_ns = start_ns + queue.costs.margin_ns(tickets[0].variant, batch_key, start_ns)
        return sum([not ticket.deadline_ns or end_ns < ticket.deadline_ns for ticket in tickets])

    return in_time
