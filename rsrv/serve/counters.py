"""What the request path counts: it writes down what a request took, and that is summed up later, many at a time.

`metrics` turns it into series.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import chain

import numpy as np

LATENCY_BOUNDS = tuple(0.001 * 2**k for k in range(14))
"""Upper bounds in seconds of the latency histogram: 1 ms … 8.192 s."""
STAGE_BOUNDS = tuple(0.00001 * 4**k for k in range(10))
"""Upper bounds in seconds of the stage histograms: 10 µs … 2.6 s."""
STAGES = ("decode", "preprocess", "queue", "upload", "run", "download", "postprocess", "encode")
"""Where a request's time goes; `upload`, `run` and `download` are those of the whole batch that it was in."""
TRITON_STAGES = {
    "queue": ("queue",),
    "compute_input": ("decode", "preprocess", "upload"),
    "compute_infer": ("run",),
    "compute_output": ("download", "postprocess", "encode"),
}
"""Triton's four parts of a request as ours; each of its requests goes through all four, so they share one count."""

UNKNOWN_MODEL = "_unknown"
"""Label of requests whose model is not registered: a client's string must not become a series."""


_FOLD = 256
"""Answered requests that are written down before they are summed up, which then costs half a microsecond each."""
_LATENCY_NS = tuple(round(bound * 1e9) for bound in LATENCY_BOUNDS)
_STAGE_NS = tuple(round(bound * 1e9) for bound in STAGE_BOUNDS)
_LATENCY_BOUNDS, _STAGE_BOUNDS = np.array(_LATENCY_NS), np.array(_STAGE_NS)


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

    def stage_ns(self, *names: str) -> int:
        """All the time that answered requests spent in these stages."""
        return sum(self.stages[name].total_ns for name in names)


class RequestCounters:
    """Counts the ModelInfer calls of one model name. Thread safe."""

    __slots__ = (
        "_latency",
        "_latency_ns",
        "_lock",
        "_stages",
        "_stages_ns",
        "_written",
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
        self._written: deque[tuple[int, ...]] = deque()
        # Histograms: counts by upper bound with one more for the rest, and sums.
        self._latency = np.zeros(len(_LATENCY_NS) + 1, np.int64)
        self._latency_ns = 0
        self._stages = np.zeros((len(STAGES), len(_STAGE_NS) + 1), np.int64)
        self._stages_ns = [0] * len(STAGES)
        self.ok = 0
        self.ok_ns = 0
        self.other: dict[str, int] = {}
        self.fail_count = 0
        self.fail_ns = 0
        self.rows = 0
        self.last_unix_ms = 0

    def succeeded(self, total_ns: int, rows: int, stages_ns: tuple[int, ...]) -> None:
        """Count an answered request; `stages_ns` in the order of `STAGES`, a negative value = it had no such stage."""
        self.last_unix_ms = time.time_ns() // 1_000_000
        written = self._written
        written.append((total_ns, rows, *stages_ns))
        if len(written) >= _FOLD:
            with self._lock:
                self._fold()

    def failed(self, total_ns: int, status: str) -> None:
        """Count a request that ended with another status than OK."""
        with self._lock:
            self.other[status] = self.other.get(status, 0) + 1
            self.fail_count += 1
            self.fail_ns += total_ns
            self._latency[bisect_left(_LATENCY_NS, total_ns)] += 1
            self._latency_ns += total_ns

    def _fold(self) -> None:
        """Sum up what is written down. The lock is held, but nobody needs it to write on."""
        written = self._written
        taken = [written.popleft() for _ in range(len(written))]
        if not taken:
            return
        flat = np.fromiter(chain.from_iterable(taken), np.int64, len(taken) * len(taken[0]))
        total_ns, rows, *stages = flat.reshape(len(taken), -1).T
        self.ok += len(taken)
        self.ok_ns += int(total_ns.sum())
        self.rows += int(rows.sum())
        self._latency += _binned(_LATENCY_BOUNDS, total_ns)
        self._latency_ns += int(total_ns.sum())
        for stage, stage_ns in enumerate(stages):
            stage_ns = stage_ns[stage_ns >= 0]
            self._stages[stage] += _binned(_STAGE_BOUNDS, stage_ns)
            self._stages_ns[stage] += int(stage_ns.sum())

    def snapshot(self) -> RequestSnapshot:
        with self._lock:
            self._fold()
            return RequestSnapshot(
                name=self.name,
                statuses={**({"OK": self.ok} if self.ok else {}), **self.other},
                latency=HistogramSnapshot(_LATENCY_NS, tuple(self._latency.tolist()), self._latency_ns),
                stages={
                    stage: HistogramSnapshot(_STAGE_NS, tuple(counts.tolist()), total_ns)
                    for stage, counts, total_ns in zip(STAGES, self._stages, self._stages_ns, strict=True)
                },
                rows=self.rows,
                success_count=self.ok,
                success_ns=self.ok_ns,
                fail_count=self.fail_count,
                fail_ns=self.fail_ns,
                last_unix_ms=self.last_unix_ms,
            )


def _binned(bounds: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How many values are up to and including each bound, and how many are above the last."""
    return np.bincount(np.searchsorted(bounds, values), minlength=len(bounds) + 1)


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

    def rename(self, old: str, new: str) -> None:
        """What was counted for `old` goes on as `new`; requests that hold the counters go on counting there."""
        with self._lock:
            counters = self._models.pop(old, None)
            if counters is not None:
                counters.name = new
                self._models[new] = counters

    def forget(self, name: str) -> None:
        """The model is gone. Its counters go with it; one of the same name that comes later starts from nothing."""
        with self._lock:
            self._models.pop(name, None)

    def snapshots(self) -> list[RequestSnapshot]:
        """Of all models that had a request, sorted by name."""
        with self._lock:
            counters = [*self._models.values(), self.unknown]
        taken = [c.snapshot() for c in counters]
        return sorted((s for s in taken if s.statuses), key=lambda s: s.name)

    def snapshot(self, name: str) -> RequestSnapshot:
        return self.model(name).snapshot()
