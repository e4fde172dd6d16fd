"""A model's queue of accepted requests, and the request in it. The scheduler's lock guards everything here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rsrv.core.errors import Cancelled, DeadlineExceeded, RsrvError
from rsrv.serve.scheduler.costs import UNMEASURED_SECONDS, Costs
from rsrv.serve.scheduler.plan import Plan, Variant, plan, plan_single_rows

if TYPE_CHECKING:
    import threading

    from rsrv.core.shm.tensor import Tensor
    from rsrv.serve.scheduler.account import Account
    from rsrv.serve.scheduler.model import ServableModel
    from rsrv.serve.scheduler.policy import Policy
    from rsrv.serve.scheduler.tap import Tap

ORIGINAL = 1
"""The key of the program set that a model is loaded with."""
_FEW = 32
"""Holes in a queue, or dead entries in its heap, that are not worth a clean-up."""


@dataclass(slots=True, eq=False)
class Result:
    """What became of one request: `outputs` by name, or `error`; exactly one of them is set.

    Outputs are read-only views of the batch's results, not always C-contiguous. `queue_ns` is the time from acceptance
    to the launch (or to the drop), `compute_ns` that of the whole batch: upload, execution, download. `upload_ns` and
    `download_ns` are parts of it.
    """

    outputs: dict[str, np.ndarray] | None = None
    error: BaseException | None = None
    queue_ns: int = 0
    compute_ns: int = 0
    batch_key: int = 0
    batch_rows: int = 0
    upload_ns: int = 0
    download_ns: int = 0


class Ticket:
    """One accepted request: queued by the scheduler, cancelled by its owner.

    `queued` is true while it waits in its queue; `overtaken` counts the later requests that passed it there.
    """

    __slots__ = (
        "cancelled",
        "deadline_ns",
        "done",
        "enqueued_ns",
        "inputs",
        "overtaken",
        "queue",
        "queued",
        "rows",
        "variant",
    )

    def __init__(
        self,
        queue: ModelQueue,
        inputs: Mapping[str, Tensor],
        rows: int,
        variant: Variant,
        deadline_ns: int,
        done: Callable[[Result], None],
        enqueued_ns: int,
    ) -> None:
        self.queue = queue
        self.inputs = inputs
        self.rows = rows
        self.variant = variant
        self.deadline_ns = deadline_ns
        self.done: Callable[[Result], None] | None = done
        self.enqueued_ns = enqueued_ns
        self.cancelled = False
        self.queued = False
        self.overtaken = 0

    def cancel(self) -> None:
        """Ask that this request is not run: if no launch has it yet, it is dropped and settled with `Cancelled`."""
        self.cancelled = True
        if self.queued:
            self.queue.cancelled.append(self)

    def verdict(self, now_ns: int, margin_ns: int = 0) -> Dropped | None:
        """Why this request must not be launched at `now_ns`, when it takes `margin_ns` to run; or None."""
        if self.cancelled:
            return Dropped(self, "cancelled", Cancelled("the caller cancelled the request before it ran"))
        deadline_ns = self.deadline_ns
        if not deadline_ns or now_ns + margin_ns < deadline_ns:
            return None
        waited = f"after {(now_ns - self.enqueued_ns) / 1e6:.1f} ms in the queue"
        if now_ns >= deadline_ns:
            late = f"the deadline passed {(now_ns - deadline_ns) / 1e6:.1f} ms ago, {waited}"
            return Dropped(self, "deadline", DeadlineExceeded(late))
        left = f"the deadline is {(deadline_ns - now_ns) / 1e6:.1f} ms away, {waited}"
        return Dropped(self, "laxity", DeadlineExceeded(f"{left}, and the end at least {margin_ns / 1e6:.1f} ms"))


class Dropped(NamedTuple):
    """A request that will not run; `reason` is how that is counted (see `ModelStats.dropped`)."""

    ticket: Ticket
    reason: str
    error: BaseException

    @classmethod
    def because(cls, ticket: Ticket, error: BaseException) -> Dropped:
        return cls(ticket, error.reason if isinstance(error, RsrvError) else RsrvError.reason, error)


class ModelQueue:
    """Everything the scheduler keeps for one incarnation of a model: its FIFO queue, and what its programs cost.

    A request that was dropped leaves a hole in `tickets`, except at the front: the first ticket always waits.

    Attributes:
        depth, rows: requests that wait, and their rows.
        urgent_ns: the earliest of their deadlines, 0 = none has one.
        account, counters: what is kept for its name, whichever incarnation serves it.
        costs: of the programs that are selected.
        price: what the next batch is expected to cost in seconds, as of `planned`.
        planned: the next batch; None when it has to be planned anew.
        ripe_ns: when the first request has waited for company long enough.
        in_flight: batches that left the queue and are not settled.
        pending: requests that were accepted and are not settled.
        closed: no request is accepted any more; when nothing is pending either, the events in `settled` are set.
        refusal: what those that no launch has yet end with; None = they run. A batch of them is never retried.
        discard: what those that are running end with, whatever their results are; None = with these.
        tap: who gets copies of what ran.
        selections: how often the programs were exchanged.
        cancelled: where tickets announce that they are cancelled; shared by all queues.
    """

    __slots__ = (
        "_alpha",
        "_cost_sets",
        "_deadlines",
        "_holes",
        "_merged_price",
        "_sequence",
        "_single_keys",
        "_single_plans",
        "account",
        "cancelled",
        "cap",
        "closed",
        "costs",
        "counters",
        "depth",
        "discard",
        "in_flight",
        "max_wait_ns",
        "model",
        "overtakes",
        "pending",
        "planned",
        "price",
        "refusal",
        "ripe_ns",
        "rows",
        "selections",
        "settled",
        "tap",
        "tickets",
        "urgent_ns",
    )

    def __init__(self, model: ServableModel, policy: Policy, cancelled: deque[Ticket], account: Account) -> None:
        self.model = model
        self.cancelled = cancelled
        self.account = account
        self.counters = account.counters
        self.cap: int | None = None
        self.max_wait_ns = 0
        self.overtakes = policy.variant_overtakes
        self._merged_price = 1 - policy.coalescing_discount
        self._alpha = policy.cost_ema_alpha
        self.costs = Costs(self._alpha)
        self._cost_sets = {ORIGINAL: self.costs}
        self.tickets: deque[Ticket] = deque()
        self.depth = 0
        self.rows = 0
        self.urgent_ns = 0
        self.price = 0.0
        self.planned: Plan | None = None
        self.ripe_ns = 0
        self.in_flight = 0
        self.pending = 0
        self.closed = False
        self.refusal: BaseException | None = None
        self.discard: BaseException | None = None
        self.settled: list[threading.Event] = []
        self.tap: Tap | None = None
        self.selections = 0
        self._holes = 0
        self._deadlines: list[tuple[int, int, Ticket]] = []
        self._sequence = 0
        # The batch keys of a model with one shape whose requests can be merged, and the plans for so many requests of
        # one row: see `plan_single_rows`.
        self._single_plans: dict[int, Plan] = {}
        keys = model.batch_keys_by_variant.get((), ()) if model.coalescable else ()
        self._single_keys: Sequence[int] = keys if len(model.batch_keys_by_variant) == 1 else ()
        self.resolve(policy)

    def resolve(self, policy: Policy) -> None:
        """Set cap and window to what holds for the model: set while it ran, else the policy's, else its own."""
        own, cap = policy.model(self.model.name), self.account.cap
        if cap is None:
            cap = own.max_batch_size if own.max_batch_size is not None else self.model.max_batch_size
        self.cap = cap
        window_ns = policy.max_wait_ns if own.max_wait_ns is None else own.max_wait_ns
        self.max_wait_ns = 0 if self.closed else window_ns
        self.replan()

    def set_programs(self, model: ServableModel, key: int) -> None:
        """Run the programs of `model` from the next launch on; each set `key` has costs of its own."""
        self.model = model
        self.selections += 1
        self.costs = self._cost_sets.setdefault(key, Costs(self._alpha))
        self.replan()

    def forget_programs(self, key: int) -> None:
        """Drop the costs of a set that is not selected."""
        if self._cost_sets.get(key) is not self.costs:
            self._cost_sets.pop(key, None)

    @property
    def max_batch_size(self) -> int:
        """Most rows that are merged; 0 = requests are never merged."""
        if not self.model.coalescable:
            return 0
        largest = max([keys[-1] for keys in self.model.batch_keys_by_variant.values()])
        return largest if self.cap is None else min(largest, self.cap)

    def append(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self._queue(ticket)

    def live(self) -> Iterator[Ticket]:
        """The requests that wait, in order."""
        return (ticket for ticket in self.tickets if ticket.queued)

    def put_back(self, tickets: Sequence[Ticket]) -> None:
        """Put requests that were taken at the front again, in order."""
        self.tickets.extendleft(reversed(tickets))
        for ticket in tickets:
            self._queue(ticket)
        # Also a full one, which was made of what stands behind them.
        self.planned = None

    def plan(
        self, ahead: Sequence[Ticket] = (), in_time: Callable[[int, Sequence[Ticket]], int] | None = None
    ) -> Plan | None:
        """Plan the next dispatch, as if the tickets `ahead` still stood at the front of the queue."""
        if in_time is None and self._single_keys and self.depth == self.rows > 0:
            n = self.depth + len(ahead)
            if not ahead or n == self.rows + sum([ticket.rows for ticket in ahead]):
                return self._single_plan(n)
        waiting = [*self.live()] if self._holes else self.tickets
        return plan(
            [*ahead, *waiting] if ahead else waiting,
            self.model.batch_keys_by_variant,
            coalescable=self.model.coalescable,
            cap=self.cap,
            overtakes=self.overtakes,
            costs=self.costs,
            in_time=in_time,
        )

    def next_plan(self) -> Plan:
        """The plan of a queue that is not empty, made when something has changed since the last one."""
        planned = self.planned
        if planned is None:
            planned = self.plan()
            assert planned is not None, f"the queue of model {self.model.name!r} is empty"
            self.planned = planned
        return planned

    def _single_plan(self, n: int) -> Plan:
        n = min(n, self._single_keys[-1])
        known = self._single_plans.get(n)
        if known is None:
            known = plan_single_rows(n, (), self._single_keys, cap=self.cap, costs=self.costs)
            self._single_plans[n] = known
        return known

    def reprice(self) -> None:
        """Bring `price` up to date; the queue is not empty."""
        planned = self.planned or self.next_plan()
        estimate = self.costs.estimates.get((self.tickets[0].variant, planned.batch_key))
        price = UNMEASURED_SECONDS if estimate is None else estimate.mean_ns * 1e-9
        self.price = price * self._merged_price if planned.take > 1 else price

    def replan(self) -> None:
        """Costs or limits have changed."""
        self.planned = None
        self._single_plans.clear()

    def take(self, plan: Plan) -> list[Ticket]:
        """Remove and return the requests of `plan`; those that they pass are told so."""
        tickets, picks, position = self.tickets, plan.picks, 0
        if not picks and not self._holes:
            popleft = tickets.popleft
            taken = [popleft() for _ in range(plan.take)]
            self._leave(taken)
            return taken
        taken = []
        passed: list[Ticket] = []
        while len(taken) < plan.take:
            ticket = tickets.popleft()
            if not ticket.queued:
                self._holes -= 1
                continue
            if not picks or picks[len(taken)] == position:
                for other in passed:
                    other.overtaken += 1
                taken.append(ticket)
            else:
                passed.append(ticket)
            position += 1
        tickets.extendleft(reversed(passed))
        self._leave(taken)
        return taken

    def take_all(self) -> list[Ticket]:
        taken = [*self.live()]
        self.tickets.clear()
        self._holes = 0
        self._leave(taken)
        return taken

    def drop(self, ticket: Ticket) -> None:
        """Remove one request from wherever it stands."""
        self._holes += 1
        self._leave([ticket])
        if self._holes > _FEW and self._holes > self.depth:
            self.tickets = deque(self.live())
            self._holes = 0

    def expired(self, now_ns: int) -> list[Ticket]:
        """The requests whose deadlines have passed, wherever they stand; they stay where they are."""
        # Each once: a request that was put back may have two entries.
        found: dict[Ticket, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            ticket = heappop(self._deadlines)[2]
            if ticket.queued:
                found[ticket] = None
        return [*found]

    def ripens(self) -> int:
        """When the first request will have waited for company long enough.

        With a deadline, no more than half of the time that it leaves beside the execution is spent on waiting.
        """
        head = self.tickets[0]
        wait_ns = self.max_wait_ns
        if self.urgent_ns and wait_ns:
            key = self.next_plan().batch_key
            spare_ns = self.urgent_ns - head.enqueued_ns - self.costs.margin_ns(head.variant, key, head.enqueued_ns)
            wait_ns = min(wait_ns, max(spare_ns // 2, 0))
        return head.enqueued_ns + wait_ns

    def _queue(self, ticket: Ticket) -> None:
        ticket.queued = True
        self.depth += 1
        self.rows += ticket.rows
        deadline_ns = ticket.deadline_ns
        if deadline_ns:
            self._sequence += 1
            heappush(self._deadlines, (deadline_ns, self._sequence, ticket))
            if not self.urgent_ns or deadline_ns < self.urgent_ns:
                self.urgent_ns = deadline_ns
        # What a full batch is made of does not change by what comes behind it.
        if self.planned is not None and not self.planned.full:
            self.planned = None

    def _leave(self, gone: Sequence[Ticket]) -> None:
        """`gone` wait no longer: the front of the queue, the sums and the earliest deadline follow."""
        self.planned = None
        rows, urgent, urgent_ns = 0, False, self.urgent_ns
        for ticket in gone:
            ticket.queued = False
            rows += ticket.rows
            if urgent_ns and 0 < ticket.deadline_ns <= urgent_ns:
                urgent = True
        self.depth -= len(gone)
        self.rows -= rows
        tickets = self.tickets
        while self._holes and tickets and not tickets[0].queued:
            tickets.popleft()
            self._holes -= 1
        if urgent:
            self._find_urgent()
        elif len(self._deadlines) > 2 * self.depth + _FEW:
            # Requests that ran are kept alive by their entries.
            self._deadlines = [entry for entry in self._deadlines if entry[2].queued]
            heapify(self._deadlines)

    def _find_urgent(self) -> None:
        deadlines = self._deadlines
        while deadlines and not deadlines[0][2].queued:
            heappop(deadlines)
        self.urgent_ns = deadlines[0][0] if deadlines else 0
