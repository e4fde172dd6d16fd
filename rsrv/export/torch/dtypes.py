"""torch's dtypes, NumPy's and the bundle's, and tensors as arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError

_NUMPY: dict[torch.dtype, type] = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
_TORCH: dict[np.dtype[Any], torch.dtype] = {np.dtype(kind): dtype for dtype, kind in _NUMPY.items()}
_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic] | None:
    """None for a dtype that JAX does not have (quantised ones, complex32, …)."""
    kind = _NUMPY.get(dtype)
    return None if kind is None else np.dtype(kind)


def bundle_dtype(dtype: torch.dtype) -> DType | None:
    """None for a dtype that no bundle can hold."""
    kind = numpy_dtype(dtype)
    try:
        return None if kind is None else DType.from_numpy(kind)
    except TypeError:
        return None


def torch_dtype(dtype: DType) -> torch.dtype:
    return _TORCH[dtype.numpy]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values in C order on the host; shares memory where the tensor already is that."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    kind = numpy_dtype(plain.dtype)
    if kind is None:
        raise TypeError(f"torch.{short(plain.dtype)} has no counterpart")
    if kind.isbuiltin == 1:
        return np.asarray(plain.numpy())
    same_size, bits = _BITS[kind.itemsize]  # torch refuses to hand its own small floats to NumPy
    return np.asarray(plain.view(same_size).numpy().view(bits).view(kind))


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor with the values of `array`, in memory of its own."""
    kind = array.dtype
    copy = np.array(array, order="C")
    if kind.isbuiltin == 1:
        return torch.from_numpy(copy)
    _, bits = _BITS[kind.itemsize]
    return torch.from_numpy(copy.view(bits)).view(_TORCH[kind])


def as_declared(name: str, tensor: torch.Tensor, *, narrow: bool) -> np.ndarray:
    """An output of the model in the dtype in which a bundle has it. Raises ExportError when none can."""
    dtype = output_dtype(f"output {name!r}", tensor.dtype)
    array = to_numpy(tensor)
    return array.astype(np.int32) if narrow and dtype is DType.I64 else array


def output_dtype(what: str, dtype: torch.dtype) -> DType:
    """Raises ExportError for a dtype that no bundle can hold."""
    found = bundle_dtype(dtype)
    if found is None:
        raise ExportError(
            f"{what} is {short(dtype)}, which no bundle can hold",
            hint="torch.view_as_real(x) gives the real and imaginary parts a last axis of 2"
            if dtype.is_complex
            else "convert it in the model, for example with x.float()",
        )
    return found
