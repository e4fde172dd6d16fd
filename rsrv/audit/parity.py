"""Do two sets of named tensors hold the same numbers? Pure: the comparison, its tolerances, and what it proves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from rsrv.core.dtypes import dtype_text
from rsrv.core.errors import UsageError

Verdict = Literal["ok", "unproven", "mismatch"]

Tolerances = Mapping[str, float] | float | None
"""One number for all floats, or dtype token or output name → number (the name wins); None: `TOLERANCES`."""

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"f64": 1e-12, "f32": 1e-5, "bf16": 1e-2, "f16": 2e-3, "f8_e5m2": 0.25, "f8_e4m3": 0.125}
)
"""Largest max|Δ| / max|reference| per dtype (X-50); one unit in the last place for the 8-bit floats. Integers and
booleans have to be equal."""


@dataclass(frozen=True)
class ParityRow:
    """One output compared.

    Attributes:
        name, dtype, shape: of the reference.
        count: number of elements compared.
        max_abs: largest |candidate - reference| where both are finite.
        rel: `max_abs` / max|reference|; infinite when only the reference is all zero.
        ulp: largest distance in representable numbers of `dtype`; None for integers and booleans.
        mean_abs: mean of |candidate - reference|.
        worst: index of the element with the largest difference; None when there is none.
        tolerance: what `rel` may be; 0 for integers and booleans.
        non_finite: elements of the reference that are NaN or infinite.
        lowest, highest: range of the finite reference values; None when there are none.
        problem: why the two cannot be compared by number, or disagree beyond numbers; else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int = 0
    max_abs: float = 0.0
    rel: float = 0.0
    ulp: int | None = None
    mean_abs: float = 0.0
    worst: tuple[int, ...] | None = None
    tolerance: float = 0.0
    non_finite: int = 0
    lowest: float | None = None
    highest: float | None = None
    problem: str | None = None

    @property
    def verdict(self) -> Verdict:
        if self.problem is not None or not self.rel <= self.tolerance:
            return "mismatch"
        return "ok" if self.doubt is None else "unproven"

    @property
    def doubt(self) -> str | None:
        """Why agreement with this reference proves little, or None."""
        if self.non_finite:
            return f"the reference holds {self.non_finite} of {self.count} values that are not finite"
        if not self.count:
            return "the reference holds no value"
        if self.lowest == self.highest and (self.count > 1 or self.lowest == 0):
            return f"the reference is {self.lowest:g} everywhere"
        return None

    @property
    def note(self) -> str | None:
        """The verdict in words, None when all is well."""
        if self.problem is not None:
            return self.problem
        if self.verdict == "mismatch":
            at = "" if self.worst is None else f" at {list(self.worst)}"
            if self.tolerance == 0:
                return f"differs by {self.max_abs:g}{at}, and {self.dtype} has to be equal"
            return f"rel {self.rel:.3g} is above {self.tolerance:g} (max abs {self.max_abs:.3g}{at})"
        return self.doubt

    def to_json(self) -> dict[str, Any]:
        return {
            "output": self.name,
            "verdict": self.verdict,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "max_abs": _finite(self.max_abs),
            "rel": _finite(self.rel),
            "ulp": self.ulp,
            "mean_abs": _finite(self.mean_abs),
            "worst": None if self.worst is None else list(self.worst),
            "tolerance": self.tolerance,
            "note": self.note,
        }


