"""The modes without a placement: in turn, and to whoever has the least work in flight."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rsrv.gateway.scheduling.costs import CostCache
from rsrv.gateway.scheduling.ewma import DEFAULT_HALFLIFE
from rsrv.gateway.scheduling.load import Load, Loads, unknown_basis, work
from rsrv.gateway.scheduling.modes import Choice, Note
from rsrv.gateway.scheduling.names import WORK_BASES
from rsrv.gateway.workers.poll import Poll


def avoided_last(urls: Iterable[str], avoid: Collection[str]) -> tuple[str, ...]:
    """The same workers in the same order, but those to avoid after all others."""
    ordered = tuple(urls)
    return tuple(sorted(ordered, key=avoid.__contains__)) if avoid else ordered


class RoundRobin:
    """Each request starts with the next replica."""

    name = "round_robin"
    needs_poll = False
    spreads = True

    def record_arrival(self, model: str) -> None:
        """Nothing to do."""

    def request_units(self, model: str, body: bytes) -> int:
        return 1

    def select(self, model: str, units: int, picked: Sequence[str], avoid: Collection[str]) -> Choice | None:
        return Choice(avoided_last(picked, avoid)) if picked else None

    def move(self, reservation: Any, url: str) -> None:
        """Nothing is charged."""

    def release(self, reservation: Any) -> None:
        """Nothing is charged."""

    def tick(self, ready: Sequence[str], poll: Poll, now: float) -> None:
        """Nothing to do."""

    def take_notes(self) -> list[Note]:
        return []

    def forget(self, url: str) -> None:
        """Nothing is kept."""

    def inflight_work(self) -> tuple[str, Mapping[str, float]] | None:
        return None

    def status(self) -> None:
        """It places nothing."""


class _Charged:
    """A request in flight: what was charged for it, and to whom."""

    __slots__ = ("charge", "load")

    def __init__(self, load: Load, charge: float) -> None:
        self.load: Load | None = load
        self.charge = charge


class LeastOutstanding:
    """Each request goes to the replica with the least work in flight, as `basis` measures work.

    Raises ConfigError for an unknown basis. `halflife`, of the costs, is in device seconds.
    """

    name = "least_outstanding"
    spreads = True

    def __init__(self, basis: str = "compute", *, halflife: float = DEFAULT_HALFLIFE) -> None:
        if basis not in WORK_BASES:
            raise unknown_basis(basis)
        self.basis = basis
        self.needs_poll = basis != "requests"
        self._halflife = halflife
        self._costs = CostCache()
        self._loads = Loads()

    def record_arrival(self, model: str) -> None:
        """Nothing to do."""

    def request_units(self, model: str, body: bytes) -> int:
        """Items of the request; 1 where requests are what is counted. Raises InvalidRequest for a malformed body."""
        return self._costs.costs.items(body, model) if self.needs_poll else 1

    def select(self, model: str, units: int, picked: Sequence[str], avoid: Collection[str]) -> Choice | None:
        if not picked:
            return None
        candidates = [url for url in picked if url not in avoid] or picked
        chosen = min(candidates, key=lambda url: (self._loads.key(self.basis, url), url))
        load = self._loads.of(self.basis, chosen)
        charge = work(self.basis, max(units, 1), item_cost=self._costs.costs.item_cost(model), request_cost=1.0)
        load.add(charge)
        rest = avoided_last((url for url in picked if url != chosen), avoid)
        return Choice((chosen, *rest), _Charged(load, charge))

    def move(self, reservation: _Charged | None, url: str) -> None:
        if reservation is None or reservation.load is None:
            return
        reservation.load.subtract(reservation.charge)
        reservation.load = self._loads.of(self.basis, url)
        reservation.load.add(reservation.charge)

    def release(self, reservation: _Charged | None) -> None:
        if reservation is not None and reservation.load is not None:
            reservation.load.subtract(reservation.charge)
            reservation.load = None

    def tick(self, ready: Sequence[str], poll: Poll, now: float) -> None:
        self._loads.retain(ready)
        if self.needs_poll:
            self._costs.update(poll, self._halflife, now)

    def take_notes(self) -> list[Note]:
        return []

    def forget(self, url: str) -> None:
        self._loads.drop(url)
        self._costs.forget(url)

    def inflight_work(self) -> tuple[str, Mapping[str, float]] | None:
        loads = self._loads.snapshot(self.basis)
        return (self.basis, loads) if loads else None

    def status(self) -> None:
        """It places nothing."""
