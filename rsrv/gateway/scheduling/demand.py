"""`Demand`: how often each model is asked for and what a request of it costs, learnt from repack to repack."""

from __future__ import annotations

from rsrv.gateway.scheduling.costs import Baselines
from rsrv.gateway.scheduling.ewma import ewma
from rsrv.gateway.workers.poll import Poll


class Demand:
    """Steps 2 and 3 of a repack (spec gateway-node 2.6.5). Averages decay with device seconds that the fleet used, so
    that an idle one keeps what it knew.

    Attributes:
        rates: model → requests a second.
        costs: model → device seconds a request; a model that never ran is not in it.
    """

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}
        self.costs: dict[str, float] = {}
        self._arrived: dict[str, int] = {}
        self._counted_since: float | None = None
        self._baselines = Baselines()

    def arrived(self, model: str) -> None:
        """One request for a known model, whatever becomes of it."""
        self._arrived[model] = self._arrived.get(model, 0) + 1

    def learn(self, poll: Poll, compute: float, now: float, halflife: float) -> None:
        """Fold in what happened since the last time, in which the fleet used `compute` device seconds.

        Without any of those the arrivals go on being counted: with a weight of nothing they would be lost.
        """
        self._forget_all_but(poll)
        wall = 0.0 if self._counted_since is None else now - self._counted_since
        if compute > 0 and wall > 0:
            for model in {*self._arrived, *self.rates}:
                arrivals = self._arrived.pop(model, 0) / wall
                self.rates[model] = ewma(self.rates.get(model, 0.0), arrivals, compute, halflife)
            self._counted_since = now
        elif self._counted_since is None:
            self._counted_since = now
        for model, used in self._baselines.advance(poll, now).items():
            if used.requests > 0:
                self.costs[model] = ewma(self.costs.get(model) or None, used.compute / used.requests, compute, halflife)

    def utilization(self, model: str) -> float:
        """Device seconds a second that the model needs; 0 while its rate or its cost is not known (cold)."""
        return self.rates.get(model, 0.0) * self.costs.get(model, 0.0)

    def forget(self, url: str) -> None:
        """The worker has left for good."""
        self._baselines.forget(url)

    def _forget_all_but(self, poll: Poll) -> None:
        for known in (self.rates, self.costs, self._arrived):
            for model in [name for name in known if name not in poll.hosts]:
                del known[model]
