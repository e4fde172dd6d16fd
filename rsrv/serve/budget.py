"""How much device memory is there for weights: the arithmetic of worker spec §4.4, as functions over plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Placement = Literal["pinned", "on demand", "too large"]

GRANULE_BYTES = 256
"""A card's allocator hands out multiples of this."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What an arena is used for, in bytes.

    Attributes:
        arena: all that the allocator may hand out.
        max_scratch: kept free for the inputs, temporaries and outputs of one execution.
        weight_pool: what is left for weights, pinned or not.
        pinned: weights that are never evicted.
        on_demand: what is left for the others, which come and go.
    """

    arena: int
    max_scratch: int
    weight_pool: int
    pinned: int
    on_demand: int

    @property
    def over_commit(self) -> bool:
        """More is pinned than the pool holds."""
        return self.pinned > self.weight_pool


def resolve_budget(
    arena: int, *, pinned: int = 0, max_scratch: int = 0, fraction: float = 1.0, wiggle: float = 0.1
) -> Budget:
    """`fraction` of the arena at most is for weights, `wiggle` of it is slack; 0 where device memory is host memory.

    ::

        scratch_ceiling = floor((1 - wiggle) * arena)
        weight_pool     = max(0, min(floor(fraction * arena), scratch_ceiling - max_scratch))
        on_demand       = clamp(weight_pool - pinned, 0, weight_pool)
    """
    ceiling = math.floor((1 - wiggle) * arena)
    pool = max(0, min(math.floor(fraction * arena), ceiling - max_scratch))
    return Budget(arena, max_scratch, pool, pinned, min(max(pool - pinned, 0), pool))


def place(weights: Mapping[str, int], pool: int) -> dict[str, Placement]:
    """Which models can be pinned in a pool of that many bytes, and which have to come and go in what is left.

    All are pinned when all fit. Otherwise the smallest are, as long as the largest of the others fits beside them, so
    that every model can run; a model that is larger than the pool cannot.
    """
    placed: dict[str, Placement] = {}
    smallest_first = sorted(weights, key=lambda name: (weights[name], name))
    fitting = [name for name in smallest_first if weights[name] <= pool]
    placed.update(dict.fromkeys(smallest_first[len(fitting) :], "too large"))
    if sum(weights[name] for name in fitting) <= pool:
        return {**placed, **dict.fromkeys(fitting, "pinned")}
    largest, used = weights[fitting[-1]], 0
    for name in fitting[:-1]:
        if used + weights[name] + largest > pool:
            break
        used += weights[name]
        placed[name] = "pinned"
    return {**dict.fromkeys(fitting, "on demand"), **placed}
