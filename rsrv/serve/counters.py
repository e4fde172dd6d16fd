"""What the request path counts: a few additions under one short lock per request. `metrics` turns it into series."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass

LATENCY_BOUNDS = tuple(0.001 * 2**k for k in range(14))
"""Upper bounds in seconds of the latency histogram: 1 ms … 8.192 s."""
STAGE_BOUNDS = tuple(0.00001 * 4**k for k in range(10))
"""Upper bounds in seconds of the stage histograms: 10 µs … 2.6 s."""
STAGES = ("decode", "preprocess", "queue", "run", "postprocess", "encode")
"""Where a request's time goes; `run` is upload, execution and download of its batch."""

UNKNOWN_MODEL = "_unknown"
"""Label of requests whose model is not registered: a client's string must not become a series."""


_LATENCY_NS = tuple(round(bound * 1e9) for bound in LATENCY_BOUNDS)
_STAGE_NS = tuple(round(bound * 1e9) for bound in STAGE_BOUNDS)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """`counts` has one more item than `bounds_ns`: what is above the last bound."""

    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]
    total_ns: int


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Counters of one model's ModelInfer calls."""

    name: str
    statuses: dict[str, int]
    latency: HistogramSnapshot
    stages: dict[str, HistogramSnapshot]
    rows: int
    success_count: int
    success_ns: int
    fail_count: int
    fail_ns: int
    last_unix_ms: int


class RequestCounters:
    """Counts the ModelInfer calls of one model name."""

    __slots__ = (
        "_latency",
        "_latency_ns",
        "_lock",
        "_stages",
        "_stages_ns",
        "fail_count",
        "fail_ns",
        "last_unix_ms",
        "name",
        "ok",
        "ok_ns",
        "other",
        "rows",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        # Histograms as plain lists: counts by upper bound with one more for the rest, and sums.
        self._latency = [0] * (len(_LATENCY_NS) + 1)
        self._latency_ns = 0
        self._stages = tuple([0] * (len(_STAGE_NS) + 1) for _ in STAGES)
        self._stages_ns = [0] * len(STAGES)
        self.ok = 0
        self.ok_ns = 0
        self.other: dict[str, int] = {}
        self.fail_count = 0
        self.fail_ns = 0
        self.rows = 0
        self.last_unix_ms = 0

    def succeeded(self, total_ns: int, rows: int, stages_ns: tuple[int, int, int, int, int, int]) -> None:
        """Count an answered request; `stages_ns` in the order of `STAGES`, a negative value = it had no such stage."""
        with self._lock:
            self.ok += 1
            self.ok_ns += total_ns
            self.rows += rows
            self._latency[bisect_left(_LATENCY_NS, total_ns)] += 1
            self._latency_ns += total_ns
            stages, sums = self._stages, self._stages_ns
            for stage, stage_ns in enumerate(stages_ns):
                if stage_ns >= 0:
                    stages[stage][bisect_left(_STAGE_NS, stage_ns)] += 1
                    sums[stage] += stage_ns
            self.last_unix_ms = int(time.time() * 1000)

    def failed(self, total_ns: int, status: str) -> None:
        """Count a request that ended with another status than OK."""
        with self._lock:
            self.other[status] = self.other.get(status, 0) + 1
            self.fail_count += 1
            self.fail_ns += total_ns
            self._latency[bisect_left(_LATENCY_NS, total_ns)] += 1
            self._latency_ns += total_ns

    def snapshot(self) -> RequestSnapshot:
        with self._lock:
            return RequestSnapshot(
                name=self.name,
                statuses={**({"OK": self.ok} if self.ok else {}), **self.other},
                latency=HistogramSnapshot(_LATENCY_NS, tuple(self._latency), self._latency_ns),
                stages={
                    stage: HistogramSnapshot(_STAGE_NS, tuple(counts), total_ns)
                    for stage, counts, total_ns in zip(STAGES, self._stages, self._stages_ns, strict=True)
                },
                rows=self.rows,
                success_count=self.ok,
                success_ns=self.ok_ns,
                fail_count=self.fail_count,
                fail_ns=self.fail_ns,
                last_unix_ms=self.last_unix_ms,
            )


class ServerCounters:
    """The counters of all models, by name. Only registered names get their own; see `UNKNOWN_MODEL`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, RequestCounters] = {}
        self.unknown = RequestCounters(UNKNOWN_MODEL)

    def model(self, name: str) -> RequestCounters:
        """The counters of a registered model."""
        counters = self._models.get(name)
        if counters is None:
            with self._lock:
                counters = self._models.setdefault(name, RequestCounters(name))
        return counters

    def snapshots(self) -> list[RequestSnapshot]:
        """Of all models that had a request, sorted by name."""
        with self._lock:
            counters = [*self._models.values(), self.unknown]
        taken = [c.snapshot() for c in counters]
        return sorted((s for s in taken if s.statuses), key=lambda s: s.name)

    def snapshot(self, name: str) -> RequestSnapshot:
        return self.model(name).snapshot()
