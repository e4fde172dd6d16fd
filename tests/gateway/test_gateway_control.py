"""The control plane's methods on a real `LptPacking`: every number of spec gateway-node 3.3."""

import logging
import threading
from types import SimpleNamespace

import pytest
from support.gateway_control import ControlledGateway

from rsrv.core.errors import Code, InvalidRequest, NoWorkers, Shed, UnknownModel, WrongState
from rsrv.gateway.admin.scheduling_control import MAX_WAIT_SECONDS, MAX_WAITING, ControlGate
from rsrv.gateway.scheduling.simple import RoundRobin
from rsrv.gateway.workers.poll import ModelReport
from rsrv.protos import control as pb

TWELVE = (
    "rebalance_compute_seconds",
    "first_rebalance_compute_seconds",
    "hysteresis",
    "ema_halflife_compute_seconds",
    "default_replicas",
    "routing_policy",
    "routing_fill_factor",
    "routing_fill_mode",
    "compaction_mode",
    "compaction_interval",
    "forbid_memory_oversubscription",
    "work_basis",
)


@pytest.fixture
def gateway():
    with ControlledGateway() as running:
        running.start()
        running.tick()
        yield running


@pytest.fixture
def control(gateway):
    return gateway.control


def policy(control, *mask, **values):
    return control.set_policy(
        pb.SetSchedulingPolicyRequest(update_mask=mask or list(values), policy=pb.SchedulingPolicy(**values))
    )


def placement(control, name="m", *, fill_factor=-1.0, **fields):
    return control.set_placement(pb.SetModelPlacementRequest(name=name, fill_factor=fill_factor, **fields))


class Caller:
    """A call without an engine: what it was answered with, and whether it still waits."""

    path = "/reactant_control.GatewayControlService/Repack"

    def __init__(self, wait):
        self.body = pb.RepackRequest(wait_seconds=wait).SerializeToString()
        self.cancelled = False
        self.ended = threading.Event()
        self.answer = None
        self.error = None
        self.at_end = lambda: None

    def on_end(self, fn):
        self.at_end = fn

    def send(self, buffers):
        self.answer = pb.RepackResponse.FromString(b"".join(buffers))

    def finish(self, trailers=None):
        self.at_end()
        self.ended.set()

    def fail(self, error):
        self.error = error
        self.ended.set()

    def wait(self):
        assert self.ended.wait(30)
        if self.error is not None:
            raise self.error
        return self.answer


def repack(control, wait=0.0):
    call = Caller(wait)
    control.repack(call)
    return call


def test_a_fresh_gateway_is_as_configured_and_each_accepted_call_is_one_generation(control):
    status = control.status(pb.GetSchedulingStatusRequest())
    assert (status.mode, status.policy.generation) == ("lpt_packing", 0)
    assert policy(control, hysteresis=0.1).applied.generation == 1
    assert policy(control, hysteresis=0.1).applied.generation == 2
    assert placement(control, replicas=2).configured_replicas == 2
    assert control.status(pb.GetSchedulingStatusRequest()).policy.generation == 3


def test_status_tells_of_models_and_workers_by_address_and_name(gateway, control):
    gateway.fleet.drain("w1:1")
    status = control.status(pb.GetSchedulingStatusRequest())
    (model,) = status.models
    assert (model.name, model.configured_replicas, model.effective_replicas) == ("m", 0, 1)
    assert (model.max_batch, model.fill_mode, model.fill_quantum) == (8, "run", 8)
    assert (model.weight_nbytes, model.placed, model.drifted) == (100, True, False)
    (home,) = model.replicas
    assert (home.worker, home.worker_name, home.weight) == ("w0:1", "a0", 1.0)
    assert [(row.worker, row.name, row.ready, row.draining) for row in status.workers] == [
        ("w0:1", "a0", True, False),
        ("w1:1", "a1", True, True),
    ]
    assert [(row.models_placed, row.assigned_weight_bytes) for row in status.workers] == [(1, 100), (0, 0)]


def test_status_tells_of_the_startup_repack_and_of_the_first_budget(control):
    repacks = control.status(pb.GetSchedulingStatusRequest()).repack
    assert (repacks.last_trigger, repacks.repack_count, repacks.last_models_placed) == ("startup", 1, 1)
    assert (repacks.active_threshold_seconds, repacks.first_tick_repack_done) == (60.0, False)
    assert (repacks.operator_repacks_requested, repacks.operator_repacks_completed) == (0, 0)


