"""A pool of host memory blocks in which batches are assembled, so that a steady load allocates nothing."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from rsrv.core.memory import address, aligned_empty

_SMALLEST = 4096


class StagingPool:
    """Blocks of 64-byte aligned memory, lent and taken back. Thread safe.

    A block stays out of the pool from `acquire` until its owner releases it, so whoever hands it to a device releases
    it only when the device is done. At most `max_idle_bytes` are kept; beyond that the blocks idle for longest go.
    `clock` gives monotonic nanoseconds.
    """

    def __init__(self, max_idle_bytes: int = 256 << 20, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._lent: dict[int, np.ndarray] = {}
        # By address, the longest idle first; each with the time at which it came back.
        self._idle: OrderedDict[int, tuple[np.ndarray, int]] = OrderedDict()
        self._idle_by_size: dict[int, list[int]] = {}
        self._idle_bytes = 0
        self._closed = False

    def acquire(self, n_bytes: int) -> np.ndarray:
        """`n_bytes` of uninitialised memory (uint8) at the start of a free block of its size class."""
        if n_bytes < 0:
            raise ValueError(f"cannot stage {n_bytes} bytes")
        size = size_class(n_bytes)
        with self._lock:
            if self._closed:
                raise RuntimeError("the staging pool is closed")
            addresses = self._idle_by_size.get(size)
            # The block released last is the one most likely still in the CPU's caches.
            block = self._take_idle(addresses[-1]) if addresses else None
            if block is not None:
                self._lent[address(block)] = block
        if block is None:
            block = aligned_empty(size, np.uint8)
            with self._lock:
                self._lent[address(block)] = block
        return block[:n_bytes]

    def release(self, block: np.ndarray) -> None:
        """Take back what `acquire` returned. Raises ValueError for anything else, a second release included."""
        with self._lock:
            whole = self._lent.pop(address(block), None)
            if whole is None:
                raise ValueError(f"a block of {block.nbytes} bytes is not lent by this pool; it was released before")
            if self._closed or whole.nbytes > self._max_idle_bytes:
                return
            while self._idle_bytes + whole.nbytes > self._max_idle_bytes:
                self._take_idle(next(iter(self._idle)))
            self._idle[address(whole)] = whole, self._clock()
            self._idle_by_size.setdefault(whole.nbytes, []).append(address(whole))
            self._idle_bytes += whole.nbytes

    def release_idle(self, seconds: float) -> int:
        """Drop the blocks that nobody has used for so long; returns their bytes. Those that are lent are in use."""
        freed = 0
        with self._lock:
            until_ns = self._clock() - round(seconds * 1e9)
            while self._idle:
                block_address, (block, since_ns) = next(iter(self._idle.items()))
                if since_ns > until_ns:
                    break
                self._take_idle(block_address)
                freed += block.nbytes
        return freed

    @property
    def idle_bytes(self) -> int:
        return self._idle_bytes

    @property
    def lent(self) -> int:
        """Number of blocks that are out."""
        return len(self._lent)

    def close(self) -> None:
        """Drop the idle blocks, and each lent one when it comes back."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            self._idle_by_size.clear()
            self._idle_bytes = 0

    def _take_idle(self, block_address: int) -> np.ndarray:
        block, _ = self._idle.pop(block_address)
        self._idle_bytes -= block.nbytes
        addresses = self._idle_by_size[block.nbytes]
        addresses.remove(block_address)
        if not addresses:
            del self._idle_by_size[block.nbytes]
        return block


def size_class(n_bytes: int) -> int:
    """The block size for `n_bytes`: eight classes for each power of two, so at most an eighth is wasted."""
    if n_bytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max((n_bytes - 1).bit_length() - 4, 6)
    return -(-n_bytes // step) * step
