"""Seeded example values for the inputs of a model, and the goldens made of them: what every front end proves itself by.

The values depend on seed, sample, name, dtype and shape alone: not on the process, the machine or the version of numpy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from rsrv.audit.golden import golden_file
from rsrv.bundle.files import GOLDEN
from rsrv.bundle.golden import Golden
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError, UsageError
from rsrv.export.inputs import Example

SEED = 1234
"""Of X-54, so that everybody who samples without a wish of their own gets the same numbers."""

INTEGERS = (0, 64)
"""Integers are drawn from here unless the caller knows better: below the size of nearly every embedding."""

_FLOATS = ("f16", "f32", "f64", "bf16", "f8_e5m2", "f8_e4m3")

Range = tuple[float, float]

Reference = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""The framework itself: inputs by name → outputs by name."""


def make_samples(
    inputs: Sequence[Example],
    count: int,
    seed: int = SEED,
    ranges: Mapping[str, tuple[int, int]] | Mapping[str, Range] | None = None,
) -> list[dict[str, np.ndarray]]:
    """`count` sets of values for `inputs`, each with the shapes of the examples: C order, row-major.

    Args:
        ranges: input name → (low, high): integers from low to high, both included, floats from low to below high.
            Default: integers from 0 to 64, floats from -1 to below 1. Booleans are fair coins.

    Raises ExportError for a range of an input that is not there, of a boolean, or beyond its dtype.
    """
    known = {example.name: example for example in inputs}
    for name, bounds in (ranges or {}).items():
        if name not in known:
            raise ExportError(f"input_ranges names {name!r}; the inputs are {', '.join(known)}")
        _require_range(known[name], bounds)
    chosen: Mapping[str, Range] = dict(ranges or {})
    return [
        {example.name: _values(example, seed, index, chosen.get(example.name)) for example in inputs}
        for index in range(count)
    ]


def make_goldens(
    inputs: Sequence[Example],
    reference: Reference,
    count: int,
    *,
    batches: Sequence[int | None],
    seed: int = SEED,
    ranges: Mapping[str, Range] | None = None,
    served: Collection[str] | None = None,
) -> list[Golden]:
    """`count` goldens for every entry of `batches`: `reference` answers a set of inputs of that many rows.

    Args:
        batches: see `golden_batches`; None leaves the shapes of the examples as they are.
        served: names of the inputs that the bundle keeps; `reference` gets all of them. Default: all.
    """
    goldens = []
    for batch in batches:
        sized = [replace(example, shape=example.shape_at(batch)) for example in inputs]
        for sample in make_samples(sized, count, seed + (batch or 0), ranges):
            outputs = dict(reference(sample))
            kept = {name: array for name, array in sample.items() if served is None or name in served}
            goldens.append(Golden(kept, outputs))
    return goldens


@contextmanager
def golden_files(goldens: Sequence[Golden]) -> Iterator[dict[str, Path]]:
    """`goldens` as ``extra_files`` of `write_bundle`, for the time of the block; none make no file."""
    if not goldens:
        yield {}
        return
    with golden_file(goldens) as path:
        yield {GOLDEN: path}


def golden_batches(batch_sizes: Sequence[int] | None, *, coalesces: bool) -> tuple[int | None, ...]:
    """The row counts that goldens are made for.

    Where rows are answered independently of each other (`coalesces`: every input and output is batched), one row is
    enough, whatever the program: an audit packs rows as the server does, which also proves that they are independent.
    Else every batch size needs its own.
    """
    if batch_sizes is None:
        return (None,)
    return (1,) if coalesces else tuple(batch_sizes)


def parse_range(text: str) -> tuple[str, Range]:
    """``ids=0:1000`` → ("ids", (0, 1000)). Raises UsageError."""
    name, equals, bounds = text.partition("=")
    low, colon, high = bounds.partition(":")
    try:
        values = (_number(low), _number(high))
    except ValueError:
        values = (math.nan, math.nan)
    if not name.strip() or not equals or not colon or not values[0] <= values[1]:
        raise UsageError(f"input range {text!r} is not NAME=LOW:HIGH", hint="for example input_ids=0:30521")
    return name.strip(), values


def _values(example: Example, seed: int, index: int, bounds: Range | None) -> np.ndarray:
    raw = _raw(f"{seed}/{index}/{example.name}", math.prod(example.shape))
    token = example.dtype.value
    values: np.ndarray
    if example.dtype is DType.BOOL:
        values = raw >> np.uint64(63)
    elif token in _FLOATS:
        low, high = bounds or (-1.0, 1.0)
        # 24 bits are as many as float32 holds, so that a wider dtype sees the same numbers.
        values = low + (raw >> np.uint64(40)).astype(np.float64) * 2.0**-24 * (high - low)
    else:
        low_int, high_int = _integer_bounds(example.dtype, bounds)
        span = np.uint64(high_int - low_int + 1) if high_int - low_int + 1 < 2**64 else None
        offset = raw if span is None else raw % span
        # Sums wrap around in 64 bits, which is right for both signs.
        values = offset + np.array(low_int % 2**64, np.uint64)
        if token.startswith("i"):
            values = values.view(np.int64)
    return np.ascontiguousarray(values.astype(example.dtype.numpy)).reshape(example.shape)


def _raw(key: str, count: int) -> np.ndarray:
    """`count` random uint64: Philox as its authors defined it, so the stream is the same everywhere."""
    digest = hashlib.sha256(key.encode()).digest()
    words = np.frombuffer(digest[:16], "<u8")
    generator: Any = np.random.Philox(key=words)
    raw: np.ndarray = generator.random_raw(count)
    return raw


def _integer_bounds(dtype: DType, bounds: Range | None) -> tuple[int, int]:
    if bounds is None:
        return INTEGERS[0], min(INTEGERS[1], _limits(dtype)[1])
    return int(bounds[0]), int(bounds[1])


def _limits(dtype: DType) -> tuple[int, int]:
    limits: Any = np.iinfo(cast(Any, dtype.numpy))
    return int(limits.min), int(limits.max)


def _require_range(example: Example, bounds: Range) -> None:
    low, high = bounds
    if example.dtype is DType.BOOL:
        raise ExportError(f"input {example.name!r} is bool, which has no range")
    if low > high:
        raise ExportError(f"input {example.name!r} has the range {low:g} to {high:g}, which is empty")
    if example.dtype.value in _FLOATS:
        return
    lowest, highest = _limits(example.dtype)
    if int(low) != low or int(high) != high or low < lowest or high > highest:
        raise ExportError(
            f"input {example.name!r} is {example.dtype.value}, which reaches from {lowest} to {highest}, "
            f"not from {low} to {high}"
        )


def _number(text: str) -> float:
    """An int where the text is one, so that large bounds stay exact."""
    try:
        return int(text)
    except ValueError:
        return float(text)
