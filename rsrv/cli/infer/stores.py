"""Where the rows of one output go as they come, in any order: into an array, or into an .npy file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the system's errors in this block name the file, which those of writing do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class Store(Protocol):
    """Room for a known number of rows. `write` is called from several threads, for different rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def write(self, start: int, rows: np.ndarray) -> None: ...
    def array(self) -> np.ndarray: ...
    def close(self) -> None: ...


class MemoryStore:
    """Rows in memory."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self._array = np.empty(shape, dtype)

    def write(self, start: int, rows: np.ndarray) -> None:
        self._array[start : start + len(rows)] = rows

    def array(self) -> np.ndarray:
        return self._array

    def close(self) -> None:
        """Nothing to close."""


class FileStore:
    """Rows in an .npy file, which is written as they come: memory does not limit it.

    Writing calls the system rather than touch a mapping, since a full disk ends a process that does the latter.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self._row_bytes = prod(shape[1:]) * dtype.itemsize
        with naming(path), path.open("wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            self._data = file.tell()
            file.truncate(self._data + prod(shape) * dtype.itemsize)
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, start: int, rows: np.ndarray) -> None:
        left = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        at = self._data + start * self._row_bytes
        with naming(self.path):
            while left:
                written = os.pwrite(self._file, left, at)
                left, at = left[written:], at + written

    def array(self) -> np.ndarray:
        """The rows, mapped from the file."""
        array: np.ndarray = np.load(self.path, mmap_mode="r" if prod(self.shape) else None)
        return array.view(self.dtype)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
