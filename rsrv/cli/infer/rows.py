"""Inputs of many rows that are never in memory at once: what a source gives to whoever sends it, and generated ones."""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import numpy as np

_BLOCK_BYTES = 64 << 10


class Rows(Protocol):
    """A tensor that is read a range of rows at a time. An array is one, a memory-mapped one in particular."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


class Converted:
    """The rows of `source` in another dtype."""

    def __init__(self, source: Rows, dtype: np.dtype[Any]) -> None:
        self._source = source
        self.dtype = dtype
        self.shape = source.shape

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        return self._source[rows].astype(self.dtype)


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
