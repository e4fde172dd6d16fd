"""How large a budget would have to be: the miss-ratio curve of an LRU cache of any size, from one list of ghosts.

Every model that was ever used has a place in one list by recency, on the device or not. The bytes of all that was used
since a model's last use, its own included, are its reuse distance: an LRU cache finds the model exactly when it holds
that many (Mattson et al., Evaluation techniques for storage hierarchies, 1970; exact for models of one size, close for
others). Tensors that models share are one item of the list, so they count once.
"""

from __future__ import annotations

from collections.abc import Hashable

_HALVE_AFTER = 50_000
"""Repeated uses after which what was counted so far weighs half, so that the curve follows the traffic."""
_FINENESS = 6
"""Distances that agree in so many leading bits are counted together: within 3 %."""
_BLOCK = 64
"""Moments that are summed up in one number."""


class _Item:
    """Bytes that are used together, and the moment of their last use; 0 = none yet."""

    __slots__ = ("key", "moment", "nbytes", "shared", "shared_key", "users")

    def __init__(self, key: Hashable, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.moment = 0
        self.shared_key: Hashable = None
        self.shared: _Item | None = None
        self.users = 0


class Ghosts:
    """The list, and how often each reuse distance was seen.

    Bytes lie at the moment of their last use, with their sums over blocks of moments: a use needs no walk over the
    models between, and the two sums that it takes run in C.
    """

    def __init__(self) -> None:
        self._items: dict[Hashable, _Item] = {}
        self._shared: dict[Hashable, _Item] = {}
        self._bytes = [0] * 4 * _BLOCK
        self._blocks = [0] * 4
        self._moment = 0
        self._counts: dict[int, float] = {}
        self._longest: dict[int, int] = {}
        self._counted = 0
        self._last: _Item | None = None
        self.repeats = 0
        """Uses of the model that was used last, not counted yet; whoever uses it again adds one here."""

    def use(self, key: Hashable, private: int, shared_key: Hashable = None, shared: int = 0) -> None:
        """`key` was used: `private` bytes of its own, and `shared` bytes that all with the same `shared_key` share."""
        self._settle()
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(key, private)
        if item.moment:
            self._count(self._since(item.moment), 1)
        if shared_key is not item.shared_key:
            self._share(item, shared_key, shared)
        # Its own bytes first: whatever it shares is then never older than it.
        self._place(item, private)
        if item.shared is not None:
            self._place(item.shared, shared)
        self._last = item

    def forget(self, key: Hashable) -> None:
        """`key` will not be used again."""
        item = self._items.get(key)
        if item is None:
            return
        self._settle()
        del self._items[key]
        self._share(item, None, 0)
        self._unplace(item)
        if self._last is item:
            self._last = None

    def succeed(self, new: Hashable, old: Hashable) -> None:
        """What was `old` so far is `new` from now on."""
        item = self._items.pop(old, None)
        if item is not None:
            self.forget(new)
            item.key = new
            self._items[new] = item

    def bytes_for(self, fraction: float) -> int | None:
        """Bytes with which that fraction of the repeated uses would have hit; None when there were none."""
        self._settle()
        wanted, nbytes = fraction * sum(self._counts.values()), None
        for bucket in sorted(self._counts):
            nbytes = self._longest[bucket]
            wanted -= self._counts[bucket]
            if wanted <= 0:
                break
        return nbytes

    def _settle(self) -> None:
        repeats, self.repeats = self.repeats, 0
        if repeats and self._last is not None:
            self._count(self._since(self._last.moment), repeats)

    def _count(self, distance: int, times: int) -> None:
        shift = max(distance.bit_length() - _FINENESS, 0)
        bucket = (shift << _FINENESS) + (distance >> shift)
        self._counts[bucket] = self._counts.get(bucket, 0.0) + times
        if distance > self._longest.get(bucket, -1):
            self._longest[bucket] = distance
        self._counted += times
        if self._counted >= _HALVE_AFTER:
            self._counted = 0
            for each in self._counts:
                self._counts[each] /= 2

    def _share(self, item: _Item, key: Hashable, nbytes: int) -> None:
        """Make `key` what `item` shares; what nobody shares any more is dropped."""
        left, shared = item.shared, None
        if key is not None:
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Item(key, nbytes)
            shared.users += 1
        item.shared, item.shared_key = shared, key
        if left is not None:
            left.users -= 1
            if not left.users:
                self._unplace(left)
                del self._shared[left.key]

    # --- moments ------------------------------------------------------------------------------------------------------

    def _since(self, moment: int) -> int:
        """Bytes that were used at `moment` and later."""
        block = moment // _BLOCK + 1
        return sum(self._bytes[moment : block * _BLOCK]) + sum(self._blocks[block:])

    def _place(self, item: _Item, nbytes: int) -> None:
        """Move to the present."""
        self._unplace(item)
        item.nbytes = nbytes
        self._moment += 1
        if self._moment == len(self._bytes):
            self._renumber()
        item.moment = self._moment
        self._add(item.moment, nbytes)

    def _unplace(self, item: _Item) -> None:
        if item.moment:
            self._add(item.moment, -item.nbytes)
            item.moment = 0

    def _add(self, moment: int, nbytes: int) -> None:
        self._bytes[moment] += nbytes
        self._blocks[moment // _BLOCK] += nbytes

    def _renumber(self) -> None:
        """Take up the moments that nothing is at any more; with room for some uses of every item."""
        placed = [item for item in (*self._items.values(), *self._shared.values()) if item.moment]
        placed.sort(key=lambda item: item.moment)
        blocks = 4 + 4 * len(placed) // _BLOCK
        self._bytes, self._blocks = [0] * blocks * _BLOCK, [0] * blocks
        for moment, item in enumerate(placed, 1):
            item.moment = moment
            self._add(moment, item.nbytes)
        self._moment = len(placed) + 1