@dataclass(frozen=True)
class ParityReport:
    """A row per output. `ok` holds unless something differs; what agrees without proving anything is `unproven`."""

    rows: tuple[ParityRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.verdict != "mismatch" for row in self.rows)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Names of outputs whose reference is constant or not finite."""
        return tuple(row.name for row in self.rows if row.verdict == "unproven")

    @property
    def worst_rel(self) -> float:
        return max((row.rel for row in self.rows), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "unproven": list(self.unproven), "outputs": [row.to_json() for row in self.rows]}

    def to_transport(self) -> list[dict[str, Any]]:
        """All fields of all rows, for the pipe between two processes of ours; see `from_transport`."""
        return [asdict(row) for row in self.rows]

    @classmethod
    def from_transport(cls, rows: Iterable[Mapping[str, Any]]) -> ParityReport:
        return cls(
            tuple(ParityRow(**{**row, "shape": tuple(row["shape"]), "worst": _tuple(row["worst"])}) for row in rows)
        )

    def __str__(self) -> str:
        """The outputs that are not simply right, a line each."""
        return "\n".join(f"output {row.name!r}: {row.note}" for row in self.rows if row.note is not None)


def compare(
    reference: Mapping[str, np.ndarray],
    candidate: Mapping[str, np.ndarray],
    tolerances: Tolerances = None,
) -> ParityReport:
    """Compare `candidate` with `reference`, output by output, by name.

    Args:
        tolerances: of rel = max|Δ| / max|reference|; what they leave out is taken from `TOLERANCES`. Integers and
            booleans are always exact.

    A missing or surplus output, another dtype or shape, and a value that is not finite where the reference is (or the
    reverse) are mismatches whatever the tolerance.
    """
    rows = [
        _compare_one(name, expected, candidate.get(name), tolerance_of(name, expected.dtype, tolerances))
        for name, expected in reference.items()
    ]
    for name in candidate:
        if name not in reference:
            found = np.asarray(candidate[name])
            rows.append(ParityRow(name, str(found.dtype), found.shape, problem="the reference has no such output"))
    return ParityReport(tuple(rows))


def unanswered(reference: Mapping[str, np.ndarray], problem: str) -> ParityReport:
    """The report on a sample that got no answer at all, because of `problem`."""
    rows = [
        ParityRow(name, dtype_text(array.dtype), array.shape, count=array.size, problem=problem)
        for name, array in reference.items()
    ]
    return ParityReport(tuple(rows))


def merge(reports: Iterable[ParityReport]) -> ParityReport:
    """One row per output over many samples: the worst numbers, and doubts only where no sample dispels them."""
    merged: dict[str, ParityRow] = {}
    for report in reports:
        for row in report.rows:
            merged[row.name] = _merged(merged[row.name], row) if row.name in merged else row
    return ParityReport(tuple(merged.values()))


def tolerance_of(name: str, dtype: np.dtype[Any], tolerances: Tolerances = None) -> float:
    """What rel may be for the output `name`; 0 for integers and booleans."""
    token = dtype_text(dtype)
    if token not in TOLERANCES:
        return 0.0
    if isinstance(tolerances, Mapping):
        return tolerances.get(name, tolerances.get(token, TOLERANCES[token]))
    return TOLERANCES[token] if tolerances is None else tolerances


def parse_tolerances(texts: Sequence[str]) -> dict[str, float] | None:
    """``["1e-4"]`` or ``["f32=1e-4", "scores=1e-3"]`` as `compare` takes them; None for []. Raises UsageError."""
    chosen: dict[str, float] = {}
    for text in texts:
        for part in text.split(","):
            name, _, number = part.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            if not 0 <= value < math.inf:
                raise UsageError(
                    f"tolerance {part.strip()!r} is not a number of 0 or more", hint="for example 1e-4 or f32=1e-4"
                )
            if not name:
                chosen.update(dict.fromkeys(TOLERANCES, value))
            else:
                chosen[name.strip()] = value
    return chosen or None


def _compare_one(name: str, reference: np.ndarray, candidate: np.ndarray | None, tolerance: float) -> ParityRow:
    expected = np.asarray(reference)
    row = ParityRow(name, dtype_text(expected.dtype), expected.shape, count=expected.size, tolerance=tolerance)
    if candidate is None:
        return replace(row, problem="there is no such output")
    found = np.asarray(candidate)
    if found.dtype != expected.dtype:
        return replace(row, problem=f"is {dtype_text(found.dtype)}, want {row.dtype}")
    if found.shape != expected.shape:
        return replace(row, problem=f"has shape {list(found.shape)}, want {list(expected.shape)}")
    if not expected.size:
        return row
    return _exact(row, expected, found) if row.dtype not in TOLERANCES else _close(row, expected, found)


def _exact(row: ParityRow, expected: np.ndarray, found: np.ndarray) -> ParityRow:
    low, high = float(expected.min()), float(expected.max())
    row = replace(row, lowest=low, highest=high)
    differs = expected != found
    if not differs.any():
        return row
    apart = np.abs(expected.astype(np.longdouble) - found.astype(np.longdouble))
    largest = float(apart.max())
    scale = max(abs(low), abs(high))
    return replace(
        row,
        max_abs=largest,
        rel=largest / scale if scale else math.inf,
        mean_abs=float(apart.mean()),
        worst=_index(apart),
    )


def _close(row: ParityRow, expected: np.ndarray, found: np.ndarray) -> ParityRow:
    one, other = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(one)
    row = replace(row, non_finite=int(expected.size - np.count_nonzero(finite)))
    agree = np.where(np.isnan(one), np.isnan(other), one == other)
    wrong = np.where(finite, ~np.isfinite(other), ~agree)
    if wrong.any():
        index = _index(wrong)
        row = replace(row, worst=index, problem=f"is {other[index]:g} at {list(index)}, want {one[index]:g}")
    both = finite & np.isfinite(other)
    if not both.any():
        return row
    with np.errstate(over="ignore"):  # two finite numbers at the ends of float64 are infinitely far apart
        apart = np.where(both, np.abs(np.where(both, other, 0.0) - np.where(both, one, 0.0)), 0.0)
    low, high = float(one[finite].min()), float(one[finite].max())
    largest, scale = float(apart.max()), max(abs(low), abs(high))
    return replace(
        row,
        lowest=low,
        highest=high,
        max_abs=largest,
        rel=largest / scale if scale else (math.inf if largest else 0.0),
        ulp=_ulp(expected[both], found[both]),
        mean_abs=float(apart[both].mean()),
        worst=row.worst or (_index(apart) if largest else None),
    )


def _ulp(expected: np.ndarray, found: np.ndarray) -> int:
    """Largest number of steps between neighbouring representable numbers; +0 and -0 are the same place."""
    one, other = _place(expected), _place(found)
    return int(np.where(one > other, one - other, other - one).max())


def _place(values: np.ndarray) -> np.ndarray:
    """Position of each number in the order of its dtype, as uint64: steps away from the most negative bit pattern."""
    bits = 8 * values.dtype.itemsize
    raw = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").astype(np.uint64)
    sign = np.uint64(1 << (bits - 1))
    magnitude = raw & (sign - np.uint64(1))
    return np.where(raw & sign, sign - magnitude, sign + magnitude)


def _index(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(values)), values.shape))


def _merged(one: ParityRow, other: ParityRow) -> ParityRow:
    worse, better = (one, other) if (one.problem is not None or one.rel >= other.rel) else (other, one)
    if better.problem is not None and worse.problem is None:
        worse, better = better, worse
    lows = [row.lowest for row in (one, other) if row.lowest is not None]
    highs = [row.highest for row in (one, other) if row.highest is not None]
    ulps = [row.ulp for row in (one, other) if row.ulp is not None]
    count = one.count + other.count
    return replace(
        worse,
        count=count,
        max_abs=max(one.max_abs, other.max_abs),
        rel=max(one.rel, other.rel),
        ulp=max(ulps, default=None),
        mean_abs=(one.mean_abs * one.count + other.mean_abs * other.count) / count if count else 0.0,
        non_finite=one.non_finite + other.non_finite,
        lowest=min(lows, default=None),
        highest=max(highs, default=None),
    )


def _tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)
