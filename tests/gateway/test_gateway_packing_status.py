"""The snapshot that the control plane and metrics read: which rows there are, and what they say."""

from __future__ import annotations

import pytest
from support.packing_fleet import AT_ONCE, NEVER, PackedFleet

from rsrv.gateway.scheduling.knobs import ModelOverride
from rsrv.gateway.scheduling.reports import WorkerStatus


def test_before_the_first_repack_the_status_says_so() -> None:
    status = PackedFleet(2, "ab", models={"b": {"replicas": 2}}).packing.status()
    assert [(row.name, row.placed, row.configured_replicas) for row in status.models] == [("b", False, 2)]
    assert status.workers == ()
    assert len(status.warnings) == 1
    assert "no repack yet" in status.warnings[0]


def test_models_and_workers_are_sorted_and_complete() -> None:
    fleet = PackedFleet(2, ["b", "a"], mem=3, budget=10, **NEVER).start()
    fleet.packing.set_override("z", ModelOverride(replicas=1))
    choice = fleet.packing.select("a", 4, fleet.ready, ())
    assert choice is not None
    status = fleet.packing.status()
    assert [row.name for row in status.models] == ["a", "b", "z"]
    row = status.models[0]
    (replica,) = row.replicas
    assert (replica.worker, replica.weight, replica.outstanding, replica.routed) == (choice.urls[0], 1.0, 4, 1)
    assert (row.max_batch, row.fill_mode, row.fill_quantum, row.weight_nbytes, row.placed) == (8, "run", 8, 3, True)
    loaded = next(worker for worker in status.workers if worker.worker == choice.urls[0])
    assert loaded == WorkerStatus(choice.urls[0], True, 1, 4.0, 3, 10)
    assert status.warnings == ()
    assert status.tick is not None
    assert status.tick.unix_seconds == 1e9


def test_a_worker_that_is_not_ready_keeps_its_row_while_it_has_models() -> None:
    fleet = PackedFleet(2, "ab", **NEVER).start()
    for down in ({"w1"}, set(), {"w0"}, {"w1"}):
        fleet.down = down
        fleet.tick(0)  # the last one comes too soon for another placement
    rows = {row.worker: row for row in fleet.packing.status().workers}
    assert (rows["w0"].ready, rows["w0"].models_placed) == (True, 0)
    assert (rows["w1"].ready, rows["w1"].models_placed) == (False, 2)


def test_rates_and_needs_are_those_of_the_last_repack() -> None:
    fleet = PackedFleet(1, "a", **AT_ONCE).start()
    fleet.arrive("a", 10)
    fleet.workers["w0"].serve("a", 2.0, 4)
    fleet.tick(10)
    (row,) = fleet.packing.status().models
    assert row.cost_seconds == 0.5
    assert row.arrival_rate == pytest.approx(1.0)  # so short a half-life forgets all that was before
    assert row.utilization == pytest.approx(0.5)


def test_a_model_that_no_worker_lists_any_more_has_no_row() -> None:
    fleet = PackedFleet(1, "ab", **NEVER)
    fleet.workers["w0"].serve("b", 1.0)
    fleet.start()
    fleet.workers["w0"].unload("b")
    fleet.tick()
    assert [row.name for row in fleet.packing.status().models] == ["a"]


def test_repacks_are_counted_by_what_caused_them() -> None:
    fleet = PackedFleet(2, "a", **NEVER).start()
    fleet.packing.request_repack()
    fleet.tick()
    fleet.down = {"w1"}
    fleet.tick()
    status = fleet.packing.status()
    assert dict(status.repacks) == {"startup": 1, "operator": 1, "membership": 1}
    assert (status.repack_count, status.requested, status.completed) == (3, 1, 1)


def test_notes_do_not_pile_up_when_nobody_takes_them() -> None:
    fleet = PackedFleet(1, "a", **NEVER).start()
    for _ in range(1200):
        fleet.packing.request_repack()
        fleet.tick()
    assert len(fleet.packing.take_notes()) == 1000
