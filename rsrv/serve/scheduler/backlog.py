"""All requests that wait, and the choice of what runs next. Locking and the time are the caller's business."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rsrv.core.errors import DeadlineExceeded, ModelUnloaded, QueueFull
from rsrv.serve.scheduler.batch import Batch
from rsrv.serve.scheduler.plan import Variant, fitting_key
from rsrv.serve.scheduler.queue import Dropped, ModelQueue, Result, Ticket, select

if TYPE_CHECKING:
    from rsrv.core.shm.tensor import Tensor
    from rsrv.serve.scheduler.model import ServableModel

logger = logging.getLogger(__name__)


class Backlog:
    """The queues of all scheduled models.

    `dropped` collects requests that were found cancelled or expired, for whoever settles them.
    """

    def __init__(self, max_queue_depth: int) -> None:
        self._max_queue_depth = max_queue_depth
        self.queues: dict[str, ModelQueue] = {}
        self._active: dict[ModelQueue, None] = {}
        self._retries: deque[tuple[ModelQueue, Ticket]] = deque()
        self.dropped: list[Dropped] = []

    @property
    def waiting(self) -> bool:
        return bool(self._active or self._retries)

    def add(self, model: ServableModel) -> None:
        """Raises ValueError when the name is taken."""
        if model.name in self.queues:
            raise ValueError(f"model {model.name!r} is already scheduled; remove it first")
        self.queues[model.name] = ModelQueue(model)

    def remove(self, name: str) -> ModelQueue | None:
        """Accept nothing more for `name`; what is queued for it stays queued."""
        queue = self.queues.pop(name, None)
        if queue is not None:
            queue.removed = True
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
    ) -> Ticket:
        """Append a request. Raises ModelUnloaded, DeadlineExceeded or QueueFull."""
        queue = self.queues.get(model.name)
        if queue is None or queue.model is not model:
            raise ModelUnloaded(f"model {model.name!r} (incarnation {model.incarnation}) is no longer served")
        if deadline_ns and now_ns >= deadline_ns:
            queue.counters.dropped["deadline"] += 1
            raise DeadlineExceeded(f"the deadline passed {(now_ns - deadline_ns) / 1e6:.1f} ms before queueing")
        if len(queue.tickets) >= self._max_queue_depth and not self._sweep(queue, now_ns):
            queue.counters.dropped["queue_full"] += 1
            raise QueueFull(f"the queue of model {model.name!r} is full: {self._max_queue_depth} requests wait")
        ticket = Ticket(queue, inputs, rows, variant, deadline_ns, done, now_ns)
        queue.append(ticket)
        self._active[queue] = None
        return ticket

    def next(self, now_ns: int) -> Batch | None:
        """Take the next requests to run: those to be retried alone, then of the model with the oldest request."""
        if self._retries:
            queue, ticket = self._retries.popleft()
            key = fitting_key(queue.model.batch_keys(ticket.variant), ticket.rows)
            queue.in_flight += 1
            return Batch(queue, [ticket], key, final=True)
        for queue in [*self._active]:
            self._sweep(queue, now_ns)
        if not self._active:
            return None
        queue = select(self._active)
        try:
            plan = queue.plan()
            assert plan is not None
        except Exception as error:
            # A bug, and it would hold up every model; the request that showed it pays.
            logger.exception("planning failed model=%s", queue.model.name)
            self.dropped += [(ticket, error) for ticket in self._take(queue, 1)]
            return None
        queue.in_flight += 1
        return Batch(queue, self._take(queue, plan.take), plan.batch_key, final=plan.full)

    def grow(self, batch: Batch) -> Batch | None:
        """`batch` and the queued requests that can join it; None when none can."""
        queue, tickets = batch.queue, batch.tickets
        plan = queue.plan(ahead=tickets)
        if plan is None or plan.take <= len(tickets):
            return None
        return Batch(queue, tickets + self._take(queue, plan.take - len(tickets)), plan.batch_key, final=True)

    def retry(self, queue: ModelQueue, tickets: Sequence[Ticket]) -> None:
        """Run each of `tickets` alone, before anything else."""
        self._retries.extend((queue, ticket) for ticket in tickets)

    def clear(self, only: ModelQueue | None = None) -> list[Ticket]:
        """Take everything that waits, or what waits in one queue."""
        tickets = [ticket for queue, ticket in self._retries if only is None or queue is only]
        self._retries = deque((queue, ticket) for queue, ticket in self._retries if not (only is None or queue is only))
        for queue in [*self._active] if only is None else [only]:
            tickets += self._take(queue, len(queue.tickets))
        return tickets

    def _take(self, queue: ModelQueue, n: int) -> list[Ticket]:
        tickets = queue.take(n)
        if not queue.tickets:
            self._active.pop(queue, None)
        return tickets

    def _sweep(self, queue: ModelQueue, now_ns: int) -> bool:
        dropped = queue.sweep(now_ns)
        if not dropped:
            return False
        self.dropped += dropped
        if not queue.tickets:
            self._active.pop(queue, None)
        return True
