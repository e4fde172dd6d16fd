"""What a change means, by hand-made snapshots; expected numbers are those of the specification (3.3) or of hand."""

import pytest

from rsrv.core.config.gateway import SchedulingConfig
from rsrv.core.errors import InvalidRequest
from rsrv.gateway.admin.messages import (
    policy_message,
    policy_values,
    repack_message,
    replicas_on_wire,
    threshold,
)
from rsrv.gateway.admin.rules import (
    effective_replicas,
    override_of,
    placement_warnings,
    policy_warnings,
    require_model_name,
)
from rsrv.gateway.scheduling.knobs import Knobs, ModelOverride
from rsrv.gateway.scheduling.reports import ModelStatus, PackingStatus, ReplicaStatus, TickReport, WorkerStatus
from rsrv.protos import control as pb

KNOBS = Knobs.from_config(SchedulingConfig(mode="lpt_packing"))


def tick(*, accumulated=0.0, first_done=False):
    return TickReport(1.0, ("w0", "w1"), accumulated, 60.0, first_done)


def model(name="m", *, homes=(), nbytes=0):
    replicas = tuple(ReplicaStatus(url, 1.0, 0, 0) for url in homes)
    return ModelStatus(name, None, replicas, 0.0, 0.0, 0.0, 8, "run", 8, nbytes, bool(homes), False)


def worker(url, *, ready=True, assigned=0, budget=0):
    return WorkerStatus(url, ready, 0, 0.0, assigned, budget)


def status(*, knobs=KNOBS, tick=None, models=(), workers=()):
    return PackingStatus(knobs, tick, None, 0, 0, {}, 0, tuple(models), tuple(workers), ())


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "a\0", "..", "m" * 256, "é" * 128, "x" * 10_000_000])
def test_what_no_worker_can_call_a_model_is_refused_in_a_few_words(name):
    with pytest.raises(InvalidRequest, match="wanted the name of a model") as caught:
        require_model_name(name)
    assert len(caught.value.message) < 250


@pytest.mark.parametrize("name", ["m", "m" * 255, "é" * 127, "resnet-50.v2 (new)"])
def test_what_a_bundle_can_be_called_is_the_name_of_a_model(name):
    require_model_name(name)


# --- replicas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "ready", "effective"),
    [(5, 2, 2), (1, 2, 1), (2, 2, 2), ("all", 3, 3), (5, 0, 5), ("all", 0, 1), ("all", 1, 1)],
)
def test_replicas_are_clamped_to_the_ready_workers_and_echoed_when_there_are_none(wanted, ready, effective):
    assert effective_replicas(wanted, ready) == effective


def test_replicas_have_their_numbers_on_the_wire():
    assert [replicas_on_wire(replicas) for replicas in (None, 3, "all")] == [0, 3, -1]


OLD = ModelOverride(replicas=3, fill_mode="spread", fill_factor=0.5)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"replicas": 2, "fill_factor": -1}, ModelOverride(2, "spread", 0.5)),
        ({"replicas": -1, "fill_factor": -1}, ModelOverride("all", "spread", 0.5)),
        ({"replicas": 0, "fill_factor": -1}, ModelOverride(None, "spread", 0.5)),
        ({"keep_replicas": True, "fill_factor": -1}, OLD),
        ({"keep_replicas": True, "replicas": -7, "fill_factor": -1}, OLD),
        ({"keep_replicas": True, "fill_factor": -1, "fill_mode": "inherit"}, ModelOverride(3, None, 0.5)),
        ({"keep_replicas": True, "fill_factor": -1, "fill_mode": " Run "}, ModelOverride(3, "run", 0.5)),
        ({"keep_replicas": True, "fill_factor": 0}, ModelOverride(3, "spread", None)),
        ({"keep_replicas": True, "fill_factor": 2}, ModelOverride(3, "spread", 2.0)),
        ({"replicas": 0, "fill_mode": "inherit", "fill_factor": 0}, ModelOverride()),
    ],
)
def test_an_override_keeps_what_the_call_leaves_out(fields, found):
    assert override_of(pb.SetModelPlacementRequest(name="m", **fields), OLD) == found


def test_a_number_of_replicas_below_minus_one_is_refused_by_its_value():
    with pytest.raises(InvalidRequest, match="replicas is -2; wanted a number above 0, -1 for all workers, or 0"):
        override_of(pb.SetModelPlacementRequest(name="m", replicas=-2), OLD)


# --- warnings about a placement -------------------------------------------------------------------------------------


def test_every_placement_says_when_it_takes_effect():
    (only,) = placement_warnings("m", 1, 1, status(models=[model()], workers=[worker("w0")]), known=True)
    assert only == "the number of replicas takes effect at the next repack; how they are filled, at once"


def test_more_replicas_than_ready_workers_are_told_to_be_clamped():
    found = placement_warnings(
        "m", 5, 2, status(workers=[worker("w0"), worker("w1"), worker("w2", ready=False)]), known=True
    )
    assert found[0] == "5 replicas are wanted and 2 workers are ready: 2 replicas for now"
    assert len(placement_warnings("m", "all", 2, status(workers=[worker("w0"), worker("w1")]), known=True)) == 1
    assert len(placement_warnings("m", 5, 5, status(workers=[worker("w0", ready=False)]), known=True)) == 1


