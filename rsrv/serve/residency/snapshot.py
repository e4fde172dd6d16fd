"""What the ledger says to status, metrics and control: frozen values, taken at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from rsrv.serve.budget import Budget
from rsrv.serve.residency.floors import Floor

EvictReason = Literal["room", "budget", "oom", "floor", "unload", "trim", "compaction", "idle", "deactivate"]
"""Why weights left the device: to make room for another model's; because the budget shrank; to get out of an
out-of-memory; by a change of the floor; with their model; as an operator wants less to be used. No evictions in the
counters: to compact; because nobody used them; as an operator wants these to leave."""

EVICT_REASONS: tuple[EvictReason, ...] = ("room", "budget", "oom", "floor", "unload", "trim")
"""Those that are counted as evictions."""

Policy = Literal["lru", "cost"]


class State(Enum):
    """Where the weights of a model are, seen from the device."""

    COLD = "cold"
    LOADING = "loading"
    RESIDENT = "resident"


class ModelState(NamedTuple):
    """One model.

    Attributes:
        nbytes: its footprint on the device, tensors that it shares with others included.
        reserved: it is in the pinned reserve by its floor, once loaded; otherwise it is in the budget.
        pinned: pinned by flag, so never evicted, but in the budget.
        loads, evicts: how often it was loaded, pinned or not, and evicted (for one of `EVICT_REASONS`).
        reload_seconds: what a load of it takes, averaged over the last ones; None before the first.
        requests_per_second: batches that were prepared for it, averaged over the last minutes.
        idle_seconds: since it was used or loaded; None when it never was.
    """

    name: str
    floor: Floor
    nbytes: int
    state: State
    reserved: bool
    pinned: bool
    loads: int
    evicts: int
    reload_seconds: float | None
    requests_per_second: float
    idle_seconds: float | None

    @property
    def resident(self) -> bool:
        return self.state is State.RESIDENT


class IdleModel(NamedTuple):
    """An on-demand model on the device, and for how long nothing used it."""

    name: str
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """All numbers at one moment; bytes that several models share count once.

    Attributes:
        budget: arena, pinned reserve (`pinned`), scratch, pool, and the budget of on-demand weights (`on_demand`).
        resident_bytes: on-demand weights on the device, by the books: those of running loads are in it, as their place
            is taken, and victims are not, although their memory is freed only when the last batch that uses them ended.
        pending_bytes: what of `resident_bytes` has not arrived yet.
        evictable_bytes: what of `resident_bytes` evictions could free.
        uses: batches that were prepared for on-demand models; each found its weights there, a hit, or had to wait for
            one of the `loads`. One that is prepared again, to take up more rows, counts again.
        loads: finished loads, also those of pinned weights, of which no use is counted: over a time in which nothing
            is pinned, `uses` - `loads` are the hits.
        load_seconds: what those took together.
        evicts: evictions by reason; every reason of `EVICT_REASONS` is a key.
        compactions: how often the on-demand weights were freed to compact.
        lru: the on-demand models on the device, the one that is evicted first by `lru` at the front.
        models: every registered model, by name.
        bytes_for_99_percent_hits: the budget with which 99 % of the repeated uses would have found their weights
            there (a first use never does), by the last uses; None when nothing was used twice.
        idle_reclaims: how often weights were freed because nobody had used them for long.
    """

    externally_managed: bool
    policy: Policy
    budget: Budget
    resident_bytes: int
    pending_bytes: int
    evictable_bytes: int
    uses: int
    loads: int
    load_seconds: float
    evicts: Mapping[EvictReason, int]
    compactions: int
    lru: tuple[IdleModel, ...]
    models: Mapping[str, ModelState]
    bytes_for_99_percent_hits: int | None
    idle_reclaims: int = 0

    @property
    def pinned_bytes(self) -> int:
        """The pinned reserve."""
        return self.budget.pinned

    @property
    def max_bytes(self) -> int:
        """The budget of on-demand weights."""
        return self.budget.on_demand

    @property
    def evictions(self) -> int:
        return sum(self.evicts.values())

    @property
    def lru_age_seconds(self) -> float | None:
        """For how long the least recently used model was not used; None when the device holds none on demand."""
        return self.lru[0].idle_seconds if self.lru else None
