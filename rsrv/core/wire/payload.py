"""Tensor bytes to arrays, with every check that must pass before memory is spent on a claimed shape."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest
from rsrv.core.wire.contents import from_contents

if sys.byteorder != "little":
    raise ImportError("rsrv exchanges tensors in little-endian byte order and runs on little-endian hosts only")

_INT64_MAX = 2**63 - 1
_MEMO_ENTRIES = 4096


class Layout(NamedTuple):
    """How a datatype and a shape lie in memory."""

    dtype: DType
    numpy: np.dtype[Any]
    elements: int
    byte_size: int


@lru_cache(_MEMO_ENTRIES)
def layout(datatype: str, shape: tuple[int, ...]) -> Layout:
    """Raises InvalidRequest for an unknown datatype, a negative extent, or a product past int64.

    Zero extents do not hide an overflow of the others, because numpy refuses such shapes too.
    """
    dtype = DType.from_wire(datatype)
    product = dtype.itemsize
    for extent in shape:
        if extent < 0:
            raise InvalidRequest(f"shape {list(shape)} has a negative extent")
        product *= extent or 1
        if product > _INT64_MAX:
            raise InvalidRequest(f"shape {list(shape)} of {datatype} overflows 64 bits")
    byte_size = 0 if 0 in shape else product
    return Layout(dtype, dtype.numpy, byte_size // dtype.itemsize, byte_size)


def sized_layout(datatype: str, shape: tuple[int, ...], n_bytes: int) -> Layout:
    """The layout, or InvalidRequest unless it takes exactly `n_bytes`."""
    plan = layout(datatype, shape)
    if n_bytes != plan.byte_size:
        itemsize = plan.numpy.itemsize
        if n_bytes % itemsize:
            raise InvalidRequest(f"{n_bytes} bytes are no multiple of the {itemsize} bytes of a {datatype} element")
        raise InvalidRequest(f"{datatype}{list(shape)} takes {plan.byte_size} bytes, got {n_bytes}")
    return plan


def from_bytes(data: memoryview, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only array on `data` (read-only, no copy), which has to hold exactly the bytes of the shape.

    Bytes other than 0 and 1 of a BOOL tensor become True (in a copy). Raises InvalidRequest.
    """
    plan = layout(datatype, shape)
    if len(data) != plan.byte_size:
        sized_layout(datatype, shape, len(data))  # says what is wrong
    if plan.dtype is DType.BOOL and plan.elements:
        flags = np.ndarray(shape, np.uint8, data)
        if flags.max() > 1:
            normal: np.ndarray = flags != 0
            normal.setflags(write=False)
            return normal
    return np.ndarray(shape, plan.numpy, data)


def from_typed(contents: Any, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only array of the elements in an ``InferTensorContents``. Raises InvalidRequest."""
    plan = layout(datatype, shape)
    array = from_contents(contents, plan.dtype)
    if array.size != plan.elements:
        raise InvalidRequest(f"{datatype}{list(shape)} takes {plan.elements} elements, got {array.size}")
    array.setflags(write=False)
    return array.reshape(shape)
