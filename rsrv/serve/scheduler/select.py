"""Which model goes next: one pass over the models that have work, for each discipline. Pure; ties are exact.

The passes are plain loops: they run for every dispatch, and with 200 models a key function would double their time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv.serve.scheduler.queue import ModelQueue
    from rsrv.serve.scheduler.shares import Shares

_NEVER = 1 << 63


def oldest(ready: Iterable[ModelQueue]) -> ModelQueue:
    """``fifo``: the model whose first request is the oldest; ties go to the smaller name."""
    best: ModelQueue | None = None
    first = _NEVER
    for queue in ready:
        at = queue.tickets[0].enqueued_ns
        if at < first or (at == first and best is not None and _older(queue, best)):
            best, first = queue, at
    return _found(best)


def most_urgent(ready: Iterable[ModelQueue]) -> ModelQueue:
    """``edf``: the model with the earliest deadline anywhere in its queue, if any has one; ties as in `oldest`."""
    best: ModelQueue | None = None
    first = _NEVER
    for queue in ready:
        at = queue.urgent_ns
        if at and (at < first or (at == first and best is not None and _older(queue, best))):
            best, first = queue, at
    return oldest(ready) if best is None else best


def most_owed(ready: Iterable[ModelQueue], shares: Shares, cap: float, *, always_divide: bool = False) -> ModelQueue:
    """``fair``: the model with the highest `shares.priority` of its next batch; ties as in `oldest`."""
    per_weight = 1.0 / shares.weight if shares.weight > 0 else 0.0
    per_used = 1.0 / shares.used if shares.used > 0 else 0.0
    best: ModelQueue | None = None
    highest = -float("inf")
    # `shares.priority`, written out for the same reason.
    for queue in ready:
        account = queue.account
        deficit = account.weight * per_weight - account.used * per_used
        if deficit >= 0:
            owed = (deficit if deficit < cap else cap) / queue.price
        elif always_divide:
            owed = (deficit if deficit > -cap else -cap) / queue.price
        else:
            owed = (deficit if deficit > -cap else -cap) * queue.price
        if owed > highest or (owed == highest and best is not None and _older(queue, best)):
            best, highest = queue, owed
    return _found(best)


def _older(queue: ModelQueue, other: ModelQueue) -> bool:
    at, other_at = queue.tickets[0].enqueued_ns, other.tickets[0].enqueued_ns
    return at < other_at or (at == other_at and queue.model.name < other.model.name)


def _found(best: ModelQueue | None) -> ModelQueue:
    if best is None:
        raise ValueError("there is no model with work to choose from")
    return best
