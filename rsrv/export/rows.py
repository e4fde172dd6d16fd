"""Proves, as far as numbers can, that a row's answer does not depend on the rows beside it nor on its place.

A server merges requests and pads batches. A model that mixes its rows (batch statistics, ``x - x.mean(0)``) or treats
them by their place (one dropout mask for the batch) would give wrong answers there, and nothing in a program's types
tells. So the function is run on random rows: with other neighbours, and with the same row in every place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rsrv.core.errors import ExportError

if TYPE_CHECKING:
    from rsrv.export.inputs import Example

NEIGHBOUR_TOLERANCE = 1e-4
"""Of the largest magnitude: one program computes a row alike, to the last bit, whatever stands in the others."""
PLACE_TOLERANCES = {np.dtype(np.float64): 1e-4, np.dtype(np.float32): 1e-2}
"""Kernels may sum in another order at another place; dtypes that are not listed have the half precisions' bound."""
HALF_PLACE_TOLERANCE = 0.2

Run = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


def require_independent_rows(
    run: Run, inputs: Sequence[Example], outputs: Sequence[tuple[str, int]], batch: int, *, seed: int = 0
) -> None:
    """Raise ExportError when a row of an output depends on the other rows, or on its place.

    Args:
        run: the program of `batch` rows, 2 or more: inputs to outputs.
        inputs: its batched inputs, in order.
        outputs: name and batch axis of each output, in order.
    """
    draw = np.random.default_rng(seed)
    axes = [_axis(example) for example in inputs]

    def answers(arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs, rows first."""
        found = zip(run(arguments), outputs, strict=True)
        return [np.moveaxis(np.asarray(output), axis, 0) for output, (_, axis) in found]

    rows = [_random(draw, example, batch) for example in inputs]
    with np.errstate(all="ignore"):
        reference = answers(rows)
        for place in (0, batch - 1):
            others = [_random(draw, example, batch) for example in inputs]
            for mine, another, axis in zip(rows, others, axes, strict=True):
                np.moveaxis(another, axis, 0)[place] = np.moveaxis(mine, axis, 0)[place]
            for (name, _), a, b in zip(outputs, reference, answers(others), strict=True):
                if _differs(a[place], b[place], NEIGHBOUR_TOLERANCE):
                    raise _refusal(name, "depends on the other rows of its batch", "batch statistics, x.mean(0)")
        alike = [np.repeat(np.take(x, [0], axis), batch, axis) for x, axis in zip(rows, axes, strict=True)]
        for (name, _), a in zip(outputs, answers(alike), strict=True):
            tolerance = PLACE_TOLERANCES.get(a.dtype, HALF_PLACE_TOLERANCE)
            # Integers are left out: rounding at another place may tip an argmax.
            if a.dtype.kind not in "iub" and any(_differs(a[0], row, tolerance) for row in a[1:]):
                raise _refusal(name, "depends on its place in the batch", "dropout that is still on")


def _refusal(output: str, problem: str, such_as: str) -> ExportError:
    return ExportError(
        f"a row of the output {output!r} {problem} ({such_as}, …): a server that merges requests would answer wrongly",
        hint="export the model in inference mode; or without a batch axis (batch_sizes=None, --no-batch), which never "
        "merges; or with row_check=False (--no-row-check) if you know better",
    )


def _axis(example: Example) -> int:
    assert example.batch_axis is not None, f"input {example.name!r} has no batch axis"
    return example.batch_axis


def _random(draw: np.random.Generator, example: Example, batch: int) -> np.ndarray:
    """Values that every model can take: small integers, so that they are indices of any table."""
    shape, dtype = example.shape_at(batch), example.dtype.numpy
    if dtype.kind in "iub":
        return draw.integers(0, 2, shape).astype(dtype)
    return draw.standard_normal(shape).astype(dtype)


def _differs(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    if a.dtype.kind in "iub":
        return not np.array_equal(a, b)
    a, b = a.astype(np.float64), b.astype(np.float64)
    unlike = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not unlike.any():
        return False
    scale = np.abs(np.where(np.isfinite(a), a, 0)).max()
    return not bool(np.abs(a - b)[unlike].max() <= tolerance * scale)
