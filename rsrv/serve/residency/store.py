"""Host copies of weights: what a store gives out, and the store whose copies belong to this process alone.

How the bytes get from the file into a copy is for the caller to say.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import numpy as np

from rsrv.bundle.safetensors import WeightEntry, WeightsHeader, ordered
from rsrv.core.memory import ALIGNMENT
from rsrv.serve.residency.content import ContentToken

Fill = Callable[[list[memoryview]], None]
"""Writes the tensors of a file into views of their sizes, in argument order, and keeps none of the views."""

_HUGE_PAGE_BYTES = 2 << 20


class Source(Protocol):
    """What a store asks of a `WeightsFile`: the header, and the version on disk that it belongs to."""

    @property
    def header(self) -> WeightsHeader: ...
    @property
    def token(self) -> ContentToken: ...


class WeightStore(Protocol):
    """Gives out host copies of weights. Safe to call from any thread."""

    def acquire(self, name: str, file: Source, fill: Fill) -> HostCopy:
        """The tensors of `file` in host memory, for the model `name`; `fill` is called unless they are there already.

        Raises what `fill` raises, and nothing of the copy is left then.
        """
        ...

    def close(self) -> None:
        """End all waiting for other workers. Copies that were given out stay until they are released."""
        ...


class HostCopy:
    """The weights of one model in host memory, until `release`.

    Attributes:
        arrays: in argument order; read-only, C order, each on a 64-byte boundary.
        nbytes: of all tensors together.
        shared: whether other processes may use the same memory.
    """

    def __init__(
        self,
        mapping: mmap.mmap | None,
        header: WeightsHeader,
        starts: Sequence[int],
        *,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        entries = ordered(header)
        self.arrays = tuple(_array(mapping, entry, start) for entry, start in zip(entries, starts, strict=True))
        self.nbytes = sum(entry.nbytes for entry in entries)
        self.shared = on_release is not None
        self._mapping = mapping
        self._on_release = on_release

    def release(self) -> None:
        """Unmap the memory and give up the region; a call after one that succeeded does nothing.

        Raises BufferError while something else holds a view of an array; then the memory stays, and so does its lock.
        """
        self.arrays = ()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


class PrivateWeightStore:
    """Each copy is an anonymous mapping of this process, gone exactly when it is released."""

    def close(self) -> None:
        """Nothing here waits for anybody."""

    def acquire(self, name: str, file: Source, fill: Fill) -> HostCopy:
        """As `WeightStore.acquire`; always calls `fill`, except for a file without bytes."""
        starts, end = layout(ordered(file.header))
        if not end:
            return HostCopy(None, file.header, starts)
        mapping = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if end >= _HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # transparent huge pages are not available
                mapping.madvise(mmap.MADV_HUGEPAGE)
        fill_views(mapping, ordered(file.header), starts, fill)
        return HostCopy(mapping, file.header, starts)


def layout(entries: Sequence[WeightEntry], begin: int = 0) -> tuple[list[int], int]:
    """Where each tensor starts when they follow `begin` on 64-byte boundaries, and where the last one ends."""
    starts: list[int] = []
    end = begin
    for entry in entries:
        start = -(-end // ALIGNMENT) * ALIGNMENT if entry.nbytes else end
        starts.append(start)
        end = start + entry.nbytes
    return starts, end


def fill_views(mapping: mmap.mmap, entries: Sequence[WeightEntry], starts: Sequence[int], fill: Fill) -> None:
    """Call `fill` with a writable view of each tensor. Raises what it raises, with `mapping` closed."""
    with memoryview(mapping) as memory:
        views = [memory[start : start + entry.nbytes] for entry, start in zip(entries, starts, strict=True)]
    try:
        fill(views)
    except BaseException:
        # Frames of the traceback may still hold arrays over the views: then the memory goes when the error does.
        for view in views:
            with contextlib.suppress(BufferError):
                view.release()
        with contextlib.suppress(BufferError):
            mapping.close()
        raise
    for view in views:
        view.release()


def _array(mapping: mmap.mmap | None, entry: WeightEntry, start: int) -> np.ndarray:
    if mapping is None or not entry.nbytes:
        array: np.ndarray = np.empty(entry.shape, entry.dtype.numpy)
    else:
        # Not np.ndarray(buffer=…): that would not keep the mapping from being closed under the array.
        array = np.frombuffer(mapping, entry.dtype.numpy, prod(entry.shape), start).reshape(entry.shape)
    array.setflags(write=False)
    return array