# --- other modes ----------------------------------------------------------------------------------------------------


def test_another_mode_tells_its_name_alone_and_refuses_changes_with_it():
    with ControlledGateway(mode=RoundRobin()) as gateway:
        status = gateway.control.status(pb.GetSchedulingStatusRequest())
        assert status == pb.GetSchedulingStatusResponse(mode="round_robin")
        for change in (
            lambda: policy(gateway.control, hysteresis=0.1),
            lambda: policy(gateway.control, "nonsense"),
            lambda: placement(gateway.control, ""),
            lambda: repack(gateway.control),
        ):
            with pytest.raises(WrongState, match="its mode is round_robin") as raised:
                change()
            assert (raised.value.code, raised.value.reason) == (Code.FAILED_PRECONDITION, "mode")


# --- who may change something ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "host", "is_open"),
    [
        (None, "127.0.0.1", True),
        (None, "::1", True),
        (None, "localhost", True),
        (None, "0.0.0.0", False),
        (None, "10.0.0.5", False),
        (True, "0.0.0.0", True),
        (False, "127.0.0.1", False),
    ],
)
def test_changes_are_taken_on_loopback_or_when_the_configuration_says_so(control, host, is_open):
    gate = ControlGate(control, host)
    if is_open:
        gate.require()
    else:
        with pytest.raises(WrongState, match="lets nobody change anything") as raised:
            gate.require()
        assert raised.value.reason == "control_off"
        assert "control: true" in raised.value.hint


def test_a_closed_gate_refuses_changes_and_still_tells():
    with ControlledGateway(control=False) as gateway:
        gateway.start()
        routes = gateway.routes()
        prefix = "/reactant_control.GatewayControlService/"
        assert gateway.control.status(pb.GetSchedulingStatusRequest()).mode == "lpt_packing"
        for name in ("SetSchedulingPolicy", "SetModelPlacement", "Repack"):
            with pytest.raises(WrongState, match="control: false"):
                routes[prefix + name].handler(SimpleNamespace(path=prefix + name, body=b""))
        assert gateway.packing.requested == 0


# --- SetSchedulingPolicy --------------------------------------------------------------------------------------------


def test_an_empty_mask_comes_before_an_unset_policy(control):
    with pytest.raises(InvalidRequest, match="update_mask is empty"):
        control.set_policy(pb.SetSchedulingPolicyRequest())
    with pytest.raises(InvalidRequest, match="policy is not set"):
        control.set_policy(pb.SetSchedulingPolicyRequest(update_mask=["hysteresis"]))


@pytest.mark.parametrize("name", ["mode", "scheduling_mode", "max_worker_share", "endpoints", "listen"])
def test_what_is_read_at_the_start_needs_a_restart(control, name):
    with pytest.raises(InvalidRequest, match=f"{name} is fixed when the gateway starts") as raised:
        policy(control, name)
    assert "restart" in raised.value.hint


@pytest.mark.parametrize("name", ["nonsense", "generation", "models", "self", ""])
def test_an_unknown_name_is_refused_with_the_twelve_that_are_known(control, name):
    with pytest.raises(InvalidRequest) as raised:
        policy(control, name)
    assert all(known in raised.value.message for known in TWELVE)


@pytest.mark.parametrize(
    "values",
    [
        {"hysteresis": 1.5},
        {"hysteresis": 1.0},
        {"hysteresis": -0.1},
        {"hysteresis": float("nan")},
        {"rebalance_compute_seconds": 0.0},
        {"rebalance_compute_seconds": float("inf")},
        {"first_rebalance_compute_seconds": -1.0},
        {"ema_halflife_compute_seconds": -1.0},
        {"default_replicas": 0},
        {"default_replicas": -2},
        {"routing_policy": "least_outstanding"},
        {"routing_policy": "fill"},
        {"routing_fill_factor": 0.0},
        {"routing_fill_mode": "inherit"},
        {"compaction_mode": "sometimes"},
        {"compaction_interval": -1},
        {"work_basis": "money"},
    ],
    ids=lambda values: "{}={}".format(*next(iter(values.items()))),
)
def test_a_wrong_value_names_its_field_and_leaves_the_very_same_knobs(gateway, control, values):
    before = gateway.packing.knobs
    (name,) = values
    other = "compaction_interval" if name == "hysteresis" else "hysteresis"
    given = {other: 1 if other == "compaction_interval" else 0.5, **values}
    with pytest.raises(InvalidRequest, match=name):
        policy(control, **given)
    assert gateway.packing.knobs is before


