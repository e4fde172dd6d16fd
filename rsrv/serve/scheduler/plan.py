"""Which requests run together, and at which compiled size: pure functions over plain values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

Variant = tuple[int, ...]
"""Sizes of the variable input axes, in input order then axis order; ``()`` for a model with a single shape."""

ANY_BATCH = 0
"""Batch key of a single program without a size in its file name: it takes a request as it is."""


class Plannable(Protocol):
    """What planning has to know of a queued request."""

    @property
    def rows(self) -> int: ...

    @property
    def variant(self) -> Variant: ...


class Plan(NamedTuple):
    """The next dispatch of a model: the first `take` requests of its queue, run at `batch_key`.

    `full` says that no later arrival could make this batch larger.
    """

    batch_key: int
    take: int
    full: bool


def plan(
    queue: Iterable[Plannable],
    compiled: Mapping[Variant, Sequence[int]],
    *,
    coalescable: bool,
    cap: int | None = None,
) -> Plan | None:
    """Plan one dispatch from the front of `queue`; None when it is empty.

    The requests taken are a contiguous prefix of the queue, all of one variant, never split, and at least one. `cap`
    limits the rows that are merged, not the compiled size, so a single request above it runs alone. `compiled` maps
    each variant to its batch keys in ascending order. No more of the queue is read than fits the largest key.
    """
    items = iter(queue)
    head = next(items, None)
    if head is None:
        return None
    keys = compiled.get(head.variant)
    if not keys:
        return Plan(head.rows, 1, True)
    if not coalescable or keys[0] == ANY_BATCH:
        return Plan(ANY_BATCH if keys[0] == ANY_BATCH else fitting_key(keys, head.rows), 1, True)

    limit = keys[-1] if cap is None else min(cap, keys[-1])
    prefix, total = [head.rows], head.rows
    if total < limit:
        for item in items:
            if item.variant != head.variant:
                break
            prefix.append(item.rows)
            total += item.rows
            if total >= limit:
                break

    key = _filled_key(keys, min(total, limit))
    if key < head.rows:
        key = fitting_key(keys, head.rows)
    room, taken, take = min(key, limit), 0, 0
    for rows in prefix:
        if taken + rows > room:
            break
        taken += rows
        take += 1
    return Plan(key, max(take, 1), max(taken, head.rows) >= limit)


def fitting_key(keys: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `keys` that holds `rows`, or the largest when none does."""
    at = bisect_left(keys, rows)
    return keys[at] if at < len(keys) else keys[-1]


def _filled_key(keys: Sequence[int], rows: int) -> int:
    """The largest of the ascending `keys` that `rows` fill, or the smallest (to be padded) when they fill none."""
    return keys[max(bisect_right(keys, rows) - 1, 0)]
