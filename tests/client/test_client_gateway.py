"""The client of a gateway's control plane against the real service behind a real engine."""

import grpc
import pytest
from support.client_stub import StubServer
from support.gateway_control import ControlledGateway
from support.gateway_site import wait_until

from rsrv.client import FleetWorker, Gateway, SchedulingStatus
from rsrv.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NameTaken,
    NoWorkers,
    ServerUnreachable,
    Unimplemented,
    UnknownModel,
    UnknownWorker,
    UsageError,
    WrongState,
)
from rsrv.gateway.admin.scheduling_control import MAX_WAITING
from rsrv.gateway.scheduling.simple import RoundRobin
from rsrv.protos import control as pb


@pytest.fixture
def served():
    with ControlledGateway() as gateway, gateway.serving() as url:
        gateway.start()
        gateway.tick()
        gateway.url = url
        yield gateway


@pytest.fixture
def gateway(served):
    with Gateway(served.url) as handle:
        yield handle


def test_status_has_the_policy_the_repacks_and_where_everything_is(gateway):
    status = gateway.status()
    assert (status.mode, status.policy.generation, status.policy.default_replicas) == ("lpt_packing", 0, 1)
    assert (status.policy.work_basis, status.policy.ema_halflife_compute_seconds) == ("compute", 300.0)
    assert (status.repacks.last_trigger, status.repacks.count, status.repacks.threshold_seconds) == ("startup", 1, 60.0)
    (model,) = status.models
    assert (model.name, model.configured_replicas, model.effective_replicas) == ("m", "default", 1)
    assert (model.fill_mode, model.fill_quantum, model.weight_nbytes, model.placed) == ("run", 8, 100, True)
    (home,) = model.replicas
    assert (home.worker, home.name, home.weight, home.outstanding, home.routed) == ("w0:1", "a0", 1.0, 0, 0)
    assert [(worker.name, worker.ready, worker.models_placed) for worker in status.workers] == [
        ("a0", True, 1),
        ("a1", True, 0),
    ]
    assert status.warnings == ()


def test_of_another_mode_there_is_only_its_name():
    with ControlledGateway(mode=RoundRobin()) as served, served.serving() as url, Gateway(url) as gateway:
        assert gateway.status() == SchedulingStatus("round_robin")
        with pytest.raises(WrongState, match="its mode is round_robin") as raised:
            gateway.repack()
        assert raised.value.reason == "mode"


def test_a_policy_is_changed_by_the_names_of_its_knobs(gateway):
    done = gateway.set_policy(
        hysteresis=0.25, default_replicas="all", forbid_memory_oversubscription=False, compaction_mode="off"
    )
    assert (done.policy.hysteresis, done.policy.default_replicas, done.policy.generation) == (0.25, "all", 1)
    assert (done.policy.forbid_memory_oversubscription, done.policy.compaction_mode) == (False, "off")
    assert (done.warnings, done.persisted) == ((), False)
    assert gateway.set_policy(default_replicas=2).policy.default_replicas == 2
    assert gateway.status().policy.generation == 2


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"hysteresys": 0.1}, "'hysteresys'; did you mean hysteresis?"),
        ({"generation": 3}, "'generation'"),
        ({"mode": "round_robin"}, "'mode'"),
        ({"hysteresis": "much"}, "hysteresis is 'much'"),
        ({"compaction_interval": 1.5}, "compaction_interval is 1.5"),
        ({"compaction_interval": 1 << 70}, "compaction_interval is"),
        ({"default_replicas": 0}, "replicas is 0"),
        ({"default_replicas": -1}, "replicas is -1"),
        ({"default_replicas": "default"}, "wanted a whole number above 0, or all"),
        ({"default_replicas": 1.5}, "default_replicas is 1.5"),
    ],
)
def test_what_can_be_no_knob_is_refused_before_anybody_is_asked(served, gateway, knobs, said):
    with pytest.raises(UsageError) as raised:
        gateway.set_policy(**knobs)
    assert said in raised.value.message
    assert served.packing.knobs.generation == 0


def test_a_value_out_of_range_is_refused_with_the_words_of_the_gateway(gateway):
    with pytest.raises(InvalidRequest, match=r"hysteresis: 1\.5 is not accepted"):
        gateway.set_policy(hysteresis=1.5, default_replicas=2)
    with pytest.raises(InvalidRequest, match="update_mask is empty"):
        gateway.set_policy()
    assert gateway.status().policy.generation == 0


def test_what_is_not_given_for_a_model_stays_as_it_is(served, gateway):
    done = gateway.set_placement("m", replicas=5, fill_mode="inflight", fill_factor=0.5)
    assert (done.configured_replicas, done.effective_replicas) == (5, 2)
    assert (done.fill_mode, done.fill_quantum) == ("inflight", 4)
    assert done.warnings[0].startswith("5 replicas are wanted")
    done = gateway.set_placement("m", fill_mode="spread")
    assert (done.configured_replicas, done.fill_mode, done.fill_quantum) == (5, "spread", 4)
    done = gateway.set_placement("m", fill_factor=0)
    assert (done.configured_replicas, done.fill_mode, done.fill_quantum) == (5, "spread", 8)
    assert gateway.set_placement("m", replicas="all").configured_replicas == "all"
    done = gateway.set_placement("m", replicas="default", fill_mode="inherit")
    assert (done.configured_replicas, done.fill_mode) == ("default", "run")
    assert dict(served.packing.knobs.models) == {}


