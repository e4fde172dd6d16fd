"""Which goldens a program can answer, and how their rows share its batches. Pure: plain values and numpy.

Rows are packed as the server packs them: the goldens one after the other, the last batch filled up with zeros, every
output sliced along its own batch axis. So a golden that agrees also proves that its neighbours do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rsrv.bundle.golden import Golden
from rsrv.bundle.manifest import Manifest
from rsrv.bundle.variants import VariantKey
from rsrv.core.dtypes import DType
from rsrv.core.tensors import TensorSpec

Run = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Inputs in the program's order → outputs in its order."""


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` rows of golden `golden` from row `start` on, which lie in the batch from row `at` on."""

    golden: int
    start: int
    rows: int
    at: int


def golden_problem(manifest: Manifest, golden: Golden) -> str | None:
    """Why no program of the bundle can be given this golden; None when one can."""
    problems = [_misfit(manifest, key, golden) for key in manifest.variants]
    return None if None in problems else problems[0]


def fitting(manifest: Manifest, variant: VariantKey, goldens: Sequence[Golden]) -> list[int]:
    """Indices of the goldens whose inputs have the names, dtypes and sizes of `variant`."""
    return [index for index, golden in enumerate(goldens) if _misfit(manifest, variant, golden) is None]


def pack(rows: Mapping[int, int], size: int) -> list[list[Span]]:
    """Batches of at most `size` rows, filled with the goldens in the order of `rows` (golden → its row count)."""
    batches: list[list[Span]] = []
    free = 0
    for golden, count in rows.items():
        start = 0
        while start < count:
            if not free:
                batches.append([])
                free = size
            taken = min(free, count - start)
            batches[-1].append(Span(golden, start, taken, size - free))
            start, free = start + taken, free - taken
    return batches


def answer(manifest: Manifest, batch: int, goldens: Mapping[int, Golden], run: Run) -> dict[int, dict[str, np.ndarray]]:
    """What a program for `batch` rows (0: without a batch size) answers to each of `goldens`, by output name.

    Goldens that it cannot be given, since rows may not be packed and their count is another, are left out.
    """
    names = [spec.name for spec in manifest.executable_outputs]
    if not batch or not manifest.coalescable_specs:
        return {
            index: dict(zip(names, run(_ordered(manifest, golden.inputs)), strict=True))
            for index, golden in goldens.items()
            if not batch or row_count(manifest, golden) == batch
        }
    rows = {index: row_count(manifest, golden) or 0 for index, golden in goldens.items()}
    parts: dict[int, list[dict[str, np.ndarray]]] = {index: [] for index in rows}
    for spans in pack(rows, batch):
        outputs = run([_filled(spec, batch, spans, goldens) for spec in manifest.executable_inputs])
        for span in spans:
            cut = slice(span.at, span.at + span.rows)
            parts[span.golden].append(
                {
                    spec.name: _rows(array, spec, cut)
                    for spec, array in zip(manifest.executable_outputs, outputs, strict=True)
                }
            )
    return {
        index: {
            spec.name: np.concatenate([piece[spec.name] for piece in pieces], axis=spec.batch_axis)
            for spec in manifest.executable_outputs
        }
        for index, pieces in parts.items()
        if pieces
    }


def row_count(manifest: Manifest, golden: Golden) -> int | None:
    """Rows of a golden that fits; None when no input is batched."""
    for spec in manifest.executable_inputs:
        if spec.batch_axis is not None:
            return int(golden.inputs[spec.name].shape[spec.batch_axis])
    return None


def _misfit(manifest: Manifest, variant: VariantKey, golden: Golden) -> str | None:
    names = [spec.name for spec in manifest.executable_inputs]
    if sorted(golden.inputs) != sorted(names):
        return f"has the inputs {', '.join(sorted(golden.inputs))}, want {', '.join(sorted(names))}"
    sizes = iter(variant)
    counts: dict[int, str] = {}
    for spec in manifest.executable_inputs:
        array = golden.inputs[spec.name]
        wanted = spec.concrete_shape(-1, [next(sizes, -1) for _ in spec.variable_axes])
        fits = len(wanted) == array.ndim and all(w in (-1, size) for w, size in zip(wanted, array.shape, strict=True))
        if array.dtype != spec.dtype.numpy or not fits:
            shape = ",".join(map(str, array.shape))
            return f"input {spec.name!r} is {DType.from_numpy(array.dtype).value}[{shape}], want {spec.describe()}"
        if spec.batch_axis is not None:
            counts.setdefault(int(array.shape[spec.batch_axis]), spec.name)
    if len(counts) > 1 or 0 in counts:
        seen = ", ".join(f"{count} rows of {name!r}" for count, name in counts.items())
        return f"has {seen}; want the same number of rows, 1 or more, of every input"
    return None


def _ordered(manifest: Manifest, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [inputs[spec.name] for spec in manifest.executable_inputs]


def _filled(spec: TensorSpec, batch: int, spans: Sequence[Span], goldens: Mapping[int, Golden]) -> np.ndarray:
    axis = spec.batch_axis
    assert axis is not None  # coalescable: every input is batched
    shape = list(goldens[spans[0].golden].inputs[spec.name].shape)
    shape[axis] = batch
    array = np.zeros(shape, spec.dtype.numpy)
    for span in spans:
        rows = _rows(goldens[span.golden].inputs[spec.name], spec, slice(span.start, span.start + span.rows))
        _rows(array, spec, slice(span.at, span.at + span.rows))[...] = rows
    return array


def _rows(array: np.ndarray, spec: TensorSpec, rows: slice) -> np.ndarray:
    return array[(slice(None),) * (spec.batch_axis or 0) + (rows,)]
