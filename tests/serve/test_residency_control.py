"""The control plane over gRPC on loopback: real engine, registry and scheduler, a residency that does as it is told."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from support.bundles import write_affine, write_model
from support.deadlines import overdue
from support.residency import SECONDS, ScriptedResidency, cold

from rsrv.client import Control
from rsrv.core.config import EndpointsConfig, RuntimeConfig, SchedulerConfig, ServerConfig
from rsrv.core.config.sections import ModelSchedulingConfig
from rsrv.core.errors import (
    DeviceOutOfMemory,
    InvalidRequest,
    ResidencyRefused,
    ServerStopping,
    UnknownModel,
    WeightsUnavailable,
)
from rsrv.protos import control as pb
from rsrv.protos import inference
from rsrv.rpc import GrpcioEngine
from rsrv.serve import serve
from rsrv.serve.control import MAX_OPERATIONS, SERVICE, ControlService
from rsrv.serve.lifecycle import Lifecycle
from rsrv.serve.residency.floors import Floor
from rsrv.serve.services import SERVICE as V2
from rsrv.serve.services import Services


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine")
    tensor = ((2, 3), np.float32)
    write_model(repo / "single", lambda x: (x,), {"x": tensor}, {"y": tensor}, batch_sizes=None)
    write_affine(repo / "broken")
    (repo / "broken" / "model.b4.mlir").write_bytes(b"nonsense")
    patch = pytest.MonkeyPatch()
    patch.setenv("RSRV_ALLOW_FAKE", "1")
    config = ServerConfig(
        model_dirs=[str(repo)],
        runtime=RuntimeConfig(backend="fake"),
        endpoints=EndpointsConfig(grpc_port=0, http_port=0),
        scheduler=SchedulerConfig(models={"affine": ModelSchedulingConfig(max_batch_size=4, weight=2.0)}),
    )
    server = serve(config, blocking=False)
    yield server
    server.stop()
    patch.undo()


class Face:
    """Control and inference services of `server` on a port of their own, over another residency and lifecycle."""

    def __init__(self, server, residency):
        self.residency = residency
        self.moved = queue.SimpleQueue()
        self.lifecycle = Lifecycle(server.registry, "any")
        self.lifecycle.enter("serving")
        shared = {"registry": server.registry, "lifecycle": self.lifecycle, "scheduler": server.scheduler}
        self.control = ControlService(**shared, residency=residency, on_moved=lambda: self.moved.put(True))
        services = Services(**shared, counters=server.counters, regions=None, residency=residency)
        self.engine = GrpcioEngine(
            {**self.control.routes(), **services.routes()},
            host="127.0.0.1",
            port=0,
            threads=MAX_OPERATIONS + 8,
            max_recv_bytes=1 << 20,
            max_send_bytes=1 << 20,
        )
        self.url = f"127.0.0.1:{self.engine.bind()}"
        self.services = services
        self.engine.start()
        self.channel = grpc.insecure_channel(self.url)
        self.client = Control(self.url, channel=self.channel)

    def close(self):
        if self.residency is not None:
            self.residency.gate.set()
        self.control.close()
        self.channel.close()
        self.engine.stop(0)

    def call(self, method, timeout=SECONDS, **fields):
        request, response = getattr(pb, f"{method}Request"), getattr(pb, f"{method}Response")
        body = request(**fields).SerializeToString()
        return response.FromString(self.channel.unary_unary(f"/{SERVICE}/{method}")(body, timeout=timeout))

    def refused(self, method, **fields):
        """Code, reason and text of the error that a call ends with."""
        with pytest.raises(grpc.RpcError) as error:
            self.call(method, **fields)
        reason = dict(error.value.trailing_metadata()).get("rsrv-reason")
        return error.value.code().name, reason, error.value.details()

    def index(self, ready=False):
        body = inference.RepositoryIndexRequest(ready=ready).SerializeToString()
        answer = self.channel.unary_unary(f"/{V2}/RepositoryIndex")(body, timeout=SECONDS)
        rows = inference.RepositoryIndexResponse.FromString(answer).models
        return {row.name: (row.state, row.reason) for row in rows}


@pytest.fixture
def face(server):
    face = Face(server, ScriptedResidency(affine=cold(), single=cold(nbytes=0)))
    yield face
    face.close()


@pytest.fixture
def bare(server):
    """A server whose weights are resident for good, and that has no residency at all."""
    face = Face(server, None)
    yield face
    face.close()


# --- ModelControlStatus ---------------------------------------------------------------------------------------------


def test_the_incarnation_is_the_same_while_a_server_runs_and_another_after_it_starts_anew(server, face):
    told = [face.call("ModelControlStatus").incarnation for _ in range(2)]
    assert told[0] == told[1] != ""
    other = Face(server, face.residency)
    assert other.call("ModelControlStatus").incarnation not in ("", told[0])
    other.close()


def test_status_has_a_row_for_each_model_that_can_answer(face):
    face.residency.places["affine"] = cold(nbytes=24, floor=Floor.SYSTEM)
    status = face.call("ModelControlStatus")
    assert (status.residency_mode, status.discipline) == ("externally_managed", "fair")
    assert status.weight_cache_max_bytes == 800
    affine, single = status.models
    assert (affine.name, affine.residency, affine.weight_nbytes) == ("affine", pb.PINNED_SYSTEM, 24)
    assert (affine.device_resident, affine.host_resident) == (False, False)
    assert (affine.weight, affine.queue_depth) == (2.0, 0)
    assert (affine.max_batch_size, affine.batch_input_name, affine.batch_axis) == (4, "x", 1)
    assert (single.name, single.residency) == ("single", pb.UNPINNED)
    assert (single.max_batch_size, single.batch_input_name, single.batch_axis) == (0, "", 0)


def test_status_counts_what_a_model_did(server, bare):
    from rsrv.client import KServeModel

    def row():
        return next(row for row in bare.client.status().models if row.name == "affine")

    before = row()
    with KServeModel(f"127.0.0.1:{server.grpc_port}", "affine", shared_memory="off") as model:
        model.infer({"x": np.ones((3, 3), np.float32)})
    after = row()
    assert after.requests_served == before.requests_served + 1
    assert after.rows_served == before.rows_served + 3
    assert after.dispatch_count == before.dispatch_count + 1
    assert after.compute_seconds > before.compute_seconds


def test_without_a_budget_everything_is_on_the_device_and_memory_is_no_constraint(bare, face):
    face.residency.on_demand, face.residency.mode = False, "self_managed"
    face.residency.places.clear()
    for status in (bare.client.status(), face.client.status()):
        assert (status.residency_mode, status.weight_cache_max_bytes) == ("self_managed", 0)
        assert [(row.floor, row.device_resident, row.host_resident) for row in status.models] == [
            ("unpinned", True, False),
            ("unpinned", True, False),
        ]
        assert [row.weight_nbytes for row in status.models] == [24, 0]


def test_a_budget_that_pinned_models_used_up_is_still_a_constraint(face):
    face.residency.places["affine"] = cold(nbytes=5000, floor=Floor.DEVICE)
    assert face.client.status().weight_cache_max_bytes == 1


# --- SetModelResidency ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", ["device", "system", "unpinned"])
def test_an_operator_moves_weights_and_is_told_the_floor_that_was_reached(face, floor):
    assert face.client.set_residency("affine", floor) == floor
    assert face.residency.asked == [("floor", "affine", Floor(floor))]
    face.moved.get(timeout=SECONDS)
    row = next(row for row in face.client.status().models if row.name == "affine")
    assert row.floor == floor
    assert row.device_resident is (floor == "device")
    assert row.host_resident is (floor == "system")


@pytest.mark.parametrize("target", [0, 4, -1])
def test_a_target_that_is_no_floor_is_invalid_whatever_else_is_wrong(face, bare, target):
    for where in (face, bare):
        code, reason, text = where.refused("SetModelResidency", name="nobody", target=target)
        assert (code, reason) == ("INVALID_ARGUMENT", "invalid")
        assert "wanted UNPINNED (1), PINNED_SYSTEM (2) or PINNED_DEVICE (3)" in text
    assert face.residency.asked == []


def test_preconditions_are_checked_in_their_order_cache_then_mode_then_name(face, bare):
    for where in (face, bare):
        if where is face:
            face.residency.on_demand, face.residency.mode = False, "self_managed"
        code, reason, text = where.refused("SetModelResidency", name="nobody", target=pb.PINNED_DEVICE)
        assert (code, reason) == ("FAILED_PRECONDITION", "residency")
        assert "has no budget" in text
    face.residency.on_demand = True
    code, reason, text = face.refused("SetModelResidency", name="nobody", target=pb.PINNED_DEVICE)
    assert (code, reason) == ("FAILED_PRECONDITION", "residency")
    assert "moves weights itself" in text
    assert "model_control_mode: explicit" in text
    face.residency.mode = "externally_managed"
    assert face.refused("SetModelResidency", name="nobody", target=pb.PINNED_DEVICE)[:2] == (
        "NOT_FOUND",
        "unknown_model",
    )
    assert face.residency.asked == []


def test_a_model_that_failed_cannot_be_moved(face):
    code, reason, text = face.refused("SetModelResidency", name="broken", target=pb.PINNED_DEVICE)
    assert (code, reason) == ("UNAVAILABLE", "failed")
    assert "broken" in text


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (DeviceOutOfMemory("it does not fit"), "RESOURCE_EXHAUSTED", "device_oom"),
        (WeightsUnavailable("the file is gone"), "UNAVAILABLE", "weights_unavailable"),
        (UnknownModel("it went away"), "NOT_FOUND", "unknown_model"),
        (ServerStopping("the server is stopping"), "UNAVAILABLE", "stopping"),
    ],
)
def test_what_goes_wrong_while_weights_move_keeps_its_type(face, error, code, reason):
    face.residency.error = error
    found = face.refused("SetModelResidency", name="affine", target=pb.PINNED_DEVICE)
    assert found == (code, reason, error.message)
    assert face.refused("CompactMemory")[:2] == (code, reason)
    with pytest.raises(type(error)) as caught:
        face.client.set_residency("affine", "device")
    assert caught.value.message == error.message


def test_a_fault_of_ours_is_internal_and_not_told(face, caplog):
    face.residency.error = ValueError("secret")
    assert face.refused("SetModelResidency", name="affine", target=pb.UNPINNED) == (
        "INTERNAL",
        "internal",
        "internal error",
    )
    assert "secret" in caplog.text


# --- SetModelPolicy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["face", "bare"])
def test_a_share_is_changed_in_every_mode(request, server, which):
    where = request.getfixturevalue(which)
    where.client.set_policy("affine", weight=5.0)
    assert server.scheduler.stats()["affine"].weight == 5.0
    where.client.set_policy("affine", weight=2.0)
    where.client.set_policy("affine")
    assert server.scheduler.stats()["affine"].weight == 2.0


def test_a_weight_counts_only_when_it_is_said_to_be_there(bare, server):
    bare.call("SetModelPolicy", name="affine", weight=9.0)
    assert server.scheduler.stats()["affine"].weight == 2.0


def test_without_a_weight_only_the_name_has_to_be_known(bare):
    bare.call("SetModelPolicy", name="broken")
    assert bare.refused("SetModelPolicy", name="nobody")[:2] == ("NOT_FOUND", "unknown_model")
    assert bare.refused("SetModelPolicy", name="")[:2] == ("NOT_FOUND", "unknown_model")


def test_shares_of_unknown_and_failed_models_cannot_be_set(bare):
    fields = {"has_weight": True, "weight": 1.0}
    assert bare.refused("SetModelPolicy", name="nobody", **fields)[:2] == ("NOT_FOUND", "unknown_model")
    assert bare.refused("SetModelPolicy", name="broken", **fields)[:2] == ("UNAVAILABLE", "failed")


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_invalid(bare, weight):
    code, reason, _ = bare.refused("SetModelPolicy", name="affine", has_weight=True, weight=weight)
    assert (code, reason) == ("INVALID_ARGUMENT", "invalid")
    with pytest.raises(InvalidRequest):
        bare.client.set_policy("affine", weight=weight)


# --- CompactMemory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["self_managed", "externally_managed"])
def test_memory_is_compacted_in_every_mode(face, mode, caplog):
    caplog.set_level("INFO")
    face.residency.mode = mode
    done = face.client.compact(["affine", "nobody"])
    assert (done.reloaded, done.resident_bytes) == (2, 24)
    assert face.residency.asked == [("compact", "affine", "nobody")]
    face.moved.get(timeout=SECONDS)
    assert "memory compacted by an operator reloaded=2 requested=2 resident_bytes=24" in caplog.messages


def test_without_a_budget_there_is_nothing_to_compact(face, bare):
    face.residency.on_demand = False
    for where in (face, bare):
        done = where.client.compact(["affine"])
        assert (done.reloaded, done.resident_bytes) == (0, 0)


# --- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["stopping", "stopped", "failed"])
def test_a_server_that_stops_changes_nothing_and_still_tells(face, state):
    face.lifecycle.enter(state)
    for method, fields in (
        ("SetModelResidency", {"name": "affine", "target": pb.PINNED_DEVICE}),
        ("SetModelPolicy", {"name": "affine", "has_weight": True, "weight": 3.0}),
        ("CompactMemory", {}),
    ):
        code, reason, text = face.refused(method, **fields)
        assert (code, reason) == ("UNAVAILABLE", "stopping")
        assert f"the server is {state}" in text
    assert face.residency.asked == []
    assert len(face.client.status().models) == 2


@pytest.mark.parametrize("method", ["ModelControlStatus", "SetModelResidency", "SetModelPolicy", "CompactMemory"])
def test_a_body_that_is_no_message_is_invalid(bare, method):
    with pytest.raises(grpc.RpcError) as error:
        bare.channel.unary_unary(f"/{SERVICE}/{method}")(b"\xff\xff\xff", timeout=SECONDS)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_status_and_policy_answer_while_weights_move(face):
    face.residency.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(face.client.set_residency, "affine", "device")
        assert face.residency.entered.wait(SECONDS)
        assert len(face.client.status().models) == 2
        face.client.set_policy("affine", weight=2.0)
        assert face.refused("SetModelResidency", name="affine", target=0)[0] == "INVALID_ARGUMENT"
        assert not moving.done()
        face.residency.gate.set()
        assert moving.result(SECONDS) == "device"


def test_weights_are_moved_one_call_at_a_time_and_only_so_many_may_wait(face):
    face.residency.gate.clear()
    with ThreadPoolExecutor(MAX_OPERATIONS) as pool:
        moving = [pool.submit(face.client.set_residency, "affine", "device") for _ in range(MAX_OPERATIONS)]
        assert face.residency.entered.wait(SECONDS)
        wait_until(lambda: face.control._open == MAX_OPERATIONS)
        assert face.refused("CompactMemory")[:2] == ("RESOURCE_EXHAUSTED", "shed")
        assert len(face.residency.asked) == 1
        face.residency.gate.set()
        assert {future.result(SECONDS) for future in moving} == {"device"}
    assert len(face.residency.asked) == MAX_OPERATIONS
    assert face.client.compact().reloaded == 0


def test_a_caller_that_left_before_its_turn_moves_nothing(face):
    face.residency.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(face.client.set_residency, "affine", "device")
        assert face.residency.entered.wait(SECONDS)
        body = pb.CompactMemoryRequest().SerializeToString()
        late = face.channel.unary_unary(f"/{SERVICE}/CompactMemory").future(body, timeout=SECONDS)
        wait_until(lambda: face.control._open == 2)
        late.cancel()
        wait_until(lambda: len(face.engine.open_calls) == 1)
        face.residency.gate.set()
        first.result(SECONDS)
    wait_until(lambda: face.control._open == 0)
    assert face.residency.asked == [("floor", "affine", Floor.DEVICE)]


def test_what_waits_is_refused_when_the_server_stops_meanwhile(face):
    face.residency.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(face.client.set_residency, "affine", "device")
        assert face.residency.entered.wait(SECONDS)
        second = pool.submit(face.client.compact)
        wait_until(lambda: face.control._open == 2)
        face.lifecycle.enter("stopping")
        face.residency.gate.set()
        assert first.result(SECONDS) == "device"
        with pytest.raises(ServerStopping):
            second.result(SECONDS)


def test_a_deadline_ends_the_wait_for_the_answer_and_not_the_move(face):
    face.residency.gate.clear()

    def move(seconds):
        with pytest.raises(grpc.RpcError) as error:
            face.call("SetModelResidency", timeout=seconds, name="affine", target=pb.PINNED_DEVICE)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    overdue(move, face.residency.entered.is_set)
    face.residency.gate.set()
    face.moved.get(timeout=SECONDS)
    assert face.residency.places["affine"].floor is Floor.DEVICE


def wait_until(condition):
    """For what another thread does right away; the test's own time limit bounds it."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.001)


