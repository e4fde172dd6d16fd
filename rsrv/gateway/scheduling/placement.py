"""Which workers each model's traffic goes to: the heaviest first, each to the least pressed of compute and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rsrv.gateway.scheduling.names import ALL

Assignment = Mapping[str, tuple[tuple[str, float], ...]]
"""Model → (worker, share of its requests), sorted by worker; the shares of a model sum to 1."""

_SEARCH_STEPS = 20_000
"""Most moves and exchanges that are weighed when memory has to come first: some ten milliseconds, under a lock."""


class PlacementResult(NamedTuple):
    """A placement.

    Attributes:
        assignment: every model that was given, on at least one worker; empty without workers.
        held: models that stayed at home although another worker was as good or better.
        best_improvement: the largest share by which a model's home was worse than its best worker.
    """

    assignment: Assignment
    held: int = 0
    best_improvement: float = 0.0


def place(
    u: Mapping[str, float],
    workers: Iterable[str],
    previous: Assignment,
    mem: Mapping[str, int],
    cap: Mapping[str, int],
    *,
    replicas: Mapping[str, int] = {},
    default_replicas: int = 1,
    hysteresis: float = 0.0,
    forbid: bool = True,
    charged: Mapping[str, tuple[float, int]] = {},
) -> PlacementResult:
    """Place every model of `u` (spec gateway-node 2.6.6): the same arguments always give the same placement.

    The greedy pass takes models by load and does not look ahead. When it leaves a worker with more weights than fit and
    `forbid` is set, memory goes first: by size, and at the last by first fit and a search that evens out the pressure.
    So nothing is oversubscribed where first fit by decreasing size finds a way, and the least of the bytes that are
    over wins where none does.

    Args:
        u: model → device seconds a second that it needs; 0 = cold.
        workers: those to place on.
        previous: the placement so far; workers and models that are gone are ignored.
        mem, cap: model → bytes of weights; worker → bytes for weights, 0 = no constraint.
        replicas, default_replicas: workers per model, for those that have their own number (0 = none), and for
            all others; `ALL` = every worker.
        hysteresis: how much worse (0.1 = 10 %) than the best worker its home may be before a model leaves it.
        forbid: whether a worker on which the weights do not fit is taken only when there is no other.
        charged: worker → (device seconds a second, bytes) that is taken by models which are not placed here.
    """
    urls = sorted(set(workers))
    if not urls:
        return PlacementResult({})
    sizes = {model: max(0, mem.get(model, 0)) for model in u}
    models = [
        _Model(name, max(0.0, load), sizes[name], _count(replicas.get(name, 0) or default_replicas, len(urls)))
        for name, load in u.items()
    ]
    by_load = sorted(models, key=lambda model: (-model.load, -model.size, model.name))
    by_size = sorted(models, key=lambda model: (-model.size, -model.load, model.name))
    fleet = _Fleet(urls, cap, charged)
    result = fleet.greedy(by_load, previous, hysteresis, forbid)
    if not forbid or not fleet.overflow():
        return result
    least = fleet.overflow()
    attempts: list[Callable[[_Fleet], PlacementResult]] = [
        lambda other: other.greedy(by_size, previous, hysteresis, forbid),
        lambda other: other.first_fit(by_size, previous, hysteresis),
        lambda other: other.first_fit(by_size, {}, hysteresis),
    ]
    for attempt in attempts:
        other = _Fleet(urls, cap, charged)
        candidate = attempt(other)
        if other.overflow() < least:
            result, least = candidate, other.overflow()
        if least == fleet.unavoidable:
            break
    return result


class _Model(NamedTuple):
    name: str
    load: float
    size: int
    copies: int

    @property
    def share(self) -> float:
        return self.load / self.copies


class _Fleet:
    """The workers while models are put on them."""

    def __init__(self, urls: Sequence[str], cap: Mapping[str, int], charged: Mapping[str, tuple[float, int]]) -> None:
        self.urls = urls
        self.budget = {url: max(0, cap.get(url, 0)) for url in urls}
        self.load = {url: max(0.0, charged.get(url, (0.0, 0))[0]) for url in urls}
        self.bytes = {url: max(0, charged.get(url, (0.0, 0))[1]) for url in urls}
        self.count = dict.fromkeys(urls, 0)
        self.placed: dict[str, list[str]] = {}
        self.unavoidable = self.overflow()

    def pressure(self, url: str, load: float = 0.0, size: int = 0) -> float:
        """The larger of compute and of the part of the weight budget that is taken, with that much more on it."""
        budget = self.budget[url]
        compute = self.load[url] + load
        return max(compute, (self.bytes[url] + size) / budget) if budget else compute

    def fits(self, url: str, size: int) -> bool:
        budget = self.budget[url]
        return not budget or self.bytes[url] + size <= budget

    def overflow(self) -> int:
        """Bytes over the budgets, of all workers."""
        return sum(max(0, self.bytes[url] - budget) for url, budget in self.budget.items() if budget)

    def put(self, model: _Model, urls: Iterable[str]) -> None:
        self.placed[model.name] = sorted(urls)
        for url in self.placed[model.name]:
            self._charge(url, model, 1)

    def _charge(self, url: str, model: _Model, sign: int) -> None:
        self.count[url] += sign
        self.load[url] += sign * model.share
        self.bytes[url] += sign * model.size

    def result(self, held: int = 0, best_improvement: float = 0.0) -> PlacementResult:
        assignment = {
            model: tuple((url, 1.0 / len(urls)) for url in urls) for model, urls in sorted(self.placed.items())
        }
        return PlacementResult(assignment, held, best_improvement)

    # --- load first ---------------------------------------------------------------------------------------------------

    def greedy(
        self, models: Iterable[_Model], previous: Assignment, hysteresis: float, forbid: bool
    ) -> PlacementResult:
        """Each model in turn, to where it presses least."""
        held, best_improvement = 0, 0.0
        for model in models:
            homes = {url for url, _ in previous.get(model.name, ())}
            if model.copies > 1:
                self.put(model, self._spread(model, homes, forbid))
                continue
            pressures, fitting = self._weigh(model)
            candidates = (fitting if forbid else ()) or self.urls
            # Of equals the one with fewer models: nothing is known of models that had no traffic yet, and without
            # budgets all of them would be equal everywhere. Then the first: `min` keeps the order of the urls.
            chosen = best = min(candidates, key=lambda url: (pressures[url], self.count[url]))
            if len(homes) == 1 and (home := next(iter(homes))) in pressures:
                if pressures[best] > 0:
                    best_improvement = max(best_improvement, pressures[home] / pressures[best] - 1.0)
                if home in candidates and pressures[home] <= pressures[best] * (1.0 + hysteresis):
                    chosen = home
                    held += home != best
            self.put(model, (chosen,))
        return self.result(held, best_improvement)

    def _weigh(self, model: _Model) -> tuple[dict[str, float], list[str]]:
        """The pressure on every worker if the model went there, and where it fits: both in one pass."""
        pressures, fitting = {}, []
        for url in self.urls:
            compute, budget = self.load[url] + model.load, self.budget[url]
            nbytes = self.bytes[url] + model.size
            pressures[url] = max(compute, nbytes / budget) if budget else compute
            if nbytes <= budget or not budget:
                fitting.append(url)
        return pressures, fitting

    def _spread(self, model: _Model, homes: set[str], forbid: bool) -> list[str]:
        def order(url: str) -> tuple[bool, float, bool, int, str]:
            over = forbid and not self.fits(url, model.size)
            return over, self.pressure(url, model.share, model.size), url not in homes, self.count[url], url

        return sorted(self.urls, key=order)[: model.copies]

    # --- memory first -------------------------------------------------------------------------------------------------

    def first_fit(self, models: Sequence[_Model], previous: Assignment, hysteresis: float) -> PlacementResult:
        """What fits at home stays there, the rest goes by first fit; then evened out without leaving any budget.

        `models` come by decreasing size.
        """
        left = []
        for model in models:
            homes = [url for url, _ in previous.get(model.name, ()) if url in self.load]
            if len(homes) == model.copies and all(self.fits(url, model.size) for url in homes):
                self.put(model, homes)
            else:
                left.append(model)
        for model in left:
            fitting = [url for url in self.urls if self.fits(url, model.size)]
            others = sorted(set(self.urls).difference(fitting), key=lambda url: (self.pressure(url), url))
            self.put(model, [*fitting, *others][: model.copies])
        self._even_out({model.name: model for model in models}, hysteresis)
        return self.result()

    def _even_out(self, models: Mapping[str, _Model], hysteresis: float) -> None:
        """Move models off the most pressed worker, or exchange two, while that lowers the pressure of the pair."""
        steps = _SEARCH_STEPS
        on: dict[str, list[str]] = {url: [] for url in self.urls}
        for name, urls in sorted(self.placed.items()):
            for url in urls:
                on[url].append(name)
        while steps > 0:
            hot = max(self.urls, key=self.pressure)
            best: tuple[float, str, str, str | None] | None = None
            for url in self.urls:
                for name in on[hot]:
                    if url == hot or name in on[url]:
                        continue
                    for back in (None, *on[url]):
                        steps -= 1
                        if back is not None and back in on[hot]:
                            continue
                        peak = self._exchanged(hot, url, models[name], models[back] if back is not None else None)
                        if peak is not None and (best is None or peak < best[0]):
                            best = (peak, url, name, back)
            # By more than rounding even without hysteresis, so that the search ends.
            if best is None or self.pressure(hot) <= best[0] * (1 + max(hysteresis, 1e-9)):
                return
            _, url, name, back = best
            self._relocate(name, models[name], hot, url, on)
            if back is not None:
                self._relocate(back, models[back], url, hot, on)

    def _exchanged(self, hot: str, url: str, there: _Model, back: _Model | None) -> float | None:
        """The pressure of the two workers after the exchange; None when a budget would not hold."""
        load = there.share - (back.share if back is not None else 0.0)
        size = there.size - (back.size if back is not None else 0)
        if not self.fits(url, size) or not self.fits(hot, -size):
            return None
        return max(self.pressure(hot, -load, -size), self.pressure(url, load, size))

    def _relocate(self, name: str, model: _Model, source: str, target: str, on: dict[str, list[str]]) -> None:
        self._charge(source, model, -1)
        self._charge(target, model, 1)
        on[source].remove(name)
        on[target].append(name)
        self.placed[name] = sorted({*self.placed[name], target} - {source})


def _count(replicas: int, workers: int) -> int:
    return workers if replicas == ALL else min(max(replicas, 1), workers)
