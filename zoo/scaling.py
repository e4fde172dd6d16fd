"""What three batch sizes cost against one: less than three exports, since torch.export and decomposition are shared."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zoo.child import Order
from zoo.phases import TOTAL
from zoo.results import Result

MODEL = "tv-resnet50"
SHORT = "1"
THREE = "1, 8, 32"
BOUND = 2.8
RUNS = 3


def scaling_jobs(runs: int = RUNS) -> list[Order]:
    """Exports of `MODEL` for one batch size and for three, in turns."""
    return [
        Order(_name(sizes, run), MODEL, tuple(int(size) for size in sizes.split(",")), export_only=True)
        for run in range(1, runs + 1)
        for sizes in (SHORT, THREE)
    ]


@dataclass(frozen=True)
class Scaling:
    """The runs for each set of batch sizes."""

    results: Mapping[str, Sequence[Result]]

    @property
    def runs(self) -> int:
        return min(len(results) for results in self.results.values())

    @property
    def ratio(self) -> float:
        """Processor time."""
        return self._median(THREE, TOTAL) / self._median(SHORT, TOTAL)

    @property
    def wall_ratio(self) -> float:
        return self._median(THREE, TOTAL, wall=True) / self._median(SHORT, TOTAL, wall=True)

    def cell(self, sizes: str, step: str) -> str:
        return f"{self._median(sizes, step):.1f} ({self._median(sizes, step, wall=True):.1f})"

    def _median(self, sizes: str, step: str, *, wall: bool = False) -> float:
        seconds = [result.wall if wall else result.cpu for result in self.results[sizes]]
        return statistics.median(one.get(step, 0.0) for one in seconds)


def scaling_of(results: Mapping[str, Result]) -> Scaling | None:
    """The runs among `results`; None unless there are some of both kinds."""
    found = {
        sizes: [result for name, result in results.items() if name.startswith(_name(sizes, "")) and result.served]
        for sizes in (SHORT, THREE)
    }
    return Scaling(found) if all(found.values()) else None


def _name(sizes: str, run: int | str) -> str:
    return f"{MODEL} at {sizes} #{run}"
