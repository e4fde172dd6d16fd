"""The slot that a dry run lends to `encode_chunk`: every carved buffer is followed by guard bytes, all is patterned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rsrv.core.memory import ALIGNMENT
from rsrv.core.shm.pool import BufferPool
from rsrv.core.shm.slot import PoolSlot

PATTERNS = (0xA5, 0x5A)
"""No byte has both, so one that keeps its pattern under either of them was never written."""
GUARD_BYTES = ALIGNMENT
GUARDS_BYTES = 1 << 16
"""For the guards and the padding of some hundred buffers."""
MOST_SLACK_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Part:
    """A carved buffer: `n_bytes` at `start`, counted from the start of the pool."""

    start: int
    n_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.n_bytes


class WatchedSlot(PoolSlot):
    """A slot that keeps the list of what is carved from it and leaves guard bytes behind each buffer.

    `overflowed` is set to the bytes that were asked for when there was no room for them.
    """

    __slots__ = ("overflowed", "parts")

    def __init__(self, lent: PoolSlot, pattern: int) -> None:
        super().__init__(lent.pool, lent.generation, lent.index, lent.span, lent.offset, lent.capacity)
        self.parts: list[Part] = []
        self.overflowed: int | None = None
        lent.pool.memory[lent.offset : lent.offset + lent.capacity] = pattern

    @property
    def carved(self) -> int:
        """Bytes of all buffers, without what lies between them."""
        return sum(part.n_bytes for part in self.parts)

    def subslot(self, n_bytes: int) -> PoolSlot:
        before = self.cursor
        try:
            part = super().subslot(n_bytes)
        except Exception:
            if self.live and n_bytes > self.capacity - before - ALIGNMENT:
                self.overflowed = n_bytes
            raise
        self.parts.append(Part(part.offset, part.capacity))
        self.cursor += GUARD_BYTES
        return part

    def reset(self) -> None:
        super().reset()
        self.parts.clear()

    def part_of(self, start: int, n_bytes: int) -> Part | None:
        """The carved buffer that those bytes lie in."""
        return next((part for part in self.parts if part.start <= start and start + n_bytes <= part.end), None)

    def content(self, start: int, n_bytes: int) -> np.ndarray:
        """A copy of bytes of the pool."""
        copy: np.ndarray = self.pool.memory[start : start + n_bytes].copy()
        return copy

    def stray_writes(self, pattern: int) -> list[tuple[int, int, Part | None]]:
        """Runs of bytes outside of all buffers that lost the `pattern`: (start, bytes, the buffer before them)."""
        touched = self.pool.memory[self.offset : self.offset + self.capacity] != pattern
        for part in self.parts:
            touched[part.start - self.offset : part.end - self.offset] = False
        edges = np.flatnonzero(np.diff(touched.view(np.int8), prepend=0, append=0)).reshape(-1, 2)
        runs = []
        for begin, end in edges.tolist():
            before = [part for part in self.parts if part.end <= self.offset + begin]
            runs.append((self.offset + begin, end - begin, max(before, key=lambda part: part.end, default=None)))
        return runs


def staging_pool(declared_bytes: int) -> BufferPool:
    """A private pool of one slot, with room beyond what is declared: an IO that carves too much is heard out."""
    slack = min(declared_bytes, MOST_SLACK_BYTES) + GUARDS_BYTES
    return BufferPool(declared_bytes + slack, n_slots=1, use_shm=False)
