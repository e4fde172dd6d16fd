"""Typed contents (``InferTensorContents``) to arrays, without a Python object for each element.

protobuf's repeated fields can only be read element by element; serialized again they are one packed run of bytes, which
numpy reads whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest

_FIXED = {"bool_contents": np.bool_, "fp32_contents": np.float32, "fp64_contents": np.float64}
_VARINT = {
    "int_contents": np.int64,  # an int32 travels sign-extended to 64 bits
    "int64_contents": np.int64,
    "uint_contents": np.uint64,
    "uint64_contents": np.uint64,
}


def from_contents(contents: Any, dtype: DType) -> np.ndarray:
    """The elements of `contents` as a 1-d array of `dtype`, range-checked where the field is wider.

    Raises InvalidRequest for a datatype without typed contents, and for elements in another datatype's field.
    """
    field = dtype.typed_field
    if field is None:
        raise InvalidRequest(f"{dtype.wire} has no typed contents", hint="send raw contents or use shared memory")
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    if not filled:
        return np.empty(0, dtype.numpy)
    if filled != [field]:
        raise InvalidRequest(f"typed contents of {dtype.wire} go into {field} only, got {', '.join(filled)}")
    contents.DiscardUnknownFields()
    packed = _payload(contents.SerializeToString())
    if field in _FIXED:
        return np.frombuffer(packed, _FIXED[field])
    return _narrow(_varints(packed).view(_VARINT[field]), dtype)


def _payload(record: bytes) -> memoryview:
    """Of the one packed record that is all of `record`."""
    start = 1
    while record[start] >= 0x80:
        start += 1
    return memoryview(record)[start + 1 :]


def _varints(packed: memoryview) -> np.ndarray:
    """Decode a run of varints (well formed: protobuf has just written it) to uint64."""
    stream = np.frombuffer(packed, np.uint8)
    last = np.flatnonzero(stream < 0x80)
    if last.size == stream.size:
        return stream.astype(np.uint64)
    first = np.empty_like(last)
    first[0] = 0
    first[1:] = last[:-1] + 1
    length = last - first
    values = (stream[first] & 0x7F).astype(np.uint64)
    for k in range(1, int(length.max()) + 1):
        longer = np.flatnonzero(length >= k)
        values[longer] |= (stream[first[longer] + k] & np.uint64(0x7F)) << np.uint64(7 * k)
    return values


def _narrow(values: np.ndarray[Any, Any], dtype: DType) -> np.ndarray:
    """`values` as `dtype`. Raises InvalidRequest when one does not fit."""
    if values.dtype == dtype.numpy:
        return values
    limits = np.iinfo(dtype.numpy.name)
    low, high = values.min(), values.max()
    if low < limits.min or high > limits.max:
        worst = low if low < limits.min else high
        raise InvalidRequest(f"typed contents of {dtype.wire} hold {worst}, outside {limits.min} to {limits.max}")
    return values.astype(dtype.numpy)
