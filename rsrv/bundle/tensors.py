"""Tensors of a safetensors file of a bundle as numpy arrays. The server reads weights on its own, faster path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rsrv.bundle.files import open_regular
from rsrv.bundle.problems import violation
from rsrv.bundle.safetensors import WeightsHeader, read_header
from rsrv.core.errors import WeightsError


@dataclass(frozen=True)
class TensorFile:
    """An open file of tensors."""

    header: WeightsHeader
    _path: Path
    _fd: int

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as programs take it: row-major, C order, not writable.

        Raises WeightsError when the file shrank since it was opened.
        """
        entry = self.header.tensors[name]
        data = np.empty(entry.nbytes, np.uint8)
        view, position = data.data, self.header.data_offset + entry.begin
        while view:
            count = os.preadv(self._fd, [view], position)
            if not count:
                problem = f"{self._path}: ended at byte {position} while it was read"
                raise violation(WeightsError, "B-60", problem, file=self._path.name)
            view, position = view[count:], position + count
        array = data.view(entry.dtype.numpy)
        if self.header.column_major:
            array = np.array(array.reshape(entry.shape[::-1]).T, order="C")
        array.flags.writeable = False
        return array.reshape(entry.shape)


@contextmanager
def open_tensors(path: Path | str, *, column_major: bool = False) -> Iterator[TensorFile]:
    """The file `path`, open for the time of the block; `column_major` as for `read_header`.

    Raises WeightsError when it is not what its header says.
    """
    file = Path(path)
    fd = open_regular(file, error=WeightsError, rule="B-58")
    try:
        yield TensorFile(read_header(fd, column_major=column_major), file, fd)
    finally:
        os.close(fd)


def load_tensors(path: Path | str, *, column_major: bool = False) -> dict[str, np.ndarray]:
    """All tensors of the file `path` in `argument_order`; see `open_tensors` and `TensorFile.read`."""
    with open_tensors(path, column_major=column_major) as file:
        return {name: file.read(name) for name in file.header.argument_order}
