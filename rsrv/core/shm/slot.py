"""A slot of a pool of buffers, and the tensors that lie in it. Who may have which slot is the pool's business."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from rsrv.core.dtypes import DType, dtype_text
from rsrv.core.errors import UsageError
from rsrv.core.memory import ALIGNMENT, aligned

if TYPE_CHECKING:
    from rsrv.core.shm.pool import BufferPool

Shape: TypeAlias = int | Sequence[int]
"""Extents in row-major order; a bare integer is a vector's."""


class PoolSlot:
    """Adjacent slots of a `BufferPool`, lent to one user until `release`, or a part carved from them by `subslot`.

    As a context manager it is released at the end, unless that was done before. Not thread safe: one user writes.

    Attributes:
        pool: where it belongs.
        index: the first slot, from 0; None for a carved part.
        offset: bytes from the start of the pool's region.
        capacity: bytes.
        span: how many slots it takes; 0 for a carved part.
        cursor: bytes that are carved already, padding included.
        generation: the number of the loan: no other one of the pool has it; a part has its slot's.
    """

    __slots__ = ("capacity", "cursor", "generation", "index", "offset", "pool", "span")

    def __init__(
        self, pool: BufferPool, generation: int, index: int | None, span: int, offset: int, capacity: int
    ) -> None:
        self.pool = pool
        self.generation = generation
        self.index = index
        self.span = span
        self.offset = offset
        self.capacity = capacity
        self.cursor = 0

    @property
    def live(self) -> bool:
        """Whether it, or the slot that it is a part of, is still lent."""
        return self.pool.lends(self.generation)

    def subslot(self, n_bytes: int) -> PoolSlot:
        """Carve the next `n_bytes`, from a 64-byte boundary on; the part lives as long as the slot.

        Raises UsageError for a negative number, for more than is left, and once the slot was released.
        """
        self._check_live()
        n_bytes = operator.index(n_bytes)
        if n_bytes < 0:
            raise UsageError(f"cannot carve {n_bytes} bytes from a slot: the number is negative")
        start = aligned(self.cursor)
        if n_bytes > self.capacity - start:
            left = max(self.capacity - start, 0)
            raise UsageError(
                f"cannot carve {n_bytes} bytes from a slot of {self.capacity}: {left} are left behind the "
                f"{self.cursor} that are taken",
                hint=f"count every buffer in item_input_bytes(); each one starts at a multiple of {ALIGNMENT} bytes",
            )
        self.cursor = start + n_bytes
        return PoolSlot(self.pool, self.generation, None, 0, self.offset + start, n_bytes)

    def reset(self) -> None:
        """Carve from the start again: parts carved before then overlap with those carved after."""
        self.cursor = 0

    def view(self, dtype: Any, shape: Shape) -> np.ndarray:
        """A writable C-order array over the first bytes; it must not be used once the slot is released.

        `dtype` is a `DType` or whatever NumPy takes for one. Raises UsageError when the array does not fit, for a
        negative extent, a dtype of Python objects, and once the slot was released.
        """
        self._check_live()
        kind, extents, n_bytes = _measured(dtype, shape)
        if n_bytes > self.capacity:
            raise UsageError(
                f"{dtype_text(kind)}{list(extents)} takes {n_bytes} bytes, the slot has {self.capacity}",
                hint="carve as many bytes as the array takes",
            )
        array: np.ndarray = self.pool.memory[self.offset : self.offset + n_bytes].view(kind).reshape(extents)
        return array

    @overload
    def scratch(self, shape: Shape, dtype: Any) -> np.ndarray: ...

    @overload
    def scratch(self, shape: Sequence[tuple[Shape, Any]]) -> list[np.ndarray]: ...

    def scratch(self, shape: Any, dtype: Any = None) -> np.ndarray | list[np.ndarray]:
        """Carve an array, or all of ``[(shape, dtype), …]`` in that order: disjoint, writable, 64-byte aligned.

        Raises as `subslot` and `view`; when one of several does not fit, nothing is carved.
        """
        if dtype is not None:
            return self._carve(shape, dtype)
        before = self.cursor
        try:
            return [self._carve(extents, kind) for extents, kind in shape]
        except BaseException:
            self.cursor = before
            raise

    def release(self, *, reusable: bool = True) -> None:
        """As `BufferPool.release`."""
        self.pool.release(self, reusable=reusable)

    def __enter__(self) -> PoolSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.release()

    def __repr__(self) -> str:
        what = f"slot {self.index}" if self.index is not None else "part"
        state = "" if self.live else ", released"
        return f"<{what} of {self.pool!r}: {self.capacity} bytes at {self.offset}{state}>"

    def _carve(self, shape: Shape, dtype: Any) -> np.ndarray:
        kind, extents, n_bytes = _measured(dtype, shape)
        return self.subslot(n_bytes).view(kind, extents)

    def _check_live(self) -> None:
        if not self.live:
            raise UsageError(
                "the slot was released: its memory may be somebody else's by now",
                hint="keep no slot beyond encode_chunk; copy what has to last",
            )


def _measured(dtype: Any, shape: Shape) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """NumPy's dtype, the extents, and the bytes that they take."""
    kind: np.dtype[Any] = dtype.numpy if isinstance(dtype, DType) else np.dtype(dtype)
    if kind.hasobject or not kind.itemsize:
        raise UsageError(f"dtype {kind} has no bytes of its own to lay into a slot")
    extents = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    if min(extents, default=0) < 0:
        raise UsageError(f"shape {list(extents)} has a negative extent")
    return kind, extents, prod(extents) * kind.itemsize
