"""Anonymous memory that tensors are read into: each piece goes back to the system alone, exactly when it is freed."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rsrv.core.memory import ALIGNMENT, trim_malloc

_HUGE_PAGE_BYTES = 2 << 20
_TRIM_INTERVAL_NS = 1_000_000_000


class Piece:
    """Whole pages of a mapping that it may share with other pieces.

    Attributes:
        array: its bytes; None after it was freed. Arrays made of it keep it from being freed.
    """

    __slots__ = ("_slab", "_start", "array")

    def __init__(self, slab: _Slab, start: int, array: np.ndarray) -> None:
        self.array: np.ndarray | None = array
        self._slab = slab
        self._start = start

    def bytes(self) -> np.ndarray:
        assert self.array is not None, "the memory was freed"
        return self.array


class _Slab:
    """One mapping for all tensors of a load: the kernel allows a process some 65,000 mappings, and models have
    hundreds of tensors."""

    def __init__(self, mapping: mmap.mmap, pieces: int) -> None:
        self.mapping = mapping
        self.live = pieces
        self.lock = threading.Lock()

    def give_back(self, extents: Sequence[tuple[int, int]]) -> None:
        with self.lock:
            self.live -= len(extents)
            if not self.live:
                self.mapping.close()
                return
            for start, length in extents:
                # Nothing looks at these pages any more. As private and anonymous ones they are gone at once.
                self.mapping.madvise(mmap.MADV_DONTNEED, start, length)


def allocate(sizes: Sequence[int]) -> list[Piece]:
    """Zeroed memory for tensors of these sizes in bytes, 1 or above, each from a page boundary on. Raises OSError."""
    lengths = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
    if not lengths:
        return []
    mapping = mmap.mmap(-1, sum(lengths), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(mapping) >= _HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # transparent huge pages are not available
            mapping.madvise(mmap.MADV_HUGEPAGE)
    slab = _Slab(mapping, len(sizes))
    pieces: list[Piece] = []
    start = 0
    for size, length in zip(sizes, lengths, strict=True):
        pieces.append(Piece(slab, start, np.frombuffer(mapping, np.uint8, size, start)))
        start += length
    return pieces


def free_pieces(pieces: Iterable[Piece]) -> None:
    """Give pieces back to the system; those that were freed before are passed over.

    Raises BufferError, after all others are free, when something still looks at one of them: that one stays.
    """
    extents: dict[_Slab, list[tuple[int, int]]] = {}
    kept = 0
    for piece in pieces:
        array, piece.array = piece.array, None
        if array is None:
            continue
        length = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        watched = weakref.ref(array)
        # Every array made of this one, however indirectly, refers to it.
        del array
        piece.array = watched()
        if piece.array is None:
            extents.setdefault(piece._slab, []).append((piece._start, length))
        else:
            kept += 1
    for slab, freed in extents.items():
        slab.give_back(freed)
    if kept:
        raise BufferError(f"{kept} tensors cannot be unmapped: something still holds arrays of their memory")


def discard(pieces: Iterable[Piece], error: BaseException) -> None:
    """Free pieces after `error`: the frames of its traceback forget their variables, which refer to the memory."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    with contextlib.suppress(BufferError):  # else the memory goes with the last reference to it
        free_pieces(pieces)


def stack(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where each starts when they follow each other on 64-byte boundaries, and where the last one ends."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


_last_trim_ns = -_TRIM_INTERVAL_NS
_trimming = threading.Lock()


def trim(clock: Callable[[], int] = time.monotonic_ns) -> bool:
    """Give free heap memory back to the system, after weights were freed; at most once a second, which the result says.

    The weights themselves have mappings of their own and do not need it.
    """
    global _last_trim_ns
    with _trimming:
        now = clock()
        if now - _last_trim_ns < _TRIM_INTERVAL_NS:
            return False
        _last_trim_ns = now
    trim_malloc()
    return True
