"""Host memory on the request path: aligned arrays and glibc's malloc thresholds. Weights have mappings of their own."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes; what the CPU runtime wants before it uses host memory without a copy."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def aligned(n_bytes: int) -> int:
    """`n_bytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(shape: int | Sequence[int], dtype: Any, *, align: int = ALIGNMENT) -> np.ndarray:
    """An uninitialised C-order array whose data pointer is a multiple of `align`, a power of two."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    n_bytes = math.prod(shape) * dtype.itemsize
    block = np.empty(n_bytes + align, np.uint8)
    # Two slices: numpy moves an empty slice to the start of what it is taken from.
    part = block[-address(block) % align :][:n_bytes]
    array: np.ndarray = part.view(dtype).reshape(shape)
    return array


def address(array: np.ndarray) -> int:
    """Of the array's first byte."""
    return int(array.__array_interface__["data"][0])


def tune_malloc() -> None:
    """Let malloc keep and reuse large blocks instead of mapping and faulting each one anew (27 times on 600 KB).

    Freed memory then stays in the process: call `trim_malloc` after evictions. Does nothing where libc has no mallopt.
    """
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def trim_malloc() -> None:
    """Give free heap memory back to the system."""
    malloc_trim = _libc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def _libc(function: str) -> Callable[..., int] | None:
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), function, None)
    return found