# --- what it does to readiness --------------------------------------------------------------------------------------


def test_in_explicit_mode_a_model_is_ready_where_its_weights_are(face):
    assert face.index() == {
        "affine": ("UNAVAILABLE", "not resident"),
        "broken": ("UNAVAILABLE", face.index()["broken"][1]),
        "single": ("UNAVAILABLE", "not resident"),
    }
    assert not face.services.is_model_ready("affine")
    assert face.services.is_serving("affine") is False
    face.client.set_residency("affine", "device")
    assert face.index(ready=True) == {"affine": ("READY", "")}
    assert face.services.is_model_ready("affine")
    assert face.services.is_serving("affine") is True
    assert face.services.is_serving("nobody") is None


def test_a_server_that_moves_weights_itself_is_ready_with_cold_models(face):
    face.residency.mode = "self_managed"
    assert face.index(ready=True) == {"affine": ("READY", ""), "single": ("READY", "")}


def test_a_server_that_stops_says_so_and_not_where_weights_are(face):
    face.lifecycle.enter("stopping")
    assert face.index()["affine"] == ("UNAVAILABLE", "the server is stopping")


# --- a whole server -------------------------------------------------------------------------------------------------


def test_a_server_answers_control_calls_tells_of_them_and_has_no_budget_by_default(server):
    from rsrv.client import Server

    url = f"127.0.0.1:{server.grpc_port}"
    with Server(url) as asked:
        assert "rsrv_control" in asked.metadata().extensions
    with Control(url) as control:
        assert [row.name for row in control.status().models] == ["affine", "single"]
        with pytest.raises(ResidencyRefused, match="has no budget"):
            control.set_residency("affine", "device")
        assert control.compact().resident_bytes == 0


def test_reflection_tells_of_the_control_service(server):
    from rsrv.protos import reflection

    body = reflection.ServerReflectionRequest(list_services="").SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stream = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        [answer] = [
            reflection.ServerReflectionResponse.FromString(message) for message in stream(iter([body]), timeout=SECONDS)
        ]
    assert SERVICE in {service.name for service in answer.list_services_response.service}
