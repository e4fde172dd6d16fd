"""What a request and an item of each model cost in device seconds, learnt from the workers' cumulative counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rsrv.core.wire.peek import batch_extent
from rsrv.gateway.scheduling.ewma import ewma
from rsrv.gateway.workers.poll import ModelReport, Poll

KEPT_SECONDS = 3600.0
"""How long what is known of a model stays when no worker lists it any more: it may be loaded again."""


class Used(NamedTuple):
    """What a model used: device seconds, requests, rows."""

    compute: float = 0.0
    requests: int = 0
    rows: int = 0


class Baselines:
    """The cumulative counters that were last seen, for each worker and model on its own: a worker that misses a poll
    neither takes its history out of a sum nor brings it back in as news.

    A worker that was never seen brings its whole history into `advance`'s first answer about it, since that is the best
    average there is, but not into `consumed`. One with a new incarnation started from zero. What a worker has not
    listed for `KEPT_SECONDS` was never seen there.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self.consumed = 0.0
        """Device seconds of the fleet between the last two calls of `advance`: what workers used that were known."""

    def advance(self, poll: Poll, now: float) -> dict[str, Used]:
        """What each model used since the last call, over all workers that answered; `now` is monotonic seconds.

        A worker's counters of a model count for nothing this time when one of them fell, or is no number.
        """
        used: dict[str, Used] = {}
        consumed = 0.0
        for url, report in poll.workers.items():
            known = url in self._seen
            if not known or self._seen[url].incarnation != report.incarnation:
                self._seen[url] = _Seen(report.incarnation)
            last = self._seen[url]
            last.names.seen(report.models, now)
            for model in last.names.forgotten(now):
                last.used.pop(model, None)
            for model, row in report.models.items():
                if not _is_sane(row):
                    continue
                before = last.used.get(model, _NOTHING)
                last.used[model] = Used(row.compute, row.requests, row.rows)
                compute, requests, rows = row.compute - before[0], row.requests - before[1], row.rows - before[2]
                if compute < 0 or requests < 0 or rows < 0:
                    continue
                total = used.get(model, _NOTHING)
                used[model] = Used(total.compute + compute, total.requests + requests, total.rows + rows)
                if known:
                    consumed += compute
        self.consumed = consumed
        return used

    def forget(self, url: str) -> None:
        self._seen.pop(url, None)


class Names:
    """When names were seen last."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def seen(self, names: Iterable[str], now: float) -> None:
        self._seen.update(dict.fromkeys(names, now))

    def forgotten(self, now: float) -> list[str]:
        """Those that were not seen for `KEPT_SECONDS`, each told once."""
        old = [name for name, at in self._seen.items() if now - at >= KEPT_SECONDS]
        for name in old:
            del self._seen[name]
        return old


@dataclass(slots=True)
class _Seen:
    """One worker's cumulative counters as they were last seen, by model."""

    incarnation: str
    used: dict[str, Used] = field(default_factory=dict)
    names: Names = field(default_factory=Names)


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of the models' costs at one moment.

    Attributes:
        per_item, per_request: device seconds of the models that were measured.
        max_batch: most items that a worker merges; 0 = unknown.
        batch_at: the input that carries the batch axis, and the axis from 0 in row-major order.
        mean_item, mean_request: the mean over the models that were measured; 0 = none was.
    """

    per_item: Mapping[str, float] = field(default_factory=dict)
    per_request: Mapping[str, float] = field(default_factory=dict)
    max_batch: Mapping[str, int] = field(default_factory=dict)
    batch_at: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    mean_item: float = 0.0
    mean_request: float = 0.0

    def item_cost(self, model: str) -> float:
        """Device seconds of an item: the model's own, else the fleet's mean, else 1.0; never 0."""
        return self.per_item.get(model, 0.0) or self.mean_item or 1.0

    def request_cost(self, model: str) -> float:
        """Device seconds of a request, by the same rule."""
        return self.per_request.get(model, 0.0) or self.mean_request or 1.0

    def items(self, body: bytes, model: str) -> int:
        """How many items a ModelInferRequest carries: the extent of the model's batch axis, at least 1.

        Raises InvalidRequest when the body is malformed.
        """
        where = self.batch_at.get(model)
        return batch_extent(body, *where) or 1 if where else 1


class CostCache:
    """Averages of what models cost; `costs` is the snapshot that requests read (spec gateway-node 2.2.2)."""

    def __init__(self) -> None:
        self._baselines = Baselines()
        self._item: dict[str, float] = {}
        self._request: dict[str, float] = {}
        self._names = Names()
        self.costs = Costs()

    def update(self, poll: Poll, halflife: float, now: float) -> Costs:
        """Take in a poll and publish a new snapshot; `halflife` is in device seconds of the fleet.

        What this poll does not say (a worker that reloads a model) stays as it was, for `KEPT_SECONDS`.
        """
        used = self._baselines.advance(poll, now)
        self._names.seen(poll.hosts, now)
        for model in self._names.forgotten(now):
            self._item.pop(model, None)
            self._request.pop(model, None)
        dt = self._baselines.consumed
        average(self._item, ((model, each.compute, each.rows) for model, each in used.items()), dt, halflife)
        average(self._request, ((model, each.compute, each.requests) for model, each in used.items()), dt, halflife)
        known = poll.hosts.keys() | self._item.keys() | self._request.keys()
        before = self.costs
        self.costs = Costs(
            per_item=dict(self._item),
            per_request=dict(self._request),
            max_batch={m: max(poll.max_batch.get(m, 0), 0) or before.max_batch.get(m, 0) for m in known},
            batch_at={m: at for m in known if (at := poll.batch_at.get(m) or before.batch_at.get(m))},
            mean_item=mean(self._item),
            mean_request=mean(self._request),
        )
        return self.costs

    @property
    def consumed(self) -> float:
        """Device seconds that the fleet used between the last two updates, as far as workers answered both."""
        return self._baselines.consumed

    def forget(self, url: str) -> None:
        """The worker has left; what was learnt from it stays."""
        self._baselines.forget(url)


def average(costs: dict[str, float], used: Iterable[tuple[str, float, int]], dt: float, halflife: float) -> None:
    """Bring `costs` up to date with (model, device seconds, how many) of the last `dt` device seconds of the fleet.

    A model that served nothing keeps its cost.
    """
    for model, compute, many in used:
        if many > 0:
            costs[model] = ewma(costs.get(model) or None, compute / many, dt, halflife)


def mean(costs: Mapping[str, float]) -> float:
    """The mean of the costs that are positive; 0 when none is."""
    positive = [cost for cost in costs.values() if cost > 0]
    return sum(positive) / len(positive) if positive else 0.0


_NOTHING = Used()

_LONGEST = 1e15
"""Device seconds that no worker has used: sums of what is below stay numbers."""


def _is_sane(row: ModelReport) -> bool:
    return 0 <= row.compute <= _LONGEST and row.requests >= 0 and row.rows >= 0
