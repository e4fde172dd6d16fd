"""What the scheduler counts for each model: mutable `Counters` inside, frozen `ModelStats` for metrics and status."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rsrv.core.errors import RsrvError

if TYPE_CHECKING:
    from rsrv.serve.scheduler.batch import Batch

WAIT_SAMPLES = 1024
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class ModelStats:
    """A snapshot of one model's counters.

    Attributes:
        dispatch_count: executions that succeeded.
        requests_served, rows_served: what they served; padding and dropped requests are not in.
        padding_rows: rows that were computed for nobody.
        total_compute_seconds: upload, execution and download of those executions.
        queue_depth: requests that wait now.
        waits_ns: time between acceptance and launch of the last 1024 requests.
        errors: failed dispatches by reason.
        dropped: requests by reason that never ran (deadline, cancelled, queue_full, stopping, unloaded).
        batch_keys: executions by batch key.
    """

    name: str
    incarnation: int
    dispatch_count: int
    requests_served: int
    rows_served: int
    padding_rows: int
    total_compute_seconds: float
    queue_depth: int
    waits_ns: tuple[int, ...]
    errors: Mapping[str, int]
    dropped: Mapping[str, int]
    batch_keys: Mapping[int, int]

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
        self.batch_keys: Counter[int] = Counter()

    def record(self, batch_key: int, rows: int, padding: int, compute_ns: int, waits_ns: Sequence[int]) -> None:
        """One successful dispatch that served ``len(waits_ns)`` requests."""
        self.dispatch_count += 1
        self.requests_served += len(waits_ns)
        self.rows_served += rows
        self.padding_rows += padding
        self.compute_ns += compute_ns
        self.waits_ns.extend(waits_ns)
        self.batch_keys[batch_key] += 1

    def snapshot(self, name: str, incarnation: int, queue_depth: int) -> ModelStats:
        return ModelStats(
            name=name,
            incarnation=incarnation,
            dispatch_count=self.dispatch_count,
            requests_served=self.requests_served,
            rows_served=self.rows_served,
            padding_rows=self.padding_rows,
            total_compute_seconds=self.compute_ns / 1e9,
            queue_depth=queue_depth,
            waits_ns=tuple(self.waits_ns),
            errors=dict(self.errors),
            dropped=dict(self.dropped),
            batch_keys=dict(self.batch_keys),
        )


def nearest_rank(ordered: Sequence[int], quantile: float) -> int:
    """The nearest-rank percentile of ascending samples; 0 when there are none."""
    n = len(ordered)
    return ordered[min(max(math.ceil(quantile * n), 1), n) - 1] if n else 0


def reason_of(error: BaseException) -> str:
    """The label under which `error` is counted."""
    return error.reason if isinstance(error, RsrvError) else RsrvError.reason
