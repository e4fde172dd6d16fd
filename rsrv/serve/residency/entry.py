"""What the ledger keeps about one model."""

from __future__ import annotations

from dataclasses import dataclass

from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.holdings import Footprint
from rsrv.serve.residency.snapshot import ModelState, State

_LEARNING = 0.3
"""Weight of the latest load in the average of a model's load times."""


@dataclass(slots=True, eq=False)
class Entry:
    """One model.

    Attributes:
        reserved: the floor puts it into the pinned reserve of the device.
        flagged: pinned by flag.
        uses: the decayed count of its uses, inflated: see `Rates`.
        reload_seconds: the average of its load times, None before the first.
    """

    name: str
    footprint: Footprint
    floor: Floor
    reserved: bool
    scratch_bytes: int
    state: State = State.COLD
    flagged: bool = False
    loads: int = 0
    evicts: int = 0
    last_used_ns: int | None = None
    uses: float = 0.0
    reload_seconds: float | None = None

    @property
    def held(self) -> bool:
        """Its bytes are taken."""
        return self.state is not State.COLD

    def loaded(self, seconds: float, now_ns: int) -> None:
        known = self.reload_seconds
        self.reload_seconds = seconds if known is None else known + _LEARNING * (seconds - known)
        self.loads += 1
        self.last_used_ns = now_ns
        self.state = State.RESIDENT

    def succeed(self, old: Entry) -> None:
        """This is the next version of `old`: pin flag and use go on here, and `old` is one that nobody has used."""
        self.flagged, old.flagged = old.flagged, False
        self.loads, old.loads = self.loads + old.loads, 0
        self.evicts, old.evicts = self.evicts + old.evicts, 0
        self.uses, old.uses = self.uses + old.uses, 0.0
        times = [ns for ns in (self.last_used_ns, old.last_used_ns) if ns is not None]
        self.last_used_ns = max(times, default=None)
        if self.reload_seconds is None:
            self.reload_seconds = old.reload_seconds

    def idle_seconds(self, now_ns: int) -> float | None:
        return None if self.last_used_ns is None else max(now_ns - self.last_used_ns, 0) / 1e9

    def at(self, now_ns: int, per_second: float) -> ModelState:
        """What is known at `now_ns`; `per_second` makes a rate of `uses`."""
        return ModelState(
            name=self.name,
            floor=self.floor,
            nbytes=self.footprint.nbytes,
            state=self.state,
            reserved=self.reserved,
            pinned=self.flagged,
            loads=self.loads,
            evicts=self.evicts,
            reload_seconds=self.reload_seconds,
            requests_per_second=self.uses * per_second,
            idle_seconds=self.idle_seconds(now_ns),
        )