@pytest.mark.parametrize("replicas", [0, -1, 1.5, "some"])
def test_replicas_that_are_no_number_and_no_word_are_refused_here(gateway, replicas):
    with pytest.raises(UsageError, match="replicas is"):
        gateway.set_placement("m", replicas=replicas)


def test_a_fill_factor_below_zero_is_refused_here_because_it_means_unchanged_on_the_wire(gateway):
    for factor in (-1.0, float("nan")):
        with pytest.raises(UsageError, match="fill factor"):
            gateway.set_placement("m", fill_factor=factor)


def test_a_model_that_nobody_has_is_unknown_unless_it_may_be(gateway):
    with pytest.raises(UnknownModel):
        gateway.set_placement("new", replicas=2)
    assert gateway.set_placement("new", replicas=2, allow_unknown=True).configured_replicas == 2


def test_a_repack_is_waited_for_or_only_asked_for(served, gateway):
    done = gateway.repack(10.0)
    assert (done.completed, done.sequence, done.completed_sequence) == (True, 1, 1)
    assert done.repacks.last_trigger == "operator"
    served.automatic = False
    done = gateway.repack()
    assert (done.completed, done.sequence, done.waited_seconds) == (False, 2, 0.0)
    assert "queued" in done.warnings[0]
    with pytest.raises(InvalidRequest, match="wait_seconds is -1"):
        gateway.repack(-1.0)
    served.ready = []
    served.tick()
    with pytest.raises(NoWorkers):
        gateway.repack(1.0)


def test_callers_who_went_away_leave_their_place_to_others(served, gateway):
    served.automatic = False
    request = pb.RepackRequest(wait_seconds=60.0).SerializeToString()
    for _ in range(MAX_WAITING + 2):
        with pytest.raises(DeadlineExceeded):
            gateway._connection.call("Repack", request, 0.03)
        wait_until(lambda: served.control._waiting == 0)  # the gateway hears of it by itself


def test_a_wait_is_given_more_time_than_other_calls(served):
    with Gateway(served.url, timeout=0.5) as gateway:
        assert gateway.repack(10.0).completed


def test_workers_are_listed_added_drained_and_removed(gateway):
    assert [worker.name for worker in gateway.workers()] == ["a0", "a1"]
    done = gateway.add_worker("10.0.0.7:8001", metrics="10.0.0.7:8002", name="c0")
    assert not done.persisted
    assert done.worker == FleetWorker(
        worker="10.0.0.7:8001",
        name="c0",
        metrics="10.0.0.7:8002",
        source="control",
        ready=False,
        draining=False,
        inflight=0,
        waiting=0,
        incarnation="",
        discipline="",
        models=0,
    )
    with pytest.raises(NameTaken):
        gateway.add_worker("10.0.0.7:8001")
    assert gateway.drain_worker("c0").worker.draining
    assert not gateway.undrain_worker("10.0.0.7:8001").worker.draining
    assert gateway.remove_worker("c0").worker.name == "c0"
    with pytest.raises(UnknownWorker, match="no worker 'c0'"):
        gateway.remove_worker("c0")


def test_a_gateway_that_lets_nobody_change_anything_says_so():
    with ControlledGateway(control=False) as served, served.serving() as url, Gateway(url) as gateway:
        served.start()
        assert gateway.status().mode == "lpt_packing"
        assert len(gateway.workers()) == 2
        for change in (
            gateway.repack,
            lambda: gateway.set_policy(hysteresis=0.1),
            lambda: gateway.set_placement("m", replicas=2),
            lambda: gateway.add_worker("h:1"),
        ):
            with pytest.raises(WrongState, match="lets nobody change anything") as raised:
                change()
            assert raised.value.reason == "control_off"


def test_a_worker_is_no_gateway():
    with StubServer() as server, Gateway(server.url) as gateway, pytest.raises(Unimplemented):
        gateway.status()


def test_nobody_there_is_unreachable():
    with StubServer() as server:
        url = server.url
    with Gateway(url) as gateway, pytest.raises(ServerUnreachable):
        gateway.status()


def test_the_service_answers_whoever_speaks_its_protocol(served):
    """As grpcurl would: messages and paths alone, without our client."""
    with grpc.insecure_channel(served.url) as channel:
        call = channel.unary_unary("/reactant_control.GatewayControlService/SetModelPlacement", None, None)
        with pytest.raises(grpc.RpcError) as raised:
            call(b"\xff\xff", timeout=30)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # A client that knows only the fields of the specification: a factor of 0 takes the model's own one back.
        for factor, quantum in ((0.5, 4), (0.0, 8)):
            request = pb.SetModelPlacementRequest(name="m", replicas=2, fill_factor=factor)
            answer = pb.SetModelPlacementResponse.FromString(call(request.SerializeToString(), timeout=30))
            assert (answer.configured_replicas, answer.fill_quantum) == (2, quantum)