def test_a_model_that_nobody_has_is_told_to_be_stored():
    assert "no worker has a model 'new' now; the setting waits for it" in placement_warnings(
        "new", 1, 1, status(), known=False
    )


def test_a_footprint_is_projected_onto_the_workers_that_hold_least_without_it():
    # Without m (100 bytes, on w0 now): w0 holds 50, w1 holds 250, w2 holds 20. Two replicas go to w2 and w0.
    workers = [
        worker("w0", assigned=150, budget=140),
        worker("w1", assigned=250, budget=260),
        worker("w2", assigned=20, budget=119),
    ]
    snapshot = status(models=[model(homes=("w0",), nbytes=100)], workers=workers)
    one = placement_warnings("m", 1, 1, snapshot, known=True)
    assert one[:-1] == ["worker w2 would have 120 bytes of weights with a replica of 'm', and room for 119"]
    two = placement_warnings("m", 2, 2, snapshot, known=True)
    assert [text.split()[1] for text in two[:-1]] == ["w2", "w0"]
    three = placement_warnings("m", "all", 3, snapshot, known=True)
    assert [text.split()[1] for text in three[:-1]] == ["w2", "w0", "w1"]


def test_a_footprint_that_fits_or_has_no_budget_is_no_warning():
    workers = [worker("w0", assigned=20, budget=120), worker("w1", assigned=9000, budget=0)]
    assert len(placement_warnings("m", 2, 2, status(models=[model(nbytes=100)], workers=workers), known=True)) == 1


# --- warnings about a policy ----------------------------------------------------------------------------------------


def changed(now=None, **values):
    after = KNOBS.changed(**values)
    return policy_warnings(KNOBS, after, frozenset(values), status(knobs=after, tick=now))


def test_a_budget_that_is_used_up_already_is_told():
    (found,) = changed(tick(accumulated=40.0, first_done=True), rebalance_compute_seconds=30.0)
    assert found.startswith("40 device seconds have come together since the last repack, and the budget is now 30")
    assert changed(tick(accumulated=30.0, first_done=True), rebalance_compute_seconds=30.0)
    assert changed(tick(accumulated=29.9, first_done=True), rebalance_compute_seconds=30.0) == []
    assert changed(tick(accumulated=1e6, first_done=True), hysteresis=0.1) == []


def test_while_the_first_budget_is_armed_it_is_the_one_that_counts():
    assert changed(tick(accumulated=40.0), rebalance_compute_seconds=30.0) == []  # 60 s is what counts
    (found,) = changed(tick(accumulated=40.0), first_rebalance_compute_seconds=40.0)
    assert "the budget is now 40" in found


def test_a_first_budget_after_the_first_repack_is_told_to_be_history():
    (found,) = changed(tick(first_done=True), first_rebalance_compute_seconds=5.0)
    assert found == "first_rebalance_compute_seconds changes nothing any more: the first repack has been"
    assert changed(tick(), first_rebalance_compute_seconds=5.0) == []


def test_another_half_life_does_not_recompute_what_was_measured():
    (found,) = changed(ema_halflife_compute_seconds=5.0)
    assert "what was measured stays" in found


def test_only_a_newly_chosen_inflight_is_told():
    (found,) = changed(routing_fill_mode="inflight")
    assert "routing_fill_mode is inflight" in found
    before = KNOBS.changed(routing_fill_mode="inflight")
    after = before.changed(hysteresis=0.5)
    assert policy_warnings(before, after, {"hysteresis"}, status(knobs=after)) == []


# --- messages -------------------------------------------------------------------------------------------------------


def test_a_policy_travels_there_and_back():
    knobs = KNOBS.changed(default_replicas="all", hysteresis=0.25, compaction_interval=3)
    message = policy_message(knobs)
    assert (message.default_replicas, message.generation) == (-1, 1)
    assert message.ema_halflife_compute_seconds == 300.0  # resolved, never 0
    assert policy_values(message, knobs.policy()) == knobs.policy()


@pytest.mark.parametrize("name", ["generation", "models", "nonsense", "self", "policy"])
def test_a_name_that_is_no_field_has_no_value(name):
    assert policy_values(pb.SchedulingPolicy(generation=4), [name]) == {name: None}


def test_the_threshold_is_the_first_budget_until_the_first_repack():
    assert threshold(status()) == 60.0
    assert threshold(status(tick=tick())) == 60.0
    assert threshold(status(tick=tick(first_done=True))) == 300.0
    assert threshold(status(knobs=KNOBS.changed(first_rebalance_compute_seconds=0.0))) == 300.0


def test_before_anything_happened_the_last_trigger_is_none():
    message = repack_message(status())
    assert (message.last_trigger, message.repack_count, message.last_repack_unix_seconds) == ("none", 0, 0.0)
    assert (message.first_tick_repack_done, message.last_tick_unix_seconds) == (False, 0.0)
