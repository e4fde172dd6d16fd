"""Arrays through an anonymous memory file that two processes hold: one writes them, the other reads them once.

The bytes are written and read by system calls, not mapped: each side copies once, nobody sees an array change under it,
and a process that truncates the file gives the other a short read instead of a SIGBUS.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from rsrv.core.dtypes import DType
from rsrv.core.memory import ALIGNMENT, aligned_empty

KEPT_BYTES = 16 << 20
"""What a file may keep between two calls. Memory files have no owner that could be asked for memory back."""

Header = list[Any]
"""``[name, dtype token, shape, offset]`` of one array, as JSON carries it."""


def memory_file(name: str) -> int:
    """A new file without a path; it is gone with its last descriptor, however the processes end."""
    return os.memfd_create(f"rsrv-{name}", os.MFD_CLOEXEC)


def write_arrays(fd: int, arrays: Mapping[str, np.ndarray]) -> list[Header]:
    """Write `arrays` to the start of the file, in C order. Raises TypeError for a dtype that no tensor can have."""
    headers: list[Header] = []
    offset = 0
    for name, array in arrays.items():
        try:
            token = DType.from_numpy(array.dtype).value
        except TypeError as error:
            raise TypeError(f"tensor {name!r}: {error}") from None
        headers.append([name, token, list(array.shape), offset])
        # Not the buffer protocol: it knows no bfloat16. A 0-d array becomes one of one element.
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        end = offset + len(data)
        while data:
            written = os.pwrite(fd, data, end - len(data))
            data = data[written:]
        offset = -(-end // ALIGNMENT) * ALIGNMENT
    return headers


def read_arrays(fd: int, headers: object) -> dict[str, np.ndarray]:
    """The arrays that `write_arrays` described, read-only and 64-byte aligned, in memory of this process.

    Raises ValueError when `headers` are not such headers, or the file does not hold what they say.
    """
    n_bytes = os.fstat(fd).st_size
    arrays: dict[str, np.ndarray] = {}
    for name, token, shape, offset in _checked(headers):
        dtype = DType(token).numpy
        size = math.prod(shape) * dtype.itemsize
        if size and offset + size > n_bytes:
            raise ValueError(f"{name!r} has {size} bytes at {offset}, the file has {n_bytes}")
        array = aligned_empty(shape, dtype)
        data = array.reshape(-1).view(np.uint8).data
        while data:
            read = os.preadv(fd, [data], offset + size - len(data))
            if not read:
                raise ValueError(f"{name!r} ends {len(data)} bytes early")
            data = data[read:]
        array.setflags(write=False)
        arrays[name] = array
    return arrays


def shrink(fd: int) -> None:
    """Give back what an unusually large call left behind."""
    if os.fstat(fd).st_size > KEPT_BYTES:
        os.ftruncate(fd, KEPT_BYTES)


def _checked(headers: object) -> list[tuple[str, str, tuple[int, ...], int]]:
    if not isinstance(headers, list):
        raise ValueError(f"tensors are {headers!r}, wanted a list")
    checked = []
    for header in headers:
        match header:
            case [str(name), str(token), list(shape), int(offset)] if offset >= 0:
                if all(type(size) is int and size >= 0 for size in shape):
                    checked.append((name, token, tuple(shape), offset))
                    continue
        raise ValueError(f"a tensor is {header!r}, wanted [name, dtype, shape, offset]")
    return checked