def test_only_fields_of_the_mask_change_and_all_are_told(control):
    applied = control.set_policy(
        pb.SetSchedulingPolicyRequest(
            update_mask=["default_replicas", "compaction_mode"],
            policy=pb.SchedulingPolicy(default_replicas=-1, compaction_mode="off", hysteresis=0.9),
        )
    ).applied
    assert applied == pb.SchedulingPolicy(
        rebalance_compute_seconds=300.0,
        first_rebalance_compute_seconds=60.0,
        hysteresis=0.0,
        ema_halflife_compute_seconds=300.0,
        default_replicas=-1,
        routing_policy="fill_least",
        routing_fill_factor=1.0,
        routing_fill_mode="run",
        compaction_mode="off",
        compaction_interval=1,
        forbid_memory_oversubscription=True,
        generation=1,
        work_basis="compute",
    )


def test_a_half_life_of_zero_is_the_budget_of_this_change_or_the_present_one(control):
    policy(control, ema_halflife_compute_seconds=7.0)
    both = policy(control, ema_halflife_compute_seconds=0.0, rebalance_compute_seconds=40.0)
    assert both.applied.ema_halflife_compute_seconds == 40.0
    policy(control, rebalance_compute_seconds=50.0)
    assert policy(control, ema_halflife_compute_seconds=0.0).applied.ema_halflife_compute_seconds == 50.0


def test_a_change_is_logged_with_before_and_after(control, caplog):
    source = "rsrv.gateway.admin.scheduling_control"
    with caplog.at_level(logging.INFO, source):
        policy(control, hysteresis=0.25)
    (line,) = [
        record.getMessage() for record in caplog.records if record.name == "rsrv.gateway.admin.scheduling_control"
    ]
    assert "fields=hysteresis generation=1 before={'hysteresis': 0.0} after={'hysteresis': 0.25}" in line


def test_a_budget_below_what_has_come_together_is_told_and_the_next_tick_repacks(gateway, control):
    gateway.work("m", 5.0)
    gateway.tick()
    assert gateway.packing.status().tick.accumulated == pytest.approx(10.0)  # on two workers
    (warning,) = policy(control, first_rebalance_compute_seconds=5.0).warnings
    assert warning.startswith("10 device seconds have come together")
    gateway.tick()
    assert control.status(pb.GetSchedulingStatusRequest()).repack.last_trigger == "compute"
    (warning,) = policy(control, first_rebalance_compute_seconds=7.0).warnings
    assert "the first repack has been" in warning


def test_inflight_is_told_when_it_is_chosen_and_by_status(control):
    (warning,) = policy(control, routing_fill_mode="inflight").warnings
    assert "inflight" in warning
    assert warning in control.status(pb.GetSchedulingStatusRequest()).warnings
    assert policy(control, hysteresis=0.5).warnings == []


# --- SetModelPlacement ----------------------------------------------------------------------------------------------


def test_five_replicas_on_two_workers_are_two_with_a_warning(control):
    answer = placement(control, replicas=5)
    assert (answer.configured_replicas, answer.effective_replicas) == (5, 2)
    assert answer.warnings[0] == "5 replicas are wanted and 2 workers are ready: 2 replicas for now"


def test_inflight_at_half_of_a_batch_of_eight_is_a_quantum_of_four_and_inherit_goes_back(control):
    answer = placement(control, keep_replicas=True, fill_mode="inflight", fill_factor=0.5)
    assert (answer.fill_mode, answer.fill_quantum, answer.configured_replicas) == ("inflight", 4, 0)
    assert any("inflight" in text for text in answer.warnings)
    (row,) = control.status(pb.GetSchedulingStatusRequest()).models
    assert (row.fill_mode, row.fill_quantum) == ("inflight", 4)
    answer = placement(control, keep_replicas=True, fill_mode="inherit", fill_factor=0.0)
    assert (answer.fill_mode, answer.fill_quantum) == ("run", 8)
    assert not any("inflight" in text for text in answer.warnings)


