"""What the programs of one model take on the device, as measured; and which batch size is the cheapest way to go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

from rsrv.serve.scheduler.plan import Variant, filled_key, fitting_key

UNMEASURED_SECONDS = 0.01
"""Cost that the fair discipline assumes for a program that never ran."""

_DRIFT = 0.1
"""Choices among batch sizes are made anew when a program's time moved by this much since they were made."""
_WORTH = 0.9
"""Another size than the largest filled one has to be this much cheaper: the times of tiny programs differ by more than
a few percent from run to run, and padded rows cost staging and memory outside the device."""
_WORTH_EXACT = 0.5
"""The same for a size that the rows fill exactly."""
_SURE_RUNS = 8
"""And that one is left only after so many runs: under load, the one run of a warm-up is many times too slow."""
_WORTH_NS = 100_000
"""And by this much: below, differences are noise."""
_FORGET_RUNS = 256
"""After so many runs of other sizes a size may be tried again: only a run can put a wrong estimate right."""
_TRUST_NS = 10**9
"""An estimate that is older drops no request, for the same reason."""


class Estimate:
    """What one program takes, in nanoseconds.

    Attributes:
        mean_ns: exponential moving average: ``α·t + (1 - α)·mean``; the first measurement is taken as it is, and the
            first of a request in the place of a warm-up's.
        fastest_ns: follows the fastest runs, since only waiting makes one slower. Predictions and comparisons use it:
            it is what one long wait does not change.
        at_ns, at_run: when it was measured last, and at which run of the model.
        runs: how many requests' runs were measured; a warm-up is none.
        compared_ns: what batch sizes were compared with last; 0 = this one is not compared, but tried again.
    """

    __slots__ = ("at_ns", "at_run", "compared_ns", "fastest_ns", "mean_ns", "runs")

    def __init__(self, ns: int, now_ns: int, run: int) -> None:
        self.mean_ns = float(ns)
        self.fastest_ns = self.compared_ns = ns
        self.at_ns = now_ns
        self.at_run = run
        self.runs = 0


