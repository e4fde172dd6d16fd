"""Which requests run together, and at which compiled size: pure functions over plain values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

Variant = tuple[int, ...]
"""Sizes of the variable input axes, in input order then axis order; ``()`` for a model with a single shape."""

ANY_BATCH = 0
"""Batch key of a single program without a size in its file name: it takes a request as it is."""


class Plannable(Protocol):
    """What planning has to know of a queued request; `overtaken` is how many later ones have passed it."""

    @property
    def rows(self) -> int: ...

    @property
    def variant(self) -> Variant: ...

    @property
    def overtaken(self) -> int: ...


T = TypeVar("T", bound=Plannable)


class KeyCosts(Protocol):
    """Measured costs, by which batch sizes are compared; see `costs.Costs`."""

    def first(self, variant: Variant, keys: Sequence[int], rows: int, cap: int | None) -> int: ...

    def seconds(self, variant: Variant, batch_key: int) -> float | None: ...

    def cheaper(self, variant: Variant, keys: Sequence[int], rows: int, batch_key: int) -> int: ...


class Plan(NamedTuple):
    """The next dispatch of a model: `take` requests of its queue, run at `batch_key`.

    They are the first ones, or those at the positions `picks` where requests of another variant are passed. `full` says
    that no later arrival could make this batch larger.
    """

    batch_key: int
    take: int
    full: bool
    picks: tuple[int, ...] = ()


def plan(
    queue: Iterable[T],
    compiled: Mapping[Variant, Sequence[int]],
    *,
    coalescable: bool,
    cap: int | None = None,
    overtakes: int = 0,
    costs: KeyCosts | None = None,
    in_time: Callable[[int, Sequence[T]], int] | None = None,
) -> Plan | None:
    """Plan one dispatch from the front of `queue`; None when it is empty.

    The requests taken are of one variant, in their order, never split, and at least one: the leading run of the queue,
    and behind it those that may pass requests of other variants, each of which is passed `overtakes` times at most.
    `cap` limits the rows that are merged, not the compiled size, so a single request above it runs alone. `compiled`
    maps each variant to its batch keys in ascending order. No more of the queue is read than fits the largest key.

    The batch key is the largest that the rows fill, or the smallest one, padded. With `costs` it is the one that makes
    all of them cheapest. With `in_time(batch_key, requests)` too, which says how many of them end before their
    deadlines, and when not all would: the one with most of these per second. (Not the one that saves the most urgent:
    under overload every first request is urgent, and batches of one would be all that is ever run.)
    """
    items = iter(queue)
    head = next(items, None)
    if head is None:
        return None
    variant = head.variant
    keys = compiled.get(variant)
    if not keys:
        return Plan(head.rows, 1, True)
    if not coalescable or keys[0] == ANY_BATCH:
        return Plan(ANY_BATCH if keys[0] == ANY_BATCH else fitting_key(keys, head.rows), 1, True)

    limit = keys[-1] if cap is None else min(cap, keys[-1])
    total = head.rows
    candidates, positions = [head], [0]
    if total < limit:
        for position, item in _followers(items, variant, overtakes):
            candidates.append(item)
            positions.append(position)
            total += item.rows
            if total >= limit:
                break

    holding = keys if head.rows <= keys[0] else keys[bisect_left(keys, head.rows) :] or keys[-1:]
    rows = min(total, limit)
    key = filled_key(holding, rows) if costs is None else costs.first(variant, holding, rows, cap)
    taken, take = _fill(candidates, min(key, limit))
    if in_time is not None and costs is not None and in_time(key, candidates[:take]) < take:
        key, most = fitting_key(keys, head.rows), 0.0
        for option in holding:
            _, n = _fill(candidates, min(option, limit))
            seconds = costs.seconds(variant, option)
            per_second = in_time(option, candidates[:n]) / seconds if seconds else 0.0
            if per_second > most:
                key, most = option, per_second
        taken, take = _fill(candidates, min(key, limit))
    if costs is not None and taken < key:
        key = costs.cheaper(variant, holding, taken, key)
    picks = () if positions[take - 1] == take - 1 else tuple(positions[:take])
    return Plan(key, take, total >= limit, picks)


def plan_single_rows(
    n: int, variant: Variant, keys: Sequence[int], *, cap: int | None = None, costs: KeyCosts | None = None
) -> Plan:
    """`plan` of `n` requests of one row and one variant each, which needs no look at any of them; `n` is not 0."""
    limit = keys[-1] if cap is None else min(cap, keys[-1])
    rows = min(n, limit)
    key = filled_key(keys, rows) if costs is None else costs.first(variant, keys, rows, cap)
    take = min(rows, key)
    if costs is not None and take < key:
        key = costs.cheaper(variant, keys, take, key)
    return Plan(key, take, n >= limit)


def _followers(items: Iterator[T], variant: Variant, overtakes: int) -> Iterator[tuple[int, T]]:
    """Position and value of the requests behind the first that may run with it, of the given variant."""
    # How many more may pass every request that was passed so far.
    passes: int | None = None
    for position, item in enumerate(items, 1):
        if item.variant == variant:
            if passes is not None:
                passes -= 1
            yield position, item
        else:
            left = overtakes - item.overtaken
            passes = left if passes is None else min(passes, left)
        if passes is not None and passes <= 0:
            return


def _fill(candidates: Sequence[Plannable], room: int) -> tuple[int, int]:
    """Rows and number of the leading candidates that fit into `room`; the first one always does."""
    taken = take = 0
    for item in candidates:
        rows = item.rows
        if taken + rows > room:
            break
        taken += rows
        take += 1
    return (taken, take) if take else (candidates[0].rows, 1)


def fitting_key(keys: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `keys` that holds `rows`, or the largest when none does."""
    at = bisect_left(keys, rows)
    return keys[at] if at < len(keys) else keys[-1]


def filled_key(keys: Sequence[int], rows: int) -> int:
    """The largest of the ascending `keys` that `rows` fill, or the smallest (to be padded) when they fill none."""
    return keys[max(bisect_right(keys, rows) - 1, 0)]