def test_replicas_are_kept_when_only_the_filling_changes_and_cleared_by_zero(gateway, control):
    placement(control, replicas=-1)
    answer = placement(control, keep_replicas=True, fill_mode="spread")
    assert (answer.configured_replicas, answer.effective_replicas, answer.fill_mode) == (-1, 2, "spread")
    answer = placement(control, replicas=0)
    assert (answer.configured_replicas, answer.effective_replicas, answer.fill_mode) == (0, 1, "spread")
    placement(control, keep_replicas=True, fill_mode="inherit")
    assert dict(gateway.packing.knobs.models) == {}


def test_replicas_change_at_the_next_repack(gateway, control):
    placement(control, replicas=2)
    assert control.status(pb.GetSchedulingStatusRequest()).models[0].effective_replicas == 1
    answer = repack(control, 10.0).wait()
    assert (answer.completed, answer.repack.last_models_moved) == (True, 1)
    assert control.status(pb.GetSchedulingStatusRequest()).models[0].effective_replicas == 2


def test_a_name_is_needed_and_an_unknown_one_must_be_wanted(gateway, control):
    with pytest.raises(InvalidRequest, match="name is empty"):
        placement(control, "")
    with pytest.raises(UnknownModel, match="no worker has a model 'new'") as raised:
        placement(control, "new", replicas=2)
    assert raised.value.code is Code.NOT_FOUND
    assert gateway.packing.knobs.generation == 0
    answer = placement(control, "new", replicas=2, allow_unknown_model=True)
    assert answer.warnings[0] == "no worker has a model 'new' now; the setting waits for it"
    assert gateway.packing.knobs.models["new"].replicas == 2


def test_a_model_that_is_registered_and_not_ready_is_known(control):
    assert placement(control, "late", replicas=2).configured_replicas == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"replicas": -2}, "replicas is -2"),
        ({"fill_mode": "fastest"}, "fill_mode"),
        ({"fill_factor": float("nan")}, "fill_factor"),
        ({"fill_factor": float("inf")}, "fill_factor"),
    ],
)
def test_a_wrong_placement_is_refused_and_changes_nothing(gateway, control, fields, named):
    before = gateway.packing.knobs
    with pytest.raises(InvalidRequest, match=named):
        placement(control, **fields)
    assert gateway.packing.knobs is before


def test_a_footprint_that_will_not_fit_is_told_and_accepted(gateway, control):
    gateway.budgets = {"w0:1": 1000, "w1:1": 90}
    repack(control, 10.0).wait()
    answer = placement(control, replicas=2)
    assert answer.configured_replicas == 2
    assert "worker w1:1 would have 100 bytes of weights with a replica of 'm', and room for 90" in answer.warnings


