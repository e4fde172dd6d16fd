"""The 15 element types: one table from which every other dtype mapping is derived."""

from __future__ import annotations

from enum import Enum
from functools import cached_property

import ml_dtypes
import numpy as np

from rsrv.core.errors import InvalidRequest


class DType(Enum):
    """An element type. The value is the token that manifests use (``f32``)."""

    F16 = "f16"
    F32 = "f32"
    F64 = "f64"
    BF16 = "bf16"
    F8_E5M2 = "f8_e5m2"
    F8_E4M3 = "f8_e4m3"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    U16 = "u16"
    U32 = "u32"
    U64 = "u64"
    BOOL = "bool"

    @cached_property
    def numpy(self) -> np.dtype[np.generic]:
        return np.dtype(_TABLE[self][0])

    @cached_property
    def wire(self) -> str | None:
        """KServe datatype string; None for the 8-bit floats, which exist inside programs only."""
        return _TABLE[self][1]

    @cached_property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @cached_property
    def safetensors(self) -> str:
        return _TABLE[self][2]

    @cached_property
    def stablehlo(self) -> str:
        """Element type as MLIR prints it."""
        return _TABLE[self][3]

    @cached_property
    def typed_field(self) -> str | None:
        """Field of ``InferTensorContents`` that carries this type, or None when only raw bytes can."""
        return _TABLE[self][4]

    @classmethod
    def from_numpy(cls, dtype: np.dtype[np.generic] | type) -> DType:
        """Raises TypeError for a dtype that no bundle can hold."""
        try:
            return _FROM_NUMPY[np.dtype(dtype)]
        except KeyError:
            raise TypeError(f"dtype {np.dtype(dtype)} is not supported; supported: {', '.join(_TOKENS)}") from None

    @classmethod
    def from_wire(cls, datatype: str) -> DType:
        """Raises InvalidRequest for an unknown KServe datatype, ``BYTES`` included."""
        try:
            return _FROM_WIRE[datatype]
        except KeyError:
            raise InvalidRequest(
                f"datatype {datatype!r} is not supported; supported: {', '.join(_FROM_WIRE)}"
            ) from None

    @classmethod
    def from_safetensors(cls, tag: str) -> DType:
        """Raises KeyError for an unknown tag."""
        return _FROM_SAFETENSORS[tag]

    @classmethod
    def from_stablehlo(cls, element: str) -> DType:
        """Raises KeyError for an element type that no bundle can declare (``i4``, ``complex<f32>``)."""
        return _FROM_STABLEHLO[element]


_TABLE: dict[DType, tuple[type, str | None, str, str, str | None]] = {
    DType.F16: (np.float16, "FP16", "F16", "f16", None),
    DType.F32: (np.float32, "FP32", "F32", "f32", "fp32_contents"),
    DType.F64: (np.float64, "FP64", "F64", "f64", "fp64_contents"),
    DType.BF16: (ml_dtypes.bfloat16, "BF16", "BF16", "bf16", None),
    DType.F8_E5M2: (ml_dtypes.float8_e5m2, None, "F8_E5M2", "f8E5M2", None),
    DType.F8_E4M3: (ml_dtypes.float8_e4m3fn, None, "F8_E4M3", "f8E4M3FN", None),
    DType.I8: (np.int8, "INT8", "I8", "i8", "int_contents"),
    DType.I16: (np.int16, "INT16", "I16", "i16", "int_contents"),
    DType.I32: (np.int32, "INT32", "I32", "i32", "int_contents"),
    DType.I64: (np.int64, "INT64", "I64", "i64", "int64_contents"),
    DType.U8: (np.uint8, "UINT8", "U8", "ui8", "uint_contents"),
    DType.U16: (np.uint16, "UINT16", "U16", "ui16", "uint_contents"),
    DType.U32: (np.uint32, "UINT32", "U32", "ui32", "uint_contents"),
    DType.U64: (np.uint64, "UINT64", "U64", "ui64", "uint64_contents"),
    DType.BOOL: (np.bool_, "BOOL", "BOOL", "i1", "bool_contents"),
}
_TOKENS = [d.value for d in DType]
_FROM_NUMPY = {d.numpy: d for d in DType}
_FROM_WIRE = {d.wire: d for d in DType if d.wire is not None}
_FROM_SAFETENSORS = {d.safetensors: d for d in DType}
_FROM_STABLEHLO = {d.stablehlo: d for d in DType}


def dtype_text(dtype: np.dtype[np.generic]) -> str:
    """A NumPy dtype for messages: the format's own token (``f32``), or NumPy's name where it has none."""
    try:
        return DType.from_numpy(dtype).value
    except TypeError:
        return str(dtype)
