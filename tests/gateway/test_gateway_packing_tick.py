"""When models are placed anew: device time, operators, workers and models that come and go. A fake clock turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing_fleet import AT_ONCE, NEVER, PackedFleet


def test_the_start_places_the_models_and_leaves_everything_armed() -> None:
    fleet = PackedFleet(2, "ab", first_rebalance_compute_seconds=10, rebalance_compute_seconds=100)
    status = fleet.packing.status()
    assert (status.tick, status.repack, status.repack_count) == (None, None, 0)
    fleet.start()
    status = fleet.packing.status()
    assert fleet.triggers == {"startup": 1}
    assert status.repack is not None
    assert status.tick is not None
    assert (status.repack.trigger, status.repack.wall, status.repack.compute) == ("startup", 0.0, 0.0)
    assert (status.tick.threshold, status.tick.first_done, status.tick.accumulated) == (10.0, False, 0.0)
    assert fleet.compactions == []


def test_a_budget_that_is_not_used_up_repacks_nothing() -> None:
    fleet = PackedFleet(2, "ab", **NEVER).start()
    for _ in range(5):
        fleet.workers["w0"].serve("a", 3.0)
        fleet.tick()
    assert fleet.triggers == {"startup": 1}
    assert fleet.accumulated == pytest.approx(15.0)


def test_a_budget_that_is_used_up_repacks_and_counts_from_zero() -> None:
    fleet = PackedFleet(2, "ab", **AT_ONCE).start()
    fleet.workers["w0"].serve("a", 3.0)
    fleet.tick()
    assert fleet.triggers == {"startup": 1, "compute": 1}
    assert fleet.accumulated == 0.0
    repack = fleet.packing.status().repack
    assert repack is not None
    assert (repack.compute, repack.wall) == (3.0, 10.0)
    fleet.tick()
    assert fleet.triggers["compute"] == 1


def test_the_first_budget_is_used_once() -> None:
    fleet = PackedFleet(1, "a", first_rebalance_compute_seconds=10, rebalance_compute_seconds=100).start()
    worker = fleet.workers["w0"]
    worker.serve("a", 9.0)
    fleet.tick()
    assert "compute" not in fleet.triggers
    worker.serve("a", 1.0)
    fleet.tick()
    tick = fleet.packing.status().tick
    assert tick is not None
    assert (fleet.triggers["compute"], tick.first_done, tick.threshold) == (1, True, 100.0)
    worker.serve("a", 50.0)
    fleet.tick()
    assert fleet.triggers["compute"] == 1
    worker.serve("a", 50.0)
    fleet.tick()
    assert fleet.triggers["compute"] == 2


def test_no_first_budget_is_the_steady_one() -> None:
    fleet = PackedFleet(1, "a", first_rebalance_compute_seconds=0, rebalance_compute_seconds=100).start()
    tick = fleet.packing.status().tick
    assert tick is not None
    assert tick.threshold == 100.0


def test_start_and_operators_leave_the_first_budget() -> None:
    fleet = PackedFleet(1, "a", first_rebalance_compute_seconds=10, rebalance_compute_seconds=100).start()
    fleet.workers["w0"].serve("a", 50.0)
    fleet.packing.request_repack()
    fleet.tick()
    tick = fleet.packing.status().tick
    assert tick is not None
    assert fleet.triggers == {"startup": 1, "operator": 1}
    assert (tick.first_done, tick.threshold, tick.accumulated) == (False, 10.0, 0.0)


def test_requests_between_two_ticks_share_one_repack() -> None:
    fleet = PackedFleet(1, "a", **NEVER).start()
    assert [fleet.packing.request_repack() for _ in range(3)] == [1, 2, 3]
    assert (fleet.woken, fleet.packing.completed) == (3, 0)
    fleet.tick()
    assert (fleet.packing.completed, fleet.triggers["operator"]) == (3, 1)
    fleet.tick()
    assert fleet.triggers["operator"] == 1
    assert fleet.packing.request_repack() == 4
    assert fleet.packing.status().completed == 3


def test_a_request_that_finds_no_worker_waits_for_one() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    fleet.down = {"w0", "w1"}
    before = fleet.homes("a")
    fleet.packing.request_repack()
    fleet.tick()
    assert (fleet.packing.completed, fleet.homes("a")) == (0, before)
    fleet.down = set()
    fleet.tick()
    assert fleet.packing.completed == 1


def test_a_setting_made_before_a_request_is_part_of_its_repack() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    assert len(fleet.homes("a")) == 1
    fleet.packing.change(default_replicas="all")
    assert len(fleet.homes("a")) == 1
    fleet.packing.request_repack()
    fleet.tick()
    assert fleet.homes("a") == ("w0", "w1")


# --- workers and models that come and go --------------------------------------------------------------------------


def test_a_worker_that_goes_takes_its_placements_with_it_at_the_next_tick() -> None:
    fleet = PackedFleet(3, "abc", **NEVER).start()
    assert {fleet.homes(model) for model in "abc"} == {("w0",), ("w1",), ("w2",)} or fleet.homes("a") == ("w0",)
    lost = next(model for model in "abc" if fleet.homes(model) == ("w0",))
    fleet.down = {"w0"}
    fleet.tick()
    assert fleet.triggers == {"startup": 1, "membership": 1}
    assert fleet.homes(lost)[0] in ("w1", "w2")
    repack = fleet.packing.status().repack
    assert repack is not None
    assert "w0" in repack.changed
    assert lost in repack.moved
    assert repack.polled == ("w1", "w2")


def test_changes_of_workers_and_models_repack_at_once_three_times_and_then_once_in_thirty_seconds() -> None:
    fleet = PackedFleet(3, "a", **NEVER).start()
    for number, down in enumerate(({"w2"}, set(), {"w1"}), start=1):
        fleet.down = down
        fleet.tick(0)
        assert fleet.triggers["membership"] == number
    fleet.down = set()
    fleet.tick(29)
    assert fleet.triggers["membership"] == 3
    fleet.tick(1)
    assert fleet.triggers["membership"] == 4
    for worker in fleet.workers.values():
        worker.load("b")
    fleet.tick(29)
    assert "models" not in fleet.triggers
    fleet.tick(1)
    assert fleet.triggers == {"startup": 1, "membership": 4, "models": 1}
    assert len(fleet.homes("b")) == 1
    fleet.tick(1000)
    for number, name in enumerate("cde", start=2):  # what was not used for long is there again, but no more than that
        fleet.workers["w0"].load(name)
        fleet.tick(0)
        assert fleet.triggers["models"] == number
    fleet.workers["w0"].load("f")
    fleet.tick(0)
    assert fleet.triggers["models"] == 4


def test_a_worker_that_is_back_before_its_turn_changes_nothing() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    for down in ({"w1"}, set(), {"w1"}):
        fleet.down = down
        fleet.tick(0)
    assert fleet.triggers["membership"] == 3
    fleet.down = set()
    fleet.tick(5)
    fleet.down = {"w1"}
    fleet.tick(30)
    assert fleet.triggers["membership"] == 3


def test_a_model_that_vanishes_loses_its_place_and_comes_back_cold() -> None:
    fleet = PackedFleet(2, "ab", **NEVER).start()
    for worker in fleet.workers.values():
        worker.unload("b")
    fleet.tick()
    assert fleet.triggers["models"] == 1
    repack = fleet.packing.status().repack
    assert repack is not None
    assert (set(repack.assignment), repack.moved) == ({"a"}, ())
    assert len(repack.changed) == 1
    assert any(label[0] == "b" for label in fleet.packing.status().retired)
    for worker in fleet.workers.values():
        worker.load("b")
    fleet.tick(30)
    assert (fleet.triggers["models"], len(fleet.homes("b"))) == (2, 1)
    assert fleet.packing.status().repack.changed == ()  # type: ignore[union-attr]


def test_a_model_that_one_more_worker_has_is_placed_anew() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    fleet.workers["w0"].load("b")
    fleet.tick()
    assert fleet.homes("b") == ("w0",)
    assert next(row.drifted for row in fleet.packing.status().models if row.name == "b")
    fleet.workers["w1"].load("b")
    fleet.tick(30)
    assert fleet.triggers["models"] == 2
    assert not next(row.drifted for row in fleet.packing.status().models if row.name == "b")


def test_a_worker_without_models_joins_with_its_first_one() -> None:
    fleet = PackedFleet(2, "ab", **NEVER)
    fleet.workers["w1"].mem = {}
    fleet.start()
    assert {fleet.homes("a"), fleet.homes("b")} == {("w0",)}
    assert not fleet.packing.status().repack.drifted  # type: ignore[union-attr]
    for model in "ab":
        fleet.workers["w1"].load(model)
    fleet.tick()
    assert fleet.triggers["membership"] == 1
    assert fleet.packing.status().repack.polled == ("w0", "w1")  # type: ignore[union-attr]


# --- polls that are missed ----------------------------------------------------------------------------------------


def test_a_missed_poll_is_neither_a_restart_nor_a_burst_nor_a_departure() -> None:
    fleet = PackedFleet(2, "a", **NEVER)
    fleet.workers["w0"].serve("a", 1000.0, 100)
    fleet.workers["w1"].serve("a", 1000.0, 100)
    fleet.start()
    fleet.workers["w0"].serve("a", 2.0, 2)
    fleet.workers["w1"].serve("a", 5.0, 5)
    fleet.tick(missing=["w0"])
    assert fleet.accumulated == pytest.approx(5.0)
    fleet.tick(missing=["w0"])
    fleet.tick(missing=["w0"])
    assert fleet.accumulated == pytest.approx(5.0)
    fleet.tick()
    assert fleet.accumulated == pytest.approx(7.0)
    assert fleet.triggers == {"startup": 1}
    assert fleet.packing.status().repack.costs["a"] == 10.0  # type: ignore[union-attr]


def test_a_worker_that_misses_four_polls_is_placed_upon_no_longer() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    for _ in range(3):
        fleet.tick(missing=["w0"])
    assert fleet.triggers == {"startup": 1}
    fleet.tick(missing=["w0"])
    assert fleet.triggers["membership"] == 1
    assert fleet.homes("a") == ("w1",)


def test_a_round_in_which_nobody_answers_changes_nothing() -> None:
    fleet = PackedFleet(2, "a", **AT_ONCE).start()
    before = fleet.packing.status()
    for _ in range(6):
        fleet.tick(missing=["w0", "w1"])
    after = fleet.packing.status()
    assert (after.repack, after.models) == (before.repack, before.models)
    assert after.tick is not None
    assert after.tick.ready == ("w0", "w1")


@pytest.mark.parametrize("incarnation", ["a", "b"])
def test_a_restart_counts_no_device_time_backwards(incarnation: str) -> None:
    fleet = PackedFleet(2, "a", **NEVER)
    fleet.workers["w0"].serve("a", 100.0, 10)
    fleet.start()
    fleet.workers["w0"].restart(incarnation)
    fleet.workers["w1"].serve("a", 4.0)
    fleet.tick()
    assert fleet.accumulated == pytest.approx(4.0)
    fleet.workers["w0"].serve("a", 3.0)
    fleet.tick()
    assert fleet.accumulated == pytest.approx(7.0)
    assert fleet.triggers == {"startup": 1}


@pytest.mark.parametrize("compute", [math.inf, math.nan, 1e308, -1.0])
def test_counters_that_no_worker_can_have_count_for_nothing(compute: float) -> None:
    fleet = PackedFleet(2, "a", **AT_ONCE).start()
    for worker in fleet.workers.values():
        worker.used["a"] = (compute, 10, 10)
    fleet.arrive("a", 5)
    fleet.tick()
    fleet.packing.request_repack()
    fleet.tick()
    assert fleet.accumulated == 0.0
    assert fleet.packing.status().repack.costs == {}  # type: ignore[union-attr]
    choice = fleet.packing.select("a", 3, fleet.ready, ())
    assert choice is not None
    assert fleet.packing.inflight_work() == ("compute", {choice.urls[0]: 3.0})


def test_a_worker_that_joins_brings_none_of_its_past_into_the_budget() -> None:
    fleet = PackedFleet(2, "a", first_rebalance_compute_seconds=10, rebalance_compute_seconds=10)
    fleet.workers["w1"].serve("a", 5000.0, 10)
    fleet.down = {"w1"}
    fleet.start()
    fleet.down = set()
    fleet.tick()
    assert fleet.triggers == {"startup": 1, "membership": 1}
    fleet.workers["w1"].serve("a", 9.0)
    fleet.tick()
    assert fleet.accumulated == pytest.approx(9.0)


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 50), st.sampled_from([(), ("w0",), ("w1",), ("w0", "w1")])),
        max_size=20,
    )
)
def test_device_time_counts_exactly_once_whatever_polls_are_missed(
    rounds: list[tuple[float, float, tuple[str, ...]]],
) -> None:
    fleet = PackedFleet(2, "a", default_replicas="all", **NEVER).start()
    used, compute = 0.0, 0.0
    for first, second, missing in rounds:
        fleet.workers["w0"].serve("a", first)
        fleet.workers["w1"].serve("a", second)
        used += first + second
        before = fleet.triggers.get("membership", 0)
        pending = fleet.accumulated
        fleet.tick(missing=missing)
        if fleet.triggers.get("membership", 0) > before:
            repack = fleet.packing.status().repack
            assert repack is not None
            assert repack.compute >= pending - 1e-9
            compute += repack.compute
    before = fleet.triggers.get("membership", 0)
    fleet.tick()
    if fleet.triggers.get("membership", 0) > before:
        compute += fleet.packing.status().repack.compute  # type: ignore[union-attr]
    assert math.isclose(compute + fleet.accumulated, used, rel_tol=1e-9, abs_tol=1e-6)