def test_two_placements_at_once_both_survive(gateway, control):
    names = [f"n{index}" for index in range(40)]
    together = threading.Barrier(2)

    def set_all(mine):
        together.wait()
        for name in mine:
            placement(control, name, replicas=2, allow_unknown_model=True)

    threads = [threading.Thread(target=set_all, args=(names[start::2],)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(gateway.packing.knobs.models) == sorted(names)
    assert gateway.packing.knobs.generation == len(names)


# --- Repack ---------------------------------------------------------------------------------------------------------


def test_a_repack_that_is_waited_for_is_done_and_one_that_is_not_is_queued(gateway, control):
    answer = repack(control, 10.0).wait()
    assert (answer.sequence, answer.completed_sequence, answer.completed) == (1, 1, True)
    assert (answer.repack.last_trigger, list(answer.warnings)) == ("operator", [])
    assert 0 <= answer.waited_seconds < 10.0
    gateway.automatic = False
    answer = repack(control).wait()
    assert (answer.sequence, answer.completed, answer.waited_seconds) == (2, False, 0.0)
    assert list(answer.warnings) == ["repack 2 is queued: it comes with the next look at the workers"]
    repacks = control.status(pb.GetSchedulingStatusRequest()).repack
    assert (repacks.operator_repacks_requested, repacks.operator_repacks_completed) == (2, 1)


def test_repacks_between_two_looks_are_one_and_complete_together(gateway, control):
    gateway.automatic = False
    calls = [repack(control, 60.0) for _ in range(3)]
    assert gateway.woken.is_set()
    before = gateway.packing.status().repack_count
    gateway.tick()
    answers = [call.wait() for call in calls]
    assert [(answer.sequence, answer.completed) for answer in answers] == [(1, True), (2, True), (3, True)]
    assert gateway.packing.status().repack_count == before + 1


def test_a_forced_repack_leaves_the_first_budget_armed(gateway, control):
    answer = repack(control, 10.0).wait()
    assert (answer.repack.first_tick_repack_done, answer.repack.active_threshold_seconds) == (False, 60.0)


def test_a_wait_that_ends_too_early_says_that_the_repack_is_queued(gateway, control):
    gateway.automatic = False
    answer = repack(control, 0.01).wait()
    assert (answer.sequence, answer.completed) == (1, False)
    assert answer.waited_seconds >= 0.01
    assert "repack 1 is queued" in answer.warnings[0]


@pytest.mark.parametrize("wait", [-1.0, -0.001, float("nan")])
def test_a_wait_below_zero_is_refused_and_asks_for_nothing(gateway, control, wait):
    with pytest.raises(InvalidRequest, match="wait_seconds is"):
        repack(control, wait)
    assert gateway.packing.requested == 0


@pytest.mark.parametrize("wait", [121.0, float("inf")])
def test_a_wait_of_more_than_two_minutes_is_cut_and_told(control, wait):
    answer = repack(control, wait).wait()
    assert answer.completed
    assert list(answer.warnings) == [f"wait_seconds is {wait:g}; this call waits {MAX_WAIT_SECONDS:g} s at most"]


def test_without_a_ready_worker_nobody_waits_and_the_request_stands(gateway, control):
    gateway.automatic = False
    gateway.ready = []
    gateway.tick()
    with pytest.raises(NoWorkers, match="no worker was ready") as raised:
        repack(control, 1.0)
    assert raised.value.code is Code.UNAVAILABLE
    assert gateway.packing.requested == 0
    assert repack(control).wait().sequence == 1


def test_before_the_first_look_at_workers_nobody_waits():
    with ControlledGateway() as gateway, pytest.raises(NoWorkers, match="no worker was ready"):
        repack(gateway.control, 1.0)


def test_a_caller_who_went_away_is_not_answered_and_no_longer_looked_for(gateway, control):
    gateway.automatic = False
    timers = []
    gateway.control._timers = SimpleNamespace(at=lambda deadline, look: timers.append(look))
    call = repack(control, 60.0)
    (look,) = timers
    call.cancelled = True
    look()
    assert timers == [look]
    assert not call.ended.is_set()


def test_only_so_many_callers_wait_and_the_others_may_ask_without_waiting(gateway, control):
    gateway.automatic = False
    calls = [repack(control, 60.0) for _ in range(MAX_WAITING)]
    with pytest.raises(Shed, match=f"{MAX_WAITING} calls wait for a repack"):
        repack(control, 60.0)
    assert repack(control).wait().sequence == MAX_WAITING + 1
    gateway.tick()
    assert all(call.wait().completed for call in calls)
    gateway.automatic = True
    assert repack(control, 60.0).wait().completed


# --- what outlives the gateway --------------------------------------------------------------------------------------


def test_what_is_kept_is_told_to_be_and_what_could_not_be_is_too():
    kept = []
    with ControlledGateway(keep=lambda knobs: kept.append(knobs) or len(kept) == 1) as gateway:
        gateway.start()
        gateway.tick()
        first = policy(gateway.control, hysteresis=0.5)
        assert (first.persisted, list(first.warnings)) == (True, [])
        second = placement(gateway.control, replicas=2)
        assert not second.persisted
        assert "the state file could not be written" in second.warnings[-1]
        assert kept == [kept[0], gateway.packing.knobs]


def test_without_a_state_file_nothing_is_persisted(control):
    answer = policy(control, hysteresis=0.5)
    assert (answer.persisted, list(answer.warnings)) == (False, [])


def test_drift_is_told_by_status(gateway, control):
    gateway.models["w1:1"]["other"] = ModelReport(weight_nbytes=10)
    repack(control, 10.0).wait()
    rows = {row.name: row for row in control.status(pb.GetSchedulingStatusRequest()).models}
    assert (rows["other"].drifted, [home.worker for home in rows["other"].replicas]) == (True, ["w1:1"])
    assert not rows["m"].drifted