class Costs:
    """The estimates of one model's programs, by variant and batch key; `alpha` is the weight of a new measurement."""

    __slots__ = ("_alpha", "_runs", "_tables", "estimates")

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._runs = 0
        self._tables: dict[tuple[Variant, int | None], _Table] = {}
        self.estimates: dict[tuple[Variant, int], Estimate] = {}

    def inherit(self, others: Costs, programs: Iterable[tuple[Variant, int]]) -> None:
        """Start with what `others` know of `programs`, which are the same ones here."""
        self._runs = others._runs
        for program in programs:
            estimate = others.estimates.get(program)
            if estimate is not None:
                self.estimates[program] = copy(estimate)
        self._tables.clear()

    def seed(self, variant: Variant, batch_key: int, ns: int, now_ns: int) -> None:
        """Set the cost of a program, as a warm-up measured it."""
        self.estimates[variant, batch_key] = Estimate(max(ns, 1), now_ns, self._runs)
        self._tables.clear()

    def measured(self, variant: Variant, batch_key: int, ns: int, now_ns: int) -> bool:
        """Note one run; whether plans that were made before may have to be made anew."""
        run = self._runs = self._runs + 1
        forgotten = run % _FORGET_RUNS == 0 and self._forget()
        estimate = self.estimates.get((variant, batch_key))
        if estimate is None:
            self.seed(variant, batch_key, ns, now_ns)
            self.estimates[variant, batch_key].runs = 1
            return True
        estimate.runs += 1
        if estimate.runs == 1:
            # A warm-up may have shared the processor with other work.
            estimate.mean_ns = ns
        else:
            estimate.mean_ns = self._alpha * ns + (1 - self._alpha) * estimate.mean_ns
        fastest = estimate.fastest_ns
        slower = fastest + fastest // 8 + 1000
        fastest = estimate.fastest_ns = ns if ns < slower else slower
        estimate.at_ns = now_ns
        estimate.at_run = run
        compared = estimate.compared_ns
        if not forgotten and estimate.runs != _SURE_RUNS and abs(fastest - compared) <= _DRIFT * compared:
            return False
        estimate.compared_ns = fastest
        self._tables.clear()
        return True

    def _forget(self) -> bool:
        found = [e for e in self.estimates.values() if e.compared_ns and self._runs - e.at_run >= _FORGET_RUNS]
        for estimate in found:
            estimate.compared_ns = 0
        return bool(found)

    def seconds(self, variant: Variant, batch_key: int) -> float | None:
        """The mean of a program; None when it was never measured."""
        estimate = self.estimates.get((variant, batch_key))
        return None if estimate is None else estimate.mean_ns / 1e9

    def fastest_ns(self, variant: Variant, batch_key: int) -> int | None:
        estimate = self.estimates.get((variant, batch_key))
        return None if estimate is None else estimate.fastest_ns

    def warmed(self, variant: Variant, batch_key: int) -> bool:
        """Whether a program was measured, and not only in its first run, which may be the slowest by far."""
        estimate = self.estimates.get((variant, batch_key))
        return estimate is not None and estimate.runs != 1

    def remaining_ns(self, variant: Variant, batch_key: int, spent_ns: int) -> int:
        """How much longer a run is expected to take; 0 when that is unknown."""
        estimate = self.estimates.get((variant, batch_key))
        return 0 if estimate is None else max(0, int(estimate.mean_ns) - spent_ns)

    def margin_ns(self, variant: Variant, batch_key: int, now_ns: int) -> int:
        """How long before its deadline a request has to be launched; 0 when that is not known, or no longer known."""
        estimate = self.estimates.get((variant, batch_key))
        if estimate is None or now_ns - estimate.at_ns > _TRUST_NS:
            return 0
        return int(estimate.mean_ns)

    def at_least_ns(self, variant: Variant, keys: Sequence[int], ahead: int, rows: int) -> int:
        """A lower bound for the time until `rows` behind `ahead` queued rows are done; 0 when that is unknown.

        Nothing is said before the largest size was measured: it may be the one that makes short work of a queue.
        """
        largest, own = self.fastest_ns(variant, keys[-1]), self.fastest_ns(variant, fitting_key(keys, rows))
        if largest is None or own is None:
            return 0
        per_row = min([ns / max(key, 1) for key in keys if (ns := self.fastest_ns(variant, key)) is not None])
        return max(int((ahead + rows) * per_row), min(own, largest))

    def first(self, variant: Variant, keys: Sequence[int], rows: int, cap: int | None) -> int:
        """The batch key to start with, of the ascending `keys`, so that `rows` rows cost the least in the end.

        Rows that fill a size exactly take it unless another has proved far cheaper, so that the rounding of their
        answers does not depend on how busy the machine is. While the size that the plain rule takes is not measured it
        is taken, so that it will be.
        """
        plain = filled_key(keys, rows)
        if len(keys) == 1:
            return plain
        known = self.estimates.get((variant, plain))
        if known is None or not known.compared_ns or (plain == rows and known.runs < _SURE_RUNS):
            return plain
        table = self._tables.get((variant, cap))
        if table is None:
            table = self._tables[variant, cap] = _Table(
                [
                    _Option(key, key if cap is None else min(key, cap), estimate.compared_ns)
                    for (of, key), estimate in sorted(self.estimates.items())
                    if of == variant and key > 0 and estimate.compared_ns
                ]
            )
        return table.first(keys, rows, plain)

    def cheaper(self, variant: Variant, keys: Sequence[int], rows: int, batch_key: int) -> int:
        """The smallest of `keys` that holds `rows`, if it is known to cost less than `batch_key`; else that."""
        fitting = fitting_key(keys, rows)
        if fitting < batch_key:
            small, large = self.fastest_ns(variant, fitting), self.fastest_ns(variant, batch_key)
            if small is not None and large is not None and small < large:
                return fitting
        return batch_key


class _Option(NamedTuple):
    key: int
    capacity: int
    ns: int


class _Table:
    """The cheapest way to run any number of rows, one measured size after the other (an unbounded knapsack)."""

    def __init__(self, options: Sequence[_Option]) -> None:
        self._options = options
        self._by_key = {option.key: option for option in options}
        self._total = [0]
        self._known: dict[tuple[int, int], int] = {}

    def first(self, keys: Sequence[int], rows: int, plain: int) -> int:
        known = self._known.get((rows, keys[0]))
        if known is None:
            known = self._known[rows, keys[0]] = self._first(keys, rows, plain)
        return known

    def _first(self, keys: Sequence[int], rows: int, plain: int) -> int:
        total = self._with(self._by_key[plain], rows)
        worth = _WORTH_EXACT if plain == rows else _WORTH
        best, least = plain, min(total * worth, total - _WORTH_NS)
        for key in keys:
            option = self._by_key.get(key)
            if option is not None and key != plain:
                total = self._with(option, rows)
                if total < least:
                    best, least = key, total
        return best

    def _with(self, option: _Option, rows: int) -> int:
        return option.ns + self._least(max(0, rows - option.capacity))

    def _least(self, rows: int) -> int:
        total = self._total
        while len(total) <= rows:
            n = len(total)
            total.append(min([option.ns + total[max(0, n - option.capacity)] for option in self._options]))
        return total[rows]
