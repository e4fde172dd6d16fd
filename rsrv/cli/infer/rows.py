"""Inputs of many rows that are never in memory at once: what a source gives to whoever sends it, and generated ones."""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import numpy as np

from rsrv.core.errors import UsageError

_BLOCK_BYTES = 64 << 10


class Rows(Protocol):
    """A tensor that is read a range of rows at a time. An array is one, a memory-mapped one in particular."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


class Converted:
    """The rows of `source` in another dtype; see `converted`."""

    def __init__(self, source: Rows, dtype: np.dtype[Any], what: str) -> None:
        self._source = source
        self._what = what
        self.dtype = dtype
        self.shape = source.shape

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        return converted(self._source[rows], self.dtype, self._what)


def converted(given: np.ndarray, dtype: np.dtype[Any], what: str) -> np.ndarray:
    """`given` as `dtype`. Raises UsageError for a number that would become infinite; `what` says whose it is."""
    with np.errstate(over="ignore"):
        cast = given.astype(dtype)
    lost = np.isinf(cast)
    if lost.any():
        lost &= np.isfinite(given)
    if lost.any():
        first = given[lost][0]
        raise UsageError(
            f"{what} has the value {first}, which is too large for {dtype.name}",
            hint="scale or clip it first: numpy.clip(array, lowest, highest)",
        )
    return cast


class RandomRows:
    """The same numbers each time: standard normal floats, integers in 0..99, coin flips.

    A row has the same values however many there are and whatever range is read.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self._block = max(1, _BLOCK_BYTES // max(1, prod(shape[1:]) * dtype.itemsize))

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        blocks = [
            self._rows_of(number, stop)[max(0, start - number * self._block) :]
            for number in range(start // self._block, -(-stop // self._block))
        ]
        return np.concatenate(blocks) if blocks else np.empty((0, *self.shape[1:]), self.dtype)

    def _rows_of(self, number: int, stop: int) -> np.ndarray:
        """The block `number` as far as the row `stop`: each block has a seed of its own."""
        rows = min(self._block, stop - number * self._block)
        return random_array(number, (rows, *self.shape[1:]), self.dtype)


def random_array(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    source = np.random.default_rng(seed)
    if dtype.kind == "b":
        return source.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return source.integers(0, 100, shape).astype(dtype)
    return source.standard_normal(shape).astype(dtype)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Read-only zeros that take the memory of one."""
    return np.broadcast_to(np.zeros((), dtype), shape)
