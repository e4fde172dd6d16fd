"""What the gateway's request path counts: plain numbers under one lock. `exposition` makes series of them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

UNKNOWN = "_unknown_"
"""Label of requests for models that no worker has registered: a client's string must not become a series."""

BOUNDS = tuple(0.001 * 2**k for k in range(17))
"""Upper bounds in seconds of every histogram: 1 ms … 65.5 s."""
MODELS = 10_000
"""Most names that are counted apart; what comes beyond them is counted as `UNKNOWN` until some are forgotten."""
REASONS = 32
"""Most reasons of a model's failovers that are counted apart: workers give them."""
REASON_LETTERS = 64
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts` has one more item than `BOUNDS`: what is above the last one. `total` is in seconds."""

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class CountersSnapshot:
    """Everything that was counted so far.

    Attributes:
        statuses: (rpc, model, status) → calls that ended so; the model is "" where the call names none.
        latency: (rpc, model) → how long they took.
        worker_latency: (rpc, worker's address) → how long one call to it took.
        queue_wait: worker's address → how long calls waited for a slot or a gate before they were sent.
        failovers: (model, reason) → attempts that moved on to another replica.
        ejections: worker's address → how often it was taken out for failing.
        hedges: second attempts that were made because the first took long.
    """

    statuses: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    latency: Mapping[tuple[str, str], Histogram] = field(default_factory=dict)
    worker_latency: Mapping[tuple[str, str], Histogram] = field(default_factory=dict)
    queue_wait: Mapping[str, Histogram] = field(default_factory=dict)
    failovers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    ejections: Mapping[str, int] = field(default_factory=dict)
    hedges: int = 0

    @property
    def models(self) -> frozenset[str]:
        """The names that something was counted for."""
        return frozenset([*(model for _, model in self.latency), *(model for model, _ in self.failovers)])

    @property
    def workers(self) -> frozenset[str]:
        """The addresses that something was counted for."""
        return frozenset([*(url for _, url in self.worker_latency), *self.queue_wait, *self.ejections])


class _Times:
    """A histogram that grows, and with it the calls by status."""

    __slots__ = ("counts", "statuses", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0
        self.statuses: dict[str, int] = {}

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def histogram(self) -> Histogram:
        return Histogram(tuple(self.counts), self.total)


class GatewayCounters:
    """Counts calls. Thread safe.

    Whoever counts gives `UNKNOWN` for a model that the routing table does not know, and only addresses of members of
    the fleet, and says `forget` when one leaves: labels come from nowhere else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: set[str] = set()
        self._requests: dict[tuple[str, str], _Times] = {}
        self._calls: dict[tuple[str, str], _Times] = {}
        self._waits: dict[str, _Times] = {}
        self._failovers: dict[str, dict[str, int]] = {}
        self._ejections: dict[str, int] = {}
        self._hedges = 0

    # --- counting -------------------------------------------------------------------------------------------------

    def finished(self, rpc: str, model: str, status: str, seconds: float) -> None:
        """A client's call has ended, `status` as in spec gateway-node 1.5.3; `model` "" = it names none."""
        with self._lock:
            times = self._requests.get((rpc, model))
            if times is None:
                times = self._requests.setdefault((rpc, self._name(model)), _Times())
            times.statuses[status] = times.statuses.get(status, 0) + 1
            times.add(seconds)

    def worker_call(self, rpc: str, url: str, seconds: float) -> None:
        """One call to a worker has ended, however that was."""
        with self._lock:
            times = self._calls.get((rpc, url))
            if times is None:
                times = self._calls[rpc, url] = _Times()
            times.add(seconds)

    def queue_wait(self, url: str, seconds: float) -> None:
        """A call was sent that had waited for a slot, or the gate, of a worker; those that gave up are not counted."""
        with self._lock:
            times = self._waits.get(url)
            if times is None:
                times = self._waits[url] = _Times()
            times.add(seconds)

    def failover(self, model: str, reason: str) -> None:
        """An attempt failed and the call moves on to another replica."""
        reason = reason[:REASON_LETTERS]
        with self._lock:
            reasons = self._failovers.get(model)
            if reasons is None:
                reasons = self._failovers.setdefault(self._name(model), {})
            if reason not in reasons and len(reasons) >= REASONS:
                reason = OTHER
            reasons[reason] = reasons.get(reason, 0) + 1

    def ejected(self, url: str) -> None:
        """A worker was taken out for a while because its calls failed."""
        with self._lock:
            self._ejections[url] = self._ejections.get(url, 0) + 1

    def hedged(self) -> None:
        """A second worker was asked because the first took long."""
        with self._lock:
            self._hedges += 1

    # --- forgetting and telling -----------------------------------------------------------------------------------

    def forget(self, url: str) -> None:
        """A worker has left the fleet: its series go. One of the same address that comes later starts from nothing."""
        with self._lock:
            for key in [key for key in self._calls if key[1] == url]:
                del self._calls[key]
            self._waits.pop(url, None)
            self._ejections.pop(url, None)

    def forget_model(self, model: str) -> None:
        """A model is long gone: its series go."""
        with self._lock:
            for key in [key for key in self._requests if key[1] == model]:
                del self._requests[key]
            self._failovers.pop(model, None)
            self._models.discard(model)

    def snapshot(self) -> CountersSnapshot:
        with self._lock:
            return CountersSnapshot(
                statuses={
                    (*key, status): count
                    for key, times in self._requests.items()
                    for status, count in times.statuses.items()
                },
                latency={key: times.histogram() for key, times in self._requests.items()},
                worker_latency={key: times.histogram() for key, times in self._calls.items()},
                queue_wait={url: times.histogram() for url, times in self._waits.items()},
                failovers={
                    (model, reason): count
                    for model, reasons in self._failovers.items()
                    for reason, count in reasons.items()
                },
                ejections=dict(self._ejections),
                hedges=self._hedges,
            )

    def _name(self, model: str) -> str:
        """The label for a model that has no cell yet under this rpc. The lock is held."""
        if model in ("", UNKNOWN) or model in self._models:
            return model
        if len(self._models) >= MODELS:
            return UNKNOWN
        self._models.add(model)
        return model
