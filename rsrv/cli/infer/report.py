"""What ``rsrv infer`` says about a run: how long requests took, what went through, what the outputs look like."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rsrv.core.dtypes import DType

COLUMNS = ("output", "dtype", "shape", "min", "mean", "max", "first values")
_FIRST_VALUES = 4
_BLOCK = 1 << 20
_OPEN = "…"
"""Stands for extents that differ between answers."""


@dataclass(slots=True)
class Timing:
    """How long requests took, in seconds, and what they carried. Thread safe."""

    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    largest: int = 0
    n_bytes: int = 0
    elapsed: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float, rows: int, n_bytes: int) -> None:
        """A request of so many rows, with `n_bytes` of inputs and outputs, took `seconds`."""
        with self._lock:
            self.seconds.append(seconds)
            self.rows += rows
            self.largest = max(self.largest, rows)
            self.n_bytes += n_bytes

    def facts(self) -> dict[str, float | int]:
        """For people and programs: milliseconds of a request, and rates over the time of the whole run."""
        ordered = sorted(self.seconds)
        milliseconds = {
            "min": ordered[0],
            "median": statistics.median(ordered),
            "mean": statistics.fmean(ordered),
            "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
            "max": ordered[-1],
        }
        elapsed = max(self.elapsed, 1e-9)
        return {
            "requests": len(ordered),
            "rows": self.rows,
            **{f"{name}_ms": round(value * 1e3, 4) for name, value in milliseconds.items()},
            "seconds": round(self.elapsed, 6),
            "rows_per_second": round(self.rows / elapsed, 3),
            "bytes_per_second": round(self.n_bytes / elapsed),
        }


@dataclass(slots=True)
class _Seen:
    """One output so far."""

    dtype: np.dtype[Any]
    item: tuple[object, ...]
    least: float = math.inf
    most: float = -math.inf
    total: float = 0.0
    size: int = 0
    extents: dict[int, int | None] = field(default_factory=dict)
    first: tuple[int, str] = (-1, "")


class Tally:
    """Outputs in brief, from answers that come in any order, without keeping them. Thread safe."""

    def __init__(self, *, numbers: bool = True) -> None:
        """Without `numbers` only dtypes and shapes are looked at."""
        self._numbers = numbers
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}

    def add(self, rows: range, outputs: Mapping[str, np.ndarray]) -> None:
        for name, array in outputs.items():
            least, most, total = _extremes(array) if self._numbers else (0.0, 0.0, 0.0)
            with self._lock:
                seen = self._seen.setdefault(name, _Seen(array.dtype, array.shape[1:]))
                if seen.item != array.shape[1:]:
                    seen.item = (_OPEN,)
                seen.least = float(np.minimum(seen.least, least))  # which keep NaN
                seen.most = float(np.maximum(seen.most, most))
                seen.total += total
                seen.size += array.size
                seen.extents[rows.start] = array.shape[0] if array.ndim else None
                if seen.first[0] < 0 or rows.start < seen.first[0]:
                    seen.first = rows.start, _first_values(array)

    def table(self) -> list[tuple[object, ...]]:
        """A line for each output, in the order of `COLUMNS`."""
        return [self._line(name, seen) for name, seen in self._seen.items()]

    def describe(self) -> dict[str, dict[str, Any]]:
        """KServe datatype and shape of each output."""
        return {
            name: {
                "datatype": DType.from_numpy(seen.dtype).wire,
                "shape": [-1 if extent == _OPEN else extent for extent in _shape(seen)],
            }
            for name, seen in self._seen.items()
        }

    @staticmethod
    def _line(name: str, seen: _Seen) -> tuple[object, ...]:
        elements = seen.first[1]
        if seen.size > _FIRST_VALUES:
            elements += ", …"
        facts = (seen.least, seen.total / seen.size, seen.most) if seen.size else (None,) * 3
        return (name, str(seen.dtype), "×".join(map(str, _shape(seen))) or "scalar", *facts, elements)


def _shape(seen: _Seen) -> tuple[object, ...]:
    """Of all answers joined along axis 0, scalars stacked."""
    extents = [extent for extent in seen.extents.values() if extent is not None]
    if extents:
        return (sum(extents), *seen.item)
    return () if len(seen.extents) == 1 else (len(seen.extents),)


def _extremes(array: np.ndarray) -> tuple[float, float, float]:
    """Least, most and sum in doubles, a block at a time; NaN where there is one."""
    flat = array.reshape(-1)
    least, most, total = math.inf, -math.inf, 0.0
    for at in range(0, len(flat), _BLOCK):
        block = flat[at : at + _BLOCK].astype(np.float64)
        least = float(np.minimum(least, block.min()))
        most = float(np.maximum(most, block.max()))
        total += float(block.sum())
    return least, most, total


def _first_values(array: np.ndarray) -> str:
    return ", ".join(f"{value:.5g}" for value in array.reshape(-1)[:_FIRST_VALUES].astype(np.float64).tolist())
