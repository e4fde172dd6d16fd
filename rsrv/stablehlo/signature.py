"""What a program takes and returns, as plain values that travel between processes. Imports nothing of jaxlib."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from rsrv.core.dtypes import DType

# Element types that a program may use although no bundle can declare them.
_UNDECLARABLE: dict[str, type] = {
    "i2": ml_dtypes.int2,
    "ui2": ml_dtypes.uint2,
    "i4": ml_dtypes.int4,
    "ui4": ml_dtypes.uint4,
    "f4E2M1FN": ml_dtypes.float4_e2m1fn,
    "f8E3M4": ml_dtypes.float8_e3m4,
    "f8E4M3": ml_dtypes.float8_e4m3,
    "f8E4M3B11FNUZ": ml_dtypes.float8_e4m3b11fnuz,
    "f8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "f8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "f8E8M0FNU": ml_dtypes.float8_e8m0fnu,
    "complex<f32>": np.complex64,
    "complex<f64>": np.complex128,
}
_NUMPY: dict[str, np.dtype[Any]] = {
    **{dtype.stablehlo: dtype.numpy for dtype in DType},
    **{element: np.dtype(scalar) for element, scalar in _UNDECLARABLE.items()},
}
_ELEMENT = {dtype: element for element, dtype in _NUMPY.items()}


def numpy_dtype(element: str) -> np.dtype[Any]:
    """Raises KeyError for an element type that numpy cannot hold (a quantised one)."""
    return _NUMPY[element]


def nbytes_of(tensor: TensorType) -> int:
    """Bytes of a static tensor in memory. Raises KeyError as `numpy_dtype`."""
    return prod(tensor.shape) * numpy_dtype(tensor.dtype).itemsize


def element_type(dtype: np.dtype[Any] | type) -> str:
    """The StableHLO name of a numpy dtype (``float32`` → ``f32``). Raises TypeError when there is none."""
    dtype = np.dtype(dtype)
    try:
        return _ELEMENT[dtype]
    except KeyError:
        raise TypeError(f"dtype {dtype} (byte order {dtype.byteorder!r}) has no StableHLO element type") from None


@dataclass(frozen=True, slots=True)
class TensorType:
    """A ranked tensor type: `dtype` as MLIR prints it (``f32``, ``i1``, ``ui8``), `shape` row-major, -1 = dynamic."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_static(self) -> bool:
        return -1 not in self.shape

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join('?' if size == -1 else str(size) for size in self.shape)}]"

    def to_json(self) -> list[Any]:
        return [self.dtype, list(self.shape)]

    @classmethod
    def from_json(cls, value: Any) -> TensorType:
        dtype, shape = value
        return tensor_type(str(dtype), tuple(int(size) for size in shape))


@lru_cache(maxsize=16384)
def tensor_type(dtype: str, shape: tuple[int, ...]) -> TensorType:
    """An interned `TensorType`, so that the check before each launch can compare by identity."""
    return TensorType(dtype, shape)


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """Argument and result types of a program's entry function, in order."""

    arguments: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    def dynamic(self) -> str | None:
        """The first argument or result with a dynamic axis ("argument 2 is f32[?,3]"), or None when all are static."""
        for kind, types in (("argument", self.arguments), ("result", self.results)):
            for index, tensor in enumerate(types):
                if not tensor.is_static:
                    return f"{kind} {index} is {tensor}"
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "arguments": [tensor.to_json() for tensor in self.arguments],
            "results": [tensor.to_json() for tensor in self.results],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProgramSignature:
        return cls(
            tuple(TensorType.from_json(tensor) for tensor in value["arguments"]),
            tuple(TensorType.from_json(tensor) for tensor in value["results"]),
        )


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """What can be read from a program without compiling it.

    Attributes:
        signature: types of the entry function.
        custom_calls: targets of its custom calls, sorted.
        dialects: dialects of its operations, sorted.
        donated: arguments that it asks to overwrite; the runtime strips the request, since a donated weight dies
            with the first call.
        stablehlo_version: version that the artifact was written at; None for text and for plain MLIR bytecode.
    """

    signature: ProgramSignature
    custom_calls: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()
    stablehlo_version: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "signature": self.signature.to_json(),
            "custom_calls": list(self.custom_calls),
            "dialects": list(self.dialects),
            "donated": list(self.donated),
            "stablehlo_version": self.stablehlo_version,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProgramReport:
        return cls(
            signature=ProgramSignature.from_json(value["signature"]),
            custom_calls=tuple(value["custom_calls"]),
            dialects=tuple(value["dialects"]),
            donated=tuple(value["donated"]),
            stablehlo_version=value["stablehlo_version"],
        )
