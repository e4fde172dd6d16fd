"""A model's queue of accepted requests, and the request in it. The scheduler's lock guards everything here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rsrv.core.errors import Cancelled, DeadlineExceeded, RsrvError
from rsrv.serve.scheduler.plan import Plan, Variant, plan
from rsrv.serve.scheduler.stats import Counters

if TYPE_CHECKING:
    import threading

    from rsrv.core.shm.tensor import Tensor
    from rsrv.serve.scheduler.model import ServableModel


@dataclass(slots=True, eq=False)
class Result:
    """What became of one request: `outputs` by name, or `error`; exactly one of them is set.

    Outputs are read-only views of the batch's results, not always C-contiguous. `queue_ns` is the time from acceptance
    to the launch (or to the drop), `compute_ns` that of the whole batch: upload, execution, download.
    """

    outputs: dict[str, np.ndarray] | None = None
    error: BaseException | None = None
    queue_ns: int = 0
    compute_ns: int = 0
    batch_key: int = 0
    batch_rows: int = 0


class Ticket:
    """One accepted request: queued by the scheduler, cancelled by its owner."""

    __slots__ = ("cancelled", "deadline_ns", "done", "enqueued_ns", "inputs", "queue", "rows", "variant")

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

    def cancel(self) -> None:
        """Ask that this request is not run: if no launch has it yet, it is dropped and settled with `Cancelled`."""
        self.cancelled = True
        self.queue.has_cancelled = True

    def verdict(self, now_ns: int) -> RsrvError | None:
        """Why this request must not be launched at `now_ns`, or None."""
        if self.cancelled:
            return Cancelled("the caller cancelled the request before it ran")
        if self.deadline_ns and now_ns >= self.deadline_ns:
            late_ms = (now_ns - self.deadline_ns) / 1e6
            waited_ms = (now_ns - self.enqueued_ns) / 1e6
            return DeadlineExceeded(f"the deadline passed {late_ms:.1f} ms ago, after {waited_ms:.1f} ms in the queue")
        return None


Dropped = tuple[Ticket, BaseException]


class ModelQueue:
    """Everything the scheduler keeps for one registered model: its FIFO queue and its counters.

    `in_flight` counts batches that left the queue and are not settled; when a `removed` model has none left, the events
    in `settled` are set. `estimates_ns` says how long a program takes, by variant and batch key.
    """

    __slots__ = (
        "counters",
        "earliest_deadline_ns",
        "estimates_ns",
        "has_cancelled",
        "in_flight",
        "model",
        "removed",
        "settled",
        "tickets",
    )

    def __init__(self, model: ServableModel) -> None:
        self.model = model
        self.tickets: deque[Ticket] = deque()
        self.counters = Counters()
        self.has_cancelled = False
        self.earliest_deadline_ns = 0
        self.in_flight = 0
        self.removed = False
        self.estimates_ns: dict[tuple[Variant, int], int] = {}
        self.settled: list[threading.Event] = []

    def append(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self._note_deadline(ticket)

    def plan(self, ahead: Iterable[Ticket] = ()) -> Plan | None:
        """Plan the next dispatch, as if the tickets `ahead` still stood at the front of the queue."""
        return plan(
            [*ahead, *self.tickets] if ahead else self.tickets,
            self.model.batch_keys_by_variant,
            coalescable=self.model.coalescable,
            cap=self.model.max_batch_size,
        )

    def take(self, n: int) -> list[Ticket]:
        """Remove and return the first `n` requests."""
        popleft = self.tickets.popleft
        return [popleft() for _ in range(n)]

    def measured(self, variant: Variant, batch_key: int, compute_ns: int) -> None:
        """Note how long a program took: the estimate follows the fastest runs, since only waiting makes one slower."""
        known = self.estimates_ns.get((variant, batch_key), compute_ns)
        self.estimates_ns[variant, batch_key] = min(compute_ns, known + known // 8 + 1000)

    def sweep(self, now_ns: int) -> list[Dropped]:
        """Remove the requests that are cancelled or expired, wherever in the queue; cheap when there cannot be any."""
        expired = 0 < self.earliest_deadline_ns <= now_ns
        if not (expired or self.has_cancelled):
            return []
        self.has_cancelled = False
        self.earliest_deadline_ns = 0
        kept: deque[Ticket] = deque()
        dropped: list[Dropped] = []
        for ticket in self.tickets:
            verdict = ticket.verdict(now_ns)
            if verdict is None:
                kept.append(ticket)
                self._note_deadline(ticket)
            else:
                dropped.append((ticket, verdict))
        self.tickets = kept
        return dropped

    def _note_deadline(self, ticket: Ticket) -> None:
        deadline = ticket.deadline_ns
        if deadline and (not self.earliest_deadline_ns or deadline < self.earliest_deadline_ns):
            self.earliest_deadline_ns = deadline


def select(queues: Iterable[ModelQueue]) -> ModelQueue:
    """FIFO over models: the one whose first request is the oldest; ties go to the smaller name."""
    return min(queues, key=lambda queue: (queue.tickets[0].enqueued_ns, queue.model.name))
