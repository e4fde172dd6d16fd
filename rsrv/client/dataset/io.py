"""What a user of the drivers writes and handles: `InferenceIO`, output specs, and inputs that lie in a slot of a pool.

Not for sending (`rsrv.client.dataset.course`) nor for arrays that are there already (`rsrv.client.dataset.rows`).
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rsrv.core.dtypes import DType
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from rsrv.client.tensors import InferResponse
    from rsrv.core.shm.slot import PoolSlot, Shape


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """An output that an `InferenceIO` reads: its dtype and, row-major, the extents of one item (no row axis).

    Declaring one changes the request: it asks for the declared outputs only, in that order. Through shared memory the
    server then writes them into the slot of the chunk. Raises UsageError for a dtype that cannot travel and for
    extents below 0.
    """

    name: str
    dtype: np.dtype[Any]
    per_item_dims: tuple[int, ...] = ()

    def __init__(self, name: str, dtype: DTypeLike, per_item_dims: Shape = ()) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dtype", _wire_dtype(f"output {name!r}", dtype))
        object.__setattr__(self, "per_item_dims", _extents(f"output {name!r}", per_item_dims))

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.per_item_dims)


@dataclass(frozen=True, slots=True, eq=False)
class PoolInferInput:
    """An input tensor whose elements lie, C-ordered, at the start of `subslot`; `shape` includes the rows.

    Raises UsageError for a dtype that cannot travel, for extents below 0, and for more bytes than `subslot` has.
    """

    name: str
    subslot: PoolSlot
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __init__(self, name: str, subslot: PoolSlot, shape: Shape, dtype: DTypeLike) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "subslot", subslot)
        object.__setattr__(self, "shape", _extents(f"input {name!r}", shape))
        object.__setattr__(self, "dtype", _wire_dtype(f"input {name!r}", dtype))
        if self.nbytes > subslot.capacity:
            raise UsageError(
                f"input {name!r} {self.dtype}{list(self.shape)} takes {self.nbytes} bytes, its slot has "
                f"{subslot.capacity}",
                hint="carve the slot with scratch(slot, name, shape, dtype)",
            )

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


@overload
def scratch(slot: PoolSlot, name: str, shape: Shape, dtype: DTypeLike) -> PoolInferInput: ...
@overload
def scratch(slot: PoolSlot, name: Mapping[str, tuple[Shape, DTypeLike]]) -> list[PoolInferInput]: ...
def scratch(
    slot: PoolSlot,
    name: str | Mapping[str, tuple[Shape, DTypeLike]],
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
) -> PoolInferInput | list[PoolInferInput]:
    """Carve room for an input, ``scratch(slot, "x", (rows, 3), np.float32)``, or for several at once,
    ``scratch(slot, {"x": ((rows, 3), np.float32), …})``, which gives a list in that order.

    The bytes hold whatever was there before: fill them all, through `pool_view`. Raises UsageError when the slot has no
    room for them: `item_input_bytes` says less than what is carved.
    """
    if not isinstance(name, str):
        return [_carve(slot, key, extents, kind) for key, (extents, kind) in name.items()]
    if shape is None or dtype is None:
        raise TypeError(f"scratch(slot, {name!r}, shape, dtype) needs a shape and a dtype")
    return _carve(slot, name, shape, dtype)


@overload
def pool_view(descriptor: PoolInferInput, /) -> np.ndarray: ...
@overload
def pool_view(first: PoolInferInput, second: PoolInferInput, /, *more: PoolInferInput) -> tuple[np.ndarray, ...]: ...
def pool_view(*descriptors: PoolInferInput) -> np.ndarray | tuple[np.ndarray, ...]:
    """The writable array of an input that was carved from a slot; a tuple of them for several.

    It must not be used after `encode_chunk` has returned.
    """
    views = tuple(one.subslot.view(one.dtype, one.shape) for one in descriptors)
    return views[0] if len(views) == 1 else views


class InferenceIO(ABC):
    """A dataset of items, as `infer_sync` and `infer_async` take it: how to write items into requests, and what to do
    with the answers. Any object with these methods will do.
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of items."""

    @abstractmethod
    def item_input_bytes(self) -> int:
        """The bytes of one item, all inputs together; above 0."""

    @abstractmethod
    def encode_chunk(self, rows: range, slot: PoolSlot) -> PoolInferInput | Sequence[PoolInferInput]:
        """Write the items `rows` into buffers carved from `slot` (`scratch`, `pool_view`) and return these.

        Calls do not overlap. Neither `slot` nor a view of it may be kept.
        """

    @abstractmethod
    def decode_chunk(self, rows: range, response: InferResponse) -> None:
        """Take the answer for the items `rows`. Calls overlap, for different rows, and come in any order."""

    def output_specs(self) -> Sequence[OutputSpec]:
        """The outputs that `decode_chunk` reads, or none for all that the model has, sent inline."""
        return []


def _carve(slot: PoolSlot, name: str, shape: Shape, dtype: DTypeLike) -> PoolInferInput:
    label = f"input {name!r}"
    extents = _extents(label, shape)
    kind = _wire_dtype(label, dtype)
    return PoolInferInput(name, slot.subslot(kind.itemsize * prod(extents)), extents, kind)


def _extents(label: str, shape: Shape) -> tuple[int, ...]:
    try:
        extents = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    except TypeError:
        raise UsageError(f"{label} has the extents {shape!r}; wanted whole numbers") from None
    if min(extents, default=0) < 0:
        raise UsageError(f"{label} has the extents {list(extents)}; wanted 0 or more")
    return extents


def _wire_dtype(label: str, dtype: DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    try:
        wire = DType.from_numpy(kind).wire
    except TypeError as error:
        raise UsageError(f"{label}: {error}") from None
    if wire is None:
        raise UsageError(f"{label}: dtype {kind} has no form on the wire")
    return kind
