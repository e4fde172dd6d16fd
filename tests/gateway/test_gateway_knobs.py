"""The record of what operators may change: from the configuration, in whole changes, by the configuration's rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.packing_fleet import NEVER, PackedFleet, knobs

from rsrv.core.errors import InvalidRequest
from rsrv.gateway.scheduling.fill import FillPlan
from rsrv.gateway.scheduling.knobs import POLICY_FIELDS, STARTUP_ONLY, ModelOverride
from rsrv.protos import control as pb
from rsrv.protos import inference


def test_the_fields_are_those_of_the_wire() -> None:
    names = [field.name for field in pb.SchedulingPolicy.DESCRIPTOR.fields]
    assert set(POLICY_FIELDS) == set(names) - {"generation"}
    assert len(POLICY_FIELDS) == 12


def test_the_configuration_becomes_generation_zero() -> None:
    made = knobs(hysteresis=0.25, default_replicas="all", models={"m": {"replicas": 2}, "n": {}})
    assert made.generation == 0
    assert (made.hysteresis, made.default_replicas) == (0.25, "all")
    assert made.models == {"m": ModelOverride(replicas=2)}
    assert made.policy() == {name: getattr(made, name) for name in POLICY_FIELDS}


def test_a_model_that_is_listed_for_its_fill_mode_keeps_the_default_of_replicas() -> None:
    made = knobs(default_replicas=3, models={"m": {"fill_mode": "spread"}})
    assert made.override("m") == ModelOverride(fill_mode="spread")
    assert made.replica_counts == {}


@pytest.mark.parametrize(("given", "resolved"), [(0, 40.0), (7, 7.0)])
def test_a_halflife_of_zero_is_the_rebalance_budget_of_the_start(given: float, resolved: float) -> None:
    made = knobs(ema_halflife_compute_seconds=given, rebalance_compute_seconds=40)
    assert made.ema_halflife_compute_seconds == resolved
    assert made.changed(rebalance_compute_seconds=50.0).ema_halflife_compute_seconds == resolved


def test_a_halflife_set_to_zero_is_the_budget_of_the_same_change_or_the_present_one() -> None:
    made = knobs(ema_halflife_compute_seconds=7, rebalance_compute_seconds=40)
    assert made.changed(ema_halflife_compute_seconds=0.0).ema_halflife_compute_seconds == 40.0
    both = made.changed(ema_halflife_compute_seconds=0.0, rebalance_compute_seconds=50.0)
    assert both.ema_halflife_compute_seconds == 50.0


def test_a_change_is_a_new_record_of_the_next_generation() -> None:
    before = knobs()
    after = before.changed(hysteresis=0.5, routing_fill_mode=" Spread ")
    assert (before.hysteresis, before.generation) == (0.0, 0)
    assert (after.hysteresis, after.routing_fill_mode, after.generation) == (0.5, "spread", 1)
    assert dataclasses.replace(after, hysteresis=0.0, routing_fill_mode="run", generation=0) == before


BAD = [
    ({"hysteresis": 1.5}, "hysteresis: 1.5 is not accepted; wanted number, ≥ 0 and < 1"),
    ({"rebalance_compute_seconds": 0.0}, "rebalance_compute_seconds: 0.0"),
    ({"rebalance_compute_seconds": float("nan")}, "rebalance_compute_seconds: nan"),
    ({"first_rebalance_compute_seconds": -1.0}, "first_rebalance_compute_seconds: -1.0"),
    ({"ema_halflife_compute_seconds": -1.0}, "ema_halflife_compute_seconds: -1.0"),
    ({"default_replicas": 0}, "default_replicas: 0"),
    ({"default_replicas": -2}, "default_replicas: -2"),
    ({"default_replicas": "most"}, "default_replicas: 'most'"),
    ({"routing_policy": "fill"}, "routing_policy: 'fill'"),
    ({"routing_policy": "least_outstanding"}, "scheduling.mode: least_outstanding"),
    ({"routing_fill_factor": 0.0}, "routing_fill_factor: 0.0"),
    ({"routing_fill_mode": "inherit"}, "routing_fill_mode: 'inherit'"),
    ({"compaction_mode": "never"}, "compaction_mode: 'never'"),
    ({"compaction_interval": -1}, "compaction_interval: -1"),
    ({"forbid_memory_oversubscription": 1}, "forbid_memory_oversubscription: 1"),
    ({"work_basis": "bytes"}, "work_basis: 'bytes'"),
    ({"generation": 9}, "unknown field 'generation'"),
    *(({name: 1}, name) for name in STARTUP_ONLY),
]


@pytest.mark.parametrize(("values", "text"), BAD, ids=lambda value: str(value)[:40])
def test_a_value_that_the_configuration_would_refuse_changes_nothing(values: dict[str, Any], text: str) -> None:
    fleet = PackedFleet(1, "m", **NEVER).start()
    before = fleet.packing.knobs
    with pytest.raises(InvalidRequest) as caught:
        fleet.packing.change(**({"routing_fill_factor": 2.0} | values))
    assert text in caught.value.message
    assert fleet.packing.knobs is before


def test_several_refused_values_are_all_named() -> None:
    with pytest.raises(InvalidRequest, match=r"work_basis: 'x' .*hysteresis: 2\.0"):
        knobs().changed(hysteresis=2.0, work_basis="x")


def test_an_override_is_set_replaced_and_taken_away() -> None:
    made = knobs().with_override("m", ModelOverride("all", "inflight", 0.5))
    assert (made.generation, made.override("m")) == (1, ModelOverride("all", "inflight", 0.5))
    assert made.replica_counts == {"m": -1}
    gone = made.with_override("m", ModelOverride())
    assert (gone.generation, gone.models) == (2, {})
    assert made.with_override("m", ModelOverride(fill_mode="inherit")).models == {}


@pytest.mark.parametrize(
    "override", [ModelOverride(0), ModelOverride(-1), ModelOverride(fill_mode="x"), ModelOverride(fill_factor=0.0)]
)
def test_an_override_that_the_configuration_would_refuse_is_refused(override: ModelOverride) -> None:
    with pytest.raises(InvalidRequest, match="is not accepted; wanted"):
        knobs().with_override("m", override)


def test_two_overrides_after_another_both_stay() -> None:
    fleet = PackedFleet(1, "mn", **NEVER).start()
    fleet.packing.set_override("m", ModelOverride(replicas=2))
    fleet.packing.set_override("n", ModelOverride(replicas=3))
    assert fleet.packing.knobs.replica_counts == {"m": 2, "n": 3}


def test_every_place_that_chooses_inflight_is_warned_of() -> None:
    made = knobs(routing_fill_mode="inflight", models={"m": {"fill_mode": "inflight"}, "n": {"fill_mode": "run"}})
    assert [text.split(" is ")[0] for text in made.inflight_warnings()] == ["model m: fill_mode", "routing_fill_mode"]
    assert knobs().inflight_warnings() == []
    fleet = PackedFleet(1, "m", routing_fill_mode="inflight", **NEVER).start()
    assert any("inflight" in text for text in fleet.notes)
    assert any("inflight" in text for text in fleet.packing.status().warnings)


def plan_of(fleet: PackedFleet, model: str) -> tuple[str, int]:
    row = next(row for row in fleet.packing.status().models if row.name == model)
    return row.fill_mode, row.fill_quantum


def test_how_replicas_fill_changes_at_once_and_items_are_still_counted() -> None:
    fleet = PackedFleet(2, "m", **NEVER).start()
    body = infer_request("x", [5, 3])
    assert (plan_of(fleet, "m"), fleet.packing.request_units("m", body)) == (("run", 8), 5)
    fleet.packing.set_override("m", ModelOverride(fill_mode="inflight", fill_factor=0.5))
    assert (plan_of(fleet, "m"), fleet.packing.request_units("m", body)) == (("inflight", 4), 5)
    fleet.packing.set_override("m", ModelOverride())
    assert plan_of(fleet, "m") == ("run", 8)
    fleet.packing.change(routing_fill_mode="spread", routing_fill_factor=1.5)
    assert (plan_of(fleet, "m"), fleet.packing.request_units("m", body)) == (("spread", 12), 5)


def test_a_factor_of_any_size_makes_a_plan() -> None:
    fleet = PackedFleet(2, "m", default_replicas=2, **NEVER).start()
    fleet.packing.change(routing_fill_factor=1e308)
    assert plan_of(fleet, "m") == ("run", 10**18)
    homes = {fleet.packing.select("m", 1, fleet.ready, ()).urls[0] for _ in range(20)}  # type: ignore[union-attr]
    assert len(homes) == 1
    fleet.packing.change(routing_fill_factor=5e-324)
    assert plan_of(fleet, "m") == ("run", 1)


def test_an_override_of_an_unknown_model_waits_for_it() -> None:
    fleet = PackedFleet(2, "m", **NEVER).start()
    fleet.packing.set_override("later", ModelOverride(replicas="all"))
    row = next(row for row in fleet.packing.status().models if row.name == "later")
    assert (row.configured_replicas, row.placed, row.max_batch) == ("all", False, 0)
    assert (row.fill_mode, row.fill_quantum) == (FillPlan().mode, 1)
    for worker in fleet.workers.values():
        worker.load("later")
    fleet.tick()
    assert fleet.homes("later") == ("w0", "w1")


def infer_request(name: str, shape: list[int]) -> bytes:
    request = inference.ModelInferRequest(model_name="m")
    request.inputs.add(name=name, datatype="FP32", shape=shape)
    return bytes(request.SerializeToString())
