"""What the outputs of a shadow came to, compared with those that clients got; counted, never kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rsrv.audit.parity import TOLERANCES, ParityReport, Tolerances, compare
from rsrv.core.errors import InvalidRequest

if TYPE_CHECKING:
    from rsrv.core.tensors import TensorSpec

_MAX_TEXT = 2000


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """What a program set did with copies of real batches.

    Attributes:
        percent: how many of a hundred batches it gets; 0 = none any more.
        against: the set that answered those batches.
        batches: how many were compared.
        skipped: how many were left out, because it did not keep up or the weights had left the device.
        mismatches: batches with an output that is not within its tolerance.
        errors: batches that it could not run.
        largest: the largest max|Δ| / max|reference| of each output, of batches that were compared.
        first_mismatch, first_error: what the first of them was, "" when there was none.
    """

    percent: float
    against: int
    batches: int = 0
    skipped: int = 0
    mismatches: int = 0
    errors: int = 0
    largest: Mapping[str, float] = field(default_factory=dict)
    first_mismatch: str = ""
    first_error: str = ""

    @property
    def clean(self) -> bool:
        """Something was compared, and all of it was well."""
        return self.batches > 0 and not self.mismatches and not self.errors


class Tally:
    """Counts for one `ShadowRecord`. Thread safe."""

    def __init__(self, against: int) -> None:
        self._lock = threading.Lock()
        self._against = against
        self._batches = self._skipped = self._mismatches = self._errors = 0
        self._largest: dict[str, float] = {}
        self._first_mismatch = self._first_error = ""

    def record(self, percent: float) -> ShadowRecord:
        with self._lock:
            return ShadowRecord(
                percent,
                self._against,
                self._batches,
                self._skipped,
                self._mismatches,
                self._errors,
                dict(self._largest),
                self._first_mismatch,
                self._first_error,
            )

    def compared(self, where: str, report: ParityReport) -> None:
        """`where`: which program it was, for people."""
        with self._lock:
            self._batches += 1
            for row in report.rows:
                self._largest[row.name] = max(self._largest.get(row.name, 0.0), row.rel)
            if not report.ok:
                self._mismatches += 1
                wrong = ParityReport(tuple(row for row in report.rows if row.verdict == "mismatch"))
                self._first_mismatch = self._first_mismatch or f"{where}: {wrong}"[:_MAX_TEXT]

    def skipped(self) -> None:
        with self._lock:
            self._skipped += 1

    def failed(self, where: str, error: BaseException) -> None:
        with self._lock:
            self._errors += 1
            self._first_error = self._first_error or f"{where}: {str(error) or type(error).__name__}"[:_MAX_TEXT]


def compare_rows(
    specs: Sequence[TensorSpec],
    reference: Mapping[str, np.ndarray],
    candidate: Mapping[str, np.ndarray],
    rows: int,
    tolerances: Tolerances = None,
) -> ParityReport:
    """Compare the first `rows` rows of each output: what follows is padding, for which nobody promised anything.

    Integers and booleans have to be equal, and NaN is equal to NaN; see `rsrv.audit.parity.compare`.
    """
    return compare(_live(specs, reference, rows), _live(specs, candidate, rows), tolerances)


def require_tolerances(tolerances: Mapping[str, float] | None, outputs: Sequence[TensorSpec]) -> Tolerances:
    """`tolerances` by dtype (``f32``) or output, as `compare_rows` takes them. Raises InvalidRequest."""
    known = {*TOLERANCES, *(spec.name for spec in outputs)}
    for name, value in (tolerances or {}).items():
        if name not in known:
            raise InvalidRequest(f"tolerances: {name!r} is neither a float dtype nor an output; known: {sorted(known)}")
        if not 0 <= value < math.inf:
            raise InvalidRequest(f"tolerances: {name!r} is {value!r}; wanted is a finite number of 0 or more")
    return tolerances or None


def _live(specs: Sequence[TensorSpec], outputs: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    axes = {spec.name: spec.batch_axis for spec in specs}
    live = {}
    for name, array in outputs.items():
        axis = axes.get(name)
        live[name] = array if axis is None else array[(*(slice(None),) * axis, slice(rows))]
    return live
