"""What the scheduler counts for each model: mutable `Counters` inside, frozen `ModelStats` for metrics and status."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rsrv.core.errors import RsrvError
from rsrv.serve.scheduler.plan import Variant

if TYPE_CHECKING:
    from rsrv.serve.scheduler.batch import Batch
    from rsrv.serve.scheduler.queue import ModelQueue

WAIT_SAMPLES = 1024
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class ModelStats:
    """A snapshot of one model's counters. They go on when a new incarnation takes over; `incarnation` is the newest.

    Attributes:
        dispatch_count: executions that succeeded.
        requests_served, rows_served: what they served; padding and dropped requests are not in.
        padding_rows: rows that were computed for nobody.
        total_compute_seconds: upload, execution and download of those executions.
        queue_depth, queued_rows: requests that wait now, and their rows.
        oldest_wait_seconds: for how long the first of them has waited.
        in_flight: batches that are staged, running or being settled.
        weight: the model's share of the device under `fair`, relative to those of the others.
        max_batch_size: most rows that are merged; 0 = requests are never merged.
        recent_seconds: device time that it used, decayed by half every `scheduler.ema_halflife_seconds`.
        costs: measured seconds of each program, by variant and batch key.
        waits_ns: time between acceptance and launch of the last 1024 requests.
        errors: failed dispatches by reason.
        dropped: requests by reason that never ran: deadline (it had passed), laxity (it would have passed by the end),
            predicted (the same, seen on arrival), cancelled, queue_full, stopping, unloaded.
        batch_keys: executions by batch key.
        batch_rows: executions by the rows that they served, without padding.
    """

    name: str
    incarnation: int
    dispatch_count: int
    requests_served: int
    rows_served: int
    padding_rows: int
    total_compute_seconds: float
    queue_depth: int
    queued_rows: int
    oldest_wait_seconds: float
    in_flight: int
    weight: float
    max_batch_size: int
    recent_seconds: float
    costs: Mapping[tuple[Variant, int], float]
    waits_ns: tuple[int, ...]
    errors: Mapping[str, int]
    dropped: Mapping[str, int]
    batch_keys: Mapping[int, int]
    batch_rows: Mapping[int, int]

    @cached_property
    def queue_wait_seconds(self) -> Mapping[float, float]:
        """Nearest-rank quantiles of `waits_ns`; sorted here, and not while the scheduler's lock is held."""
        waits = sorted(self.waits_ns)
        return {quantile: nearest_rank(waits, quantile) / 1e9 for quantile in QUANTILES}


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One dispatch, for observers: `requests` and `rows` without padding and dropped ones, `error` None on success."""

    model: str
    batch_key: int
    requests: int
    rows: int
    compute_ns: int
    error: BaseException | None

    @classmethod
    def of(cls, batch: Batch) -> BatchReport:
        name = batch.queue.model.name
        return cls(name, batch.batch_key, len(batch.live), batch.live_rows, batch.compute_ns, batch.error)


class Counters:
    """One model's counters; every method runs under the scheduler's lock."""

    __slots__ = (
        "batch_keys",
        "batch_rows",
        "compute_ns",
        "dispatch_count",
        "dropped",
        "errors",
        "padding_rows",
        "requests_served",
        "rows_served",
        "waits_ns",
    )

    def __init__(self) -> None:
        self.dispatch_count = 0
        self.requests_served = 0
        self.rows_served = 0
        self.padding_rows = 0
        self.compute_ns = 0
        self.waits_ns: deque[int] = deque(maxlen=WAIT_SAMPLES)
        self.errors: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.batch_keys: dict[int, int] = {}
        self.batch_rows: dict[int, int] = {}

    def record(self, batch_key: int, rows: int, padding: int, compute_ns: int, waits_ns: Sequence[int]) -> None:
        """One successful dispatch that served ``len(waits_ns)`` requests."""
        self.dispatch_count += 1
        self.requests_served += len(waits_ns)
        self.rows_served += rows
        self.padding_rows += padding
        self.compute_ns += compute_ns
        self.waits_ns.extend(waits_ns)
        self.batch_keys[batch_key] = self.batch_keys.get(batch_key, 0) + 1
        self.batch_rows[rows] = self.batch_rows.get(rows, 0) + 1


def snapshot(queue: ModelQueue, recent_seconds: float, now_ns: int) -> ModelStats:
    """What the model of `queue` has counted and what it holds, with the incarnations before it. The lock is held."""
    counters, model, queues = queue.counters, queue.model, queue.account.queues
    oldest_ns = min([other.tickets[0].enqueued_ns for other in queues if other.depth], default=now_ns)
    return ModelStats(
        name=model.name,
        incarnation=model.incarnation,
        dispatch_count=counters.dispatch_count,
        requests_served=counters.requests_served,
        rows_served=counters.rows_served,
        padding_rows=counters.padding_rows,
        total_compute_seconds=counters.compute_ns / 1e9,
        queue_depth=sum([other.depth for other in queues]),
        queued_rows=sum([other.rows for other in queues]),
        oldest_wait_seconds=(now_ns - oldest_ns) / 1e9,
        in_flight=sum([other.in_flight for other in queues]),
        weight=queue.account.weight,
        max_batch_size=queue.max_batch_size,
        recent_seconds=recent_seconds,
        costs={program: estimate.mean_ns / 1e9 for program, estimate in queue.costs.estimates.items()},
        waits_ns=tuple(counters.waits_ns),
        errors=dict(counters.errors),
        dropped=dict(counters.dropped),
        batch_keys=dict(counters.batch_keys),
        batch_rows=dict(counters.batch_rows),
    )


def nearest_rank(ordered: Sequence[int], quantile: float) -> int:
    """The nearest-rank percentile of ascending samples; 0 when there are none."""
    n = len(ordered)
    return ordered[min(max(math.ceil(quantile * n), 1), n) - 1] if n else 0


def reason_of(error: BaseException) -> str:
    """The label under which `error` is counted."""
    return error.reason if isinstance(error, RsrvError) else RsrvError.reason
