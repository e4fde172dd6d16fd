"""Whether workers compact their device memory after a repack, and what each of them loads again (spec 2.6.9)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from rsrv.gateway.scheduling.placement import Assignment


class Compaction(NamedTuple):
    """What follows a repack: repacks since the last compaction, and worker → models to load again; empty = none now."""

    since: int
    work: Mapping[str, list[str]]


def after_repack(
    mode: str, interval: int, since: int, changed: Collection[str], reachable: Collection[str], assignment: Assignment
) -> Compaction:
    """Every `interval` repacks, at the first of them that changed a worker, all workers that it changed compact.

    ``off`` or an interval of 0 counts nothing. ``eager`` frees what may be freed, ``scheduled`` also loads the models
    that are placed there now. `reachable` are the workers that answer: a call to another one would free nothing.
    """
    if mode == "off" or interval == 0:
        return Compaction(since, {})
    since += 1
    workers = sorted(set(changed) & set(reachable))
    if since < interval or not workers:
        return Compaction(since, {})
    if mode == "eager":
        return Compaction(0, {worker: [] for worker in workers})
    return Compaction(0, {worker: _placed_on(worker, assignment) for worker in workers})


def _placed_on(worker: str, assignment: Assignment) -> list[str]:
    return sorted(model for model, homes in assignment.items() if any(url == worker for url, _ in homes))
