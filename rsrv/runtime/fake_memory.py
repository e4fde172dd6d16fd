"""The memory of a fake device: bytes are counted and, on a card, have addresses, so that it fragments as a real one."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

GRANULE_BYTES = 256
"""A card's allocator hands out multiples of this."""


class Block(NamedTuple):
    """`size` bytes at address `start`."""

    start: int
    size: int


class FakeMemory:
    """Not thread safe.

    A card hands out the smallest free block that is large enough, cut to size in multiples of `GRANULE_BYTES`, and
    joins free neighbours: so does XLA's allocator, whose bins only find that block faster. Nothing moves, so there may
    be enough free bytes and no block for them. Host memory is virtual and only counted.

    Attributes:
        limit: bytes that there are.
        in_use, peak: bytes handed out, now and the most so far.
    """

    def __init__(self, limit: int, *, card: bool) -> None:
        self.limit = limit
        self.in_use = 0
        self.peak = 0
        self._card = card
        self._free = [Block(0, limit - limit % GRANULE_BYTES)]  # by address

    @property
    def largest_free(self) -> int | None:
        """Size of the largest block that can be taken; None where memory has no addresses."""
        return max((block.size for block in self._free), default=0) if self._card else None

    def take(self, nbytes: int) -> Block | None:
        """A block of at least that size, or None when there is none."""
        size = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES if self._card else nbytes
        block = Block(0, size)
        if not self._card:
            if self.in_use + size > self.limit:
                return None
        elif size:
            fitting = [(free.size, at) for at, free in enumerate(self._free) if free.size >= size]
            if not fitting:
                return None
            _, at = min(fitting)
            start, room = self._free[at]
            block = Block(start, size)
            self._free[at : at + 1] = [Block(start + size, room - size)] if room > size else []
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        return block

    def give(self, block: Block) -> None:
        """Take a block back that `take` gave."""
        self.in_use -= block.size
        if not self._card or not block.size:
            return
        at = bisect_left(self._free, block)
        start, end = block.start, block.start + block.size
        first, last = at, at
        if at and sum(self._free[at - 1]) == start:
            first, start = at - 1, self._free[at - 1].start
        if at < len(self._free) and self._free[at].start == end:
            last, end = at + 1, sum(self._free[at])
        self._free[first:last] = [Block(start, end - start)]

    def refusal(self, what: str, nbytes: int) -> str:
        """Why `take` found nothing for `what`."""
        free = self.limit - self.in_use
        text = f"{what} needs {nbytes} bytes, {free} of {self.limit} are free"
        largest = self.largest_free
        return text if largest is None or largest == free else f"{text}, {largest} of them in one block"
