"""Which repacks are followed by a compaction, of which workers, and what they load again."""

from __future__ import annotations

import pytest
from support.packing_fleet import NEVER, PackedFleet

from rsrv.gateway.scheduling.compaction import after_repack

ASSIGNMENT = {"a": (("w1", 1.0),), "b": (("w1", 0.5), ("w2", 0.5)), "c": (("w2", 1.0),)}
MOVE, NONE = ["w0", "w1"], []


def test_every_second_repack_compacts_at_the_first_that_changed_a_worker() -> None:
    since, found = 0, []
    for changed in (MOVE, MOVE, NONE, NONE, MOVE):
        since, work = after_repack("eager", 2, since, changed, ["w0", "w1", "w2"], ASSIGNMENT)
        found.append((since, work))
    fired = {"w0": [], "w1": []}
    assert found == [(1, {}), (0, fired), (1, {}), (2, {}), (0, fired)]


@pytest.mark.parametrize(("mode", "interval"), [("off", 1), ("eager", 0), ("scheduled", 0)])
def test_off_and_an_interval_of_zero_count_nothing(mode: str, interval: int) -> None:
    assert after_repack(mode, interval, 0, MOVE, ["w0", "w1"], ASSIGNMENT) == (0, {})


def test_scheduled_loads_what_is_placed_there_now() -> None:
    _, work = after_repack("scheduled", 1, 0, MOVE, ["w0", "w1", "w2"], ASSIGNMENT)
    assert work == {"w0": [], "w1": ["a", "b"]}


def test_a_worker_that_does_not_answer_is_not_called() -> None:
    assert after_repack("eager", 1, 0, ["w0", "w1"], ["w1"], ASSIGNMENT) == (0, {"w1": []})
    assert after_repack("eager", 1, 0, ["w0"], ["w1"], ASSIGNMENT) == (1, {})


def test_a_repack_that_moves_models_hands_the_changed_workers_over() -> None:
    fleet = PackedFleet(3, "ab", compaction_mode="scheduled", **NEVER).start()
    assert fleet.compactions == []
    lost = fleet.homes("a")[0]
    fleet.down = {lost}
    fleet.tick()
    (home,) = fleet.homes("a")
    placed = sorted(model for model in "ab" if fleet.homes(model) == (home,))
    assert fleet.compactions == [{home: placed}]
    assert fleet.packing.status().since_compaction == 0
    fleet.packing.request_repack()
    fleet.tick()
    assert len(fleet.compactions) == 1
    assert fleet.packing.status().since_compaction == 1


def test_a_compaction_that_is_switched_off_live_ends_at_once() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    fleet.packing.change(compaction_mode="off")
    fleet.down = {fleet.homes("a")[0]}
    fleet.tick()
    assert fleet.triggers["membership"] == 1
    assert (fleet.compactions, fleet.packing.status().since_compaction) == ([], 0)
