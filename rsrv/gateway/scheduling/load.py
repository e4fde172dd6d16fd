"""How much work is in flight on each worker, in counters that come back to exactly zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rsrv.core.errors import ConfigError
from rsrv.gateway.scheduling.names import WORK_BASES

_PER_UNIT = 10**15
_PER_KEY = 10**6
_LARGEST = 1e18
"""Most that one request is charged. A client may claim any number of items; the sum must stay a number."""


def work(basis: str, units: int, *, item_cost: float, request_cost: float) -> float:
    """What `units` items in one request are charged: device seconds, or items under the basis ``items``.

    `request_cost` is 1.0 where requests are only counted. Raises ConfigError for an unknown basis.
    """
    if basis == "compute":
        return units * item_cost
    if basis == "items":
        return float(units)
    if basis == "requests":
        return request_cost
    raise unknown_basis(basis)


def unknown_basis(basis: str) -> ConfigError:
    return ConfigError(f"work_basis is {basis!r}; wanted one of {', '.join(WORK_BASES)}")


class Load:
    """What is in flight on one worker. A reservation keeps the object that it was charged to and gives back to it, even
    when the worker has left and another has come with its name.

    Integers, since floats that are added and subtracted in different orders leave a residue: that would turn ties into
    an order, and one huge request would swallow the small ones beside it for good.
    """

    __slots__ = ("_total",)

    def __init__(self) -> None:
        self._total = 0

    def add(self, charge: float) -> None:
        self._total += _exact(charge)

    def subtract(self, charge: float) -> None:
        """Give back exactly what was added."""
        self._total -= _exact(charge)

    @property
    def value(self) -> float:
        return self._total / _PER_UNIT

    @property
    def key(self) -> int:
        """The value as it is compared: whole billionths, so that loads that mean the same are the same."""
        return round(self._total / _PER_KEY)


class Loads:
    """The load of every worker, one set for each unit of work, so that a basis changed at runtime mixes none."""

    def __init__(self) -> None:
        self._sets: dict[str, dict[str, Load]] = {}

    def of(self, unit: str, url: str) -> Load:
        """The worker's counter, made when it is first asked for."""
        return self._sets.setdefault(unit, {}).setdefault(url, Load())

    def key(self, unit: str, url: str) -> int:
        load = self._sets.get(unit, _EMPTY).get(url)
        return load.key if load is not None else 0

    def drop(self, url: str) -> None:
        """The worker has left."""
        for loads in self._sets.values():
            loads.pop(url, None)

    def retain(self, urls: Collection[str]) -> None:
        """Drop the counters of all other workers that have nothing in flight: a request that was on its way when its
        worker left may have made one anew."""
        for loads in self._sets.values():
            for url in [url for url, load in loads.items() if url not in urls and load.value == 0]:
                del loads[url]

    def snapshot(self, unit: str) -> dict[str, float]:
        """Worker → load, of the workers that ever got work in this unit."""
        return {url: load.value for url, load in self._sets.get(unit, _EMPTY).items()}


_EMPTY: Mapping[str, Load] = {}


def _exact(charge: float) -> int:
    return round(min(charge, _LARGEST) * _PER_UNIT)
