"""A `Residency` that does what a test says, for the faces that show and steer it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from rsrv.serve.budget import resolve_budget
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.manager import Compacted, ModelResidency
from rsrv.serve.residency.snapshot import EVICT_REASONS, IdleModel, LedgerSnapshot, ModelState, State

SECONDS = 60


class ScriptedResidency:
    """Models are what `places` says; `error` is raised by what moves weights, which first waits for `gate`.

    Attributes:
        asked: what was asked for, in order.
        entered: set when something that moves weights has begun.
    """

    def __init__(self, **places: ModelResidency) -> None:
        self.mode = "externally_managed"
        self.on_demand = True
        self.places = places
        self.resident_bytes = 48
        self.releasing_bytes = 0
        self.arena = 1000
        self.counted: dict[str, ModelState] = {}
        self.error: BaseException | None = None
        self.asked: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def model(self, name: str) -> ModelResidency | None:
        return self.places.get(name)

    def snapshot(self) -> LedgerSnapshot | None:
        if not self.on_demand:
            return None
        pinned = sum(place.nbytes for place in self.places.values() if place.floor is Floor.DEVICE)
        return LedgerSnapshot(
            externally_managed=self.mode == "externally_managed",
            policy="lru",
            budget=resolve_budget(self.arena, pinned=pinned, max_scratch=100),
            resident_bytes=24,
            pending_bytes=0,
            evictable_bytes=16,
            uses=9,
            loads=3,
            load_seconds=0.5,
            evicts={**dict.fromkeys(EVICT_REASONS, 0), "room": 2},
            compactions=1,
            lru=(IdleModel("affine", 7.0),),
            models=self.counted,
            bytes_for_99_percent_hits=640,
        )

    def set_floor(self, name: str, floor: Floor) -> Floor:
        self._move(("floor", name, floor))
        on_device = floor is Floor.DEVICE
        self.places[name] = replace(
            self.places[name], floor=floor, device_resident=on_device, host_resident=floor is Floor.SYSTEM
        )
        return floor

    def compact(self, reload: Sequence[str] = ()) -> Compacted:
        self._move(("compact", *reload))
        return Compacted(len(reload), 24) if self.on_demand else Compacted(0, 0)

    def _move(self, what: object) -> None:
        self.asked.append(what)
        self.entered.set()
        assert self.gate.wait(SECONDS)
        if self.error is not None:
            raise self.error


def cold(nbytes: int = 24, floor: Floor = Floor.UNPINNED) -> ModelResidency:
    return ModelResidency(floor, False, False, nbytes)


def counted(name: str, **changes: object) -> ModelState:
    """What the ledger says of a model that nobody used yet."""
    state = ModelState(
        name=name,
        floor=Floor.UNPINNED,
        nbytes=24,
        state=State.COLD,
        reserved=False,
        pinned=False,
        loads=0,
        evicts=0,
        reload_seconds=None,
        requests_per_second=0.0,
        idle_seconds=None,
    )
    return state._replace(**changes)
