"""What `Residency` says of weights: where those of a model are, what a compaction did, and the budget in the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rsrv.serve.residency.floors import Floor

if TYPE_CHECKING:
    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.residency.snapshot import LedgerSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelResidency:
    """Where the weights of one model are.

    Attributes:
        floor: what they are never below.
        device_resident, host_resident: whether they are on the device, and whether a host copy is kept.
        nbytes: bytes that the budget counts for them.
        host_shared: that copy is in memory that other workers of the node use, too.
        pinned: by flag: not evicted, once they are on the device.
        idle_s: seconds for which nobody has used them; 0 = in use, None = they never were.
        host_bytes: of the copy in host memory.
        committed_bytes: on the device now, those that are about to be freed and those of others that they share
            included.
        releasing: they are to leave, and will once nothing uses them.
    """

    floor: Floor
    device_resident: bool
    host_resident: bool
    nbytes: int
    host_shared: bool = False
    pinned: bool = False
    idle_s: float | None = None
    host_bytes: int = 0
    committed_bytes: int = 0
    releasing: bool = False


@dataclass(frozen=True, slots=True)
class Compacted:
    """What `Residency.compact` did: models that it loaded again, and bytes of on-demand weights after it."""

    reloaded: int
    resident_bytes: int


def residency_of(weights: ModelWeights, now_ns: int, *, releasing: bool) -> ModelResidency:
    """Where `weights` are at `now_ns`."""
    # Both may go at any moment.
    host, placed, idle_ns = weights.host, weights.placed, weights.idle_ns(now_ns)
    return ModelResidency(
        floor=weights.floor,
        device_resident=weights.resident,
        host_resident=host is not None,
        nbytes=weights.footprint,
        host_shared=host is not None and host.shared,
        pinned=weights.pinned,
        idle_s=None if idle_ns is None else idle_ns / 1e9,
        host_bytes=0 if host is None else host.nbytes,
        committed_bytes=0 if placed is None else placed.nbytes,
        releasing=releasing,
    )


def tell_of_budget(snapshot: LedgerSnapshot) -> None:
    """Log what there is for weights, and warn of what it cannot hold (4.4)."""
    budget = snapshot.budget
    movable = [model for model in snapshot.models.values() if not model.reserved]
    if budget.over_commit:
        log.warning(
            "pinned weights exceed the pool pinned=%d pool=%d arena=%d hint=pin fewer models, or raise "
            "runtime.device_memory_bytes",
            budget.pinned,
            budget.weight_pool,
            budget.arena,
        )
    elif movable and not budget.on_demand:
        log.warning("no budget for weights that come and go: %d models load for every dispatch", len(movable))
    log.info(
        "weight budget resolved arena=%d scratch=%d pool=%d pinned=%d budget=%d eviction=%s",
        budget.arena,
        budget.max_scratch,
        budget.weight_pool,
        budget.pinned,
        budget.on_demand,
        snapshot.policy,
    )
