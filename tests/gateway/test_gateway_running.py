"""A whole gateway in this process in front of scripted workers: its start, its faces, its fleet, its stop."""

import http.client
import json
import logging
import socket
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import grpc
import pytest
from support.gateway_site import request_body, wait_until
from support.mock_worker import MockModel, MockWorker
from support.ports import held_port

from rsrv.core.config import GatewayConfig
from rsrv.core.errors import Code, ConfigError, NoWorkers, PortTaken, ServerStopping
from rsrv.gateway import RunningGateway, serve_gateway
from rsrv.protos import control as cp
from rsrv.protos import health
from rsrv.protos import inference as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
READY = "/inference.GRPCInferenceService/ServerReady"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
CONTROL = "/reactant_control.GatewayControlService/"
WAIT = 20
ANY = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0"}


class Client:
    def __init__(self, gateway):
        self.gateway = gateway
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{gateway.grpc_port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def call(self, path, body=b"", timeout=WAIT):
        return self.channel.unary_unary(path)(body, timeout=timeout)

    def infer(self, model="m"):
        return pb.ModelInferResponse.FromString(self.call(INFER, request_body(model))).model_name

    def control(self, method, request, answer):
        return answer.FromString(self.call(CONTROL + method, request.SerializeToString()))

    def http(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.http_port, timeout=WAIT)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rsrv-gateway-t")] == []


@pytest.fixture
def gateway_of(stack):
    """`gateway_of(mock, …, scheduling=…)`: a client of a running gateway with these workers."""

    def make(*mocks, **config):
        config = {"listen": ANY, "health_interval_seconds": 0.1, **config}
        gateway = serve_gateway(GatewayConfig(endpoints=[mock.url for mock in mocks], **config), blocking=False)
        stack.callback(gateway.stop, 0.0)
        client = Client(gateway)
        stack.callback(client.channel.close)
        return client

    return make


# --- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["round_robin", "least_outstanding", "lpt_packing"])
def test_in_every_mode_it_answers_as_soon_as_it_has_started(mode, stack, gateway_of):
    mocks = [stack.enter_context(MockWorker(["m"])) for _ in range(2)]
    client = gateway_of(*mocks, scheduling={"mode": mode})
    assert [client.infer() for _ in range(4)] == ["m"] * 4
    assert sum(mock.count("ModelInfer") for mock in mocks) == 4
    assert client.gateway.mode.name == mode
    assert client.http("/readyz") == (200, "ok")
    assert client.http("/healthz")[0] == 200
    assert f'mode="{mode}"' in client.http("/metrics")[1]
    overview = json.loads(client.http("/v1/gateway")[1])
    assert (overview["mode"], overview["ready"]) == (mode, True)
    assert pb.ServerReadyResponse.FromString(client.call(READY)).ready


def test_the_first_placement_is_on_all_workers_that_answer_and_stays_so(stack, gateway_of):
    models = {name: MockModel(weight_nbytes=100) for name in "ab"}
    mocks = [stack.enter_context(MockWorker(models)) for _ in range(2)]
    client = gateway_of(*mocks, scheduling={"mode": "lpt_packing"})
    prober, rounds = client.gateway.prober, client.gateway.prober.rounds
    wait_until(lambda: prober.rounds >= rounds + 2)
    status = client.control("GetSchedulingStatus", cp.GetSchedulingStatusRequest(), cp.GetSchedulingStatusResponse)
    assert status.mode == "lpt_packing"
    placed = json.loads(client.http("/v1/gateway")[1])["placement"]
    assert placed["repacks"] == {"startup": 1}
    assert sorted(at["worker"] for homes in placed["models"].values() for at in homes) == sorted(m.url for m in mocks)


def test_readiness_follows_the_workers_over_all_faces(stack, gateway_of):
    mock = stack.enter_context(MockWorker(["m"]))
    client = gateway_of(mock)
    watch = client.channel.unary_stream(WATCH)(b"", timeout=WAIT)
    answers = (health.HealthCheckResponse.FromString(body).status for body in watch)
    assert next(answers) == health.HealthCheckResponse.SERVING
    mock.live_ready = False
    assert next(answers) == health.HealthCheckResponse.NOT_SERVING
    wait_until(lambda: client.http("/readyz")[0] == 503)
    assert not pb.ServerReadyResponse.FromString(client.call(READY)).ready
    assert client.http("/healthz")[0] == 200
    mock.live_ready = True
    assert next(answers) == health.HealthCheckResponse.SERVING
    watch.cancel()


def test_reflection_and_health_name_the_services(stack, gateway_of):
    client = gateway_of(stack.enter_context(MockWorker()))
    request = b"\x3a\x00"  # list_services of grpc.reflection.v1.ServerReflectionRequest
    path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    answer = next(client.channel.stream_stream(path)(iter([request]), timeout=WAIT))
    for name in (b"inference.GRPCInferenceService", b"reactant_control.GatewayControlService", b"grpc.health.v1"):
        assert name in answer
    assert health.HealthCheckResponse.FromString(client.call(CHECK)).status == 1


def test_an_unreachable_worker_keeps_nothing_from_starting_and_joins_later(stack, gateway_of):
    late = stack.enter_context(MockWorker(["late"]))
    late.close()
    mock = stack.enter_context(MockWorker(["m"]))
    client = gateway_of(mock, late, scheduling={"mode": "lpt_packing"})
    assert client.infer() == "m"
    late.restart()
    wait_until(lambda: client.gateway.router.table.urls("late"))
    assert client.infer("late") == "late"


def test_a_worker_that_is_added_raises_how_many_requests_may_be_open(stack, gateway_of):
    first, second = (stack.enter_context(MockWorker(["m"])) for _ in range(2))
    client = gateway_of(first, grpc={"max_concurrent_requests_per_worker": 40})
    assert client.gateway._engine.threads._size == 40 + 32
    added = client.control("AddWorker", cp.AddWorkerRequest(worker=second.url, name="new"), cp.AddWorkerResponse)
    assert added.worker.name == "new"
    assert client.gateway._engine.threads._size == 80 + 32
    wait_until(lambda: len(client.gateway.router.table.urls("m")) == 2)
    wait_until(lambda: client.infer() and second.count("ModelInfer"))
    assert client.gateway.admission.cap == 80


def test_what_operators_change_outlives_a_restart(stack, gateway_of, tmp_path):
    mock, other = (stack.enter_context(MockWorker(["m"])) for _ in range(2))
    state = str(tmp_path / "gateway.json")
    client = gateway_of(mock, state_file=state, scheduling={"mode": "lpt_packing"})
    client.control("AddWorker", cp.AddWorkerRequest(worker=other.url, name="added"), cp.AddWorkerResponse)
    request = cp.SetModelPlacementRequest(name="m", replicas=2)
    assert client.control("SetModelPlacement", request, cp.SetModelPlacementResponse).persisted
    client.gateway.stop(0.0)

    again = gateway_of(mock, state_file=state, scheduling={"mode": "lpt_packing"})
    assert [worker.name for worker in again.gateway.fleet.workers] == [mock.url, "added"]
    assert again.gateway.mode.knobs.override("m").replicas == 2


# --- starts that fail -----------------------------------------------------------------------------------------------


def test_packing_does_not_start_without_workers(gateway_of):
    with pytest.raises(NoWorkers, match="lpt_min_workers") as caught:
        serve_gateway(
            GatewayConfig(endpoints=["127.0.0.1:1"], listen=ANY, scheduling={"mode": "lpt_packing"}), blocking=False
        )
    assert caught.value.exit_code == 1


def test_it_is_alive_and_not_ready_while_it_waits_for_workers():
    config = GatewayConfig(
        endpoints=["127.0.0.1:1"],
        listen=ANY,
        scheduling={"mode": "lpt_packing"},
        startup={"wait_seconds": "forever"},
    )
    gateway, outcome = RunningGateway(config), []

    def start():
        try:
            gateway.start()
        except ServerStopping as error:
            outcome.append(error)

    gateway.open()
    starting = threading.Thread(target=start)
    starting.start()
    client = Client(gateway)
    try:
        assert client.http("/healthz")[0] == 200
        assert client.http("/readyz") == (503, "not ready")
        assert gateway.grpc_port is None
    finally:
        gateway.stop()
        starting.join(WAIT)
        client.channel.close()
    assert len(outcome) == 1


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_a_port_that_is_taken_is_a_configuration_error(face):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = {**ANY, face: f"127.0.0.1:{taken.getsockname()[1]}"}
        with pytest.raises(PortTaken) as caught:
            serve_gateway(GatewayConfig(endpoints=["127.0.0.1:1"], listen=listen), blocking=False)
    assert caught.value.exit_code == 78


def test_a_damaged_state_file_is_a_configuration_error(tmp_path):
    state = tmp_path / "state.json"
    state.write_text("{")
    with pytest.raises(ConfigError, match="state_file"):
        RunningGateway(GatewayConfig(endpoints=["127.0.0.1:1"], state_file=str(state)))


def test_a_file_is_read_with_its_variables(tmp_path, stack, monkeypatch):
    mock = stack.enter_context(MockWorker(["m"]))
    path = tmp_path / "gateway.yaml"
    path.write_text("listen: {grpc: '127.0.0.1:0', http: null}\nendpoints: ['127.0.0.1:1']\n")
    monkeypatch.setenv("RSRV_GATEWAY_WORKERS", mock.url)
    told = []
    gateway = serve_gateway(path, blocking=False, on_listening=told.append)
    stack.callback(gateway.stop, 0.0)
    assert told == [gateway]
    assert gateway.http_port is None
    client = Client(gateway)
    stack.callback(client.channel.close)
    assert client.infer() == "m"


def test_warnings_of_the_configuration_and_of_workers_are_logged(stack, gateway_of, caplog):
    caplog.set_level(logging.INFO)
    first = stack.enter_context(MockWorker({"m": MockModel()}, discipline="fair"))
    second = stack.enter_context(MockWorker(["m", "n"]))
    gateway_of(first, second, scheduling={"mode": "lpt_packing", "max_worker_share": 0.5})
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("scheduling.max_worker_share" in text for text in texts)
    assert any("fair" in text and first.url in text for text in texts)
    assert any(first.url in text and "n" in text and "other workers" in text for text in texts)


# --- the stop -------------------------------------------------------------------------------------------------------


def test_a_stop_lets_what_is_in_progress_finish_and_refuses_the_rest(stack, gateway_of):
    mock = stack.enter_context(MockWorker(["m"]))
    client = gateway_of(mock)
    mock.hang("ModelInfer")
    future = client.channel.unary_unary(INFER).future(request_body(), timeout=WAIT)
    wait_until(lambda: mock.count("ModelInfer") == 1)
    stopper = threading.Thread(target=client.gateway.stop, args=(WAIT,))
    stopper.start()
    wait_until(lambda: client.gateway._engine.stopping)
    assert client.http("/readyz")[0] == 503
    with pytest.raises(grpc.RpcError) as caught:
        client.infer()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(caught.value.trailing_metadata())["rsrv-reason"] == "stopping"
    mock.resume("ModelInfer")
    assert pb.ModelInferResponse.FromString(future.result(WAIT)).model_name == "m"
    stopper.join(WAIT)
    assert not stopper.is_alive()


def test_what_outlives_the_grace_is_cancelled_at_the_worker_too(stack, gateway_of):
    mock = stack.enter_context(MockWorker(["m"]))
    client = gateway_of(mock)
    mock.hang("ModelInfer")
    future = client.channel.unary_unary(INFER).future(request_body(), timeout=WAIT)
    wait_until(lambda: mock.count("ModelInfer") == 1)
    client.gateway.stop(0.05)
    assert future.exception(WAIT).code() is grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: mock.cancelled.get("ModelInfer"))
    mock.resume("ModelInfer")


def test_a_lame_duck_is_not_ready_and_still_serves(stack, gateway_of, monkeypatch):
    mock = stack.enter_context(MockWorker(["m"]))
    client = gateway_of(mock, lame_duck_seconds=0.5)
    slept, over = [], threading.Event()
    ours = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: (slept.append(seconds), over.wait(WAIT)))
    monkeypatch.setattr("rsrv.gateway.gateway.time", ours)  # the time that it has lasts until we have looked
    stopper = threading.Thread(target=client.gateway.stop)
    stopper.start()
    wait_until(lambda: client.http("/readyz")[0] == 503)
    assert health.HealthCheckResponse.FromString(client.call(CHECK)).status == 2
    assert client.infer() == "m"
    over.set()
    stopper.join(WAIT)
    assert not stopper.is_alive()
    assert slept == [0.5]


def test_a_second_stop_changes_nothing_and_no_thread_is_left(stack, gateway_of):
    client = gateway_of(stack.enter_context(MockWorker(["m"])))
    assert client.infer() == "m"
    client.gateway.stop()
    client.gateway.stop()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("rsrv-gateway")])


def test_who_runs_it_is_told_when_only_another_process_can_help(stack, gateway_of):
    mock = stack.enter_context(MockWorker(["m"]))
    client = gateway_of(mock, wedge_exit_rounds=2)
    told = threading.Event()
    client.gateway.on_lost = lambda error: told.set() if isinstance(error, NoWorkers) else None
    client.gateway.prober._probe_seconds = 0.05
    mock.hang("ServerReady")
    assert told.wait(WAIT)
    mock.resume("ServerReady")


# --- the fleet's followers --------------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_noticed_and_left_out(stack, gateway_of):
    first, second = (stack.enter_context(MockWorker(["m"])) for _ in range(2))
    client = gateway_of(first, second)
    second.close()
    wait_until(lambda: len(client.gateway.fleet.ready) == 1)
    assert [client.infer() for _ in range(3)] == ["m"] * 3
    second.restart()
    wait_until(lambda: len(client.gateway.fleet.ready) == 2)
    wait_until(lambda: client.infer() and second.seen("ModelInfer"))


def test_a_failing_worker_is_asked_last(stack, gateway_of):
    first, second = (stack.enter_context(MockWorker(["m"])) for _ in range(2))
    client = gateway_of(first, second, outliers={"cooldown_seconds": 60.0})
    first.fail("ModelInfer", Code.UNAVAILABLE, times=1)
    wait_until(lambda: client.infer() and first.count("ModelInfer"))
    before = first.count("ModelInfer")
    for _ in range(6):
        client.infer()
    assert first.count("ModelInfer") == before


def test_a_worker_that_leaves_is_forgotten_by_all(stack, gateway_of):
    first, second = (stack.enter_context(MockWorker(["m"])) for _ in range(2))
    client = gateway_of(first, second)
    client.control("RemoveWorker", cp.RemoveWorkerRequest(worker=second.url), cp.RemoveWorkerResponse)
    assert client.gateway.router.table.urls("m") == (first.url,)
    assert set(client.gateway._attendance._members) == {first.url}
    assert set(client.gateway.router.standing._records) == {first.url}


def test_a_drained_worker_gets_nothing_new(stack, gateway_of):
    first, second = (stack.enter_context(MockWorker(["m"])) for _ in range(2))
    client = gateway_of(first, second)
    client.control("DrainWorker", cp.DrainWorkerRequest(worker=second.url), cp.DrainWorkerResponse)
    for _ in range(6):
        client.infer()
    assert second.count("ModelInfer") == 0
    client.control("UndrainWorker", cp.UndrainWorkerRequest(worker=second.url), cp.UndrainWorkerResponse)
    wait_until(lambda: client.infer() and second.count("ModelInfer"))


def test_a_gateway_that_is_listed_as_its_own_worker_asks_itself_once_and_no_more(stack, caplog):
    worker = stack.enter_context(MockWorker())
    own = f"127.0.0.1:{stack.enter_context(held_port()).getsockname()[1]}"
    config = GatewayConfig(
        endpoints=[worker.url, own], listen={"grpc": own, "http": "127.0.0.1:0"}, health_interval_seconds=0.1
    )
    gateway = serve_gateway(config, blocking=False)
    stack.callback(gateway.stop, 0.0)
    client = Client(gateway)
    stack.callback(client.channel.close)
    for _ in range(5):
        assert client.infer() == "m"
    seen = worker.count("RepositoryIndex")
    index = pb.RepositoryIndexResponse.FromString(client.call("/inference.GRPCInferenceService/RepositoryIndex"))
    assert [model.name for model in index.models] == ["m"]
    wait_until(lambda: worker.count("RepositoryIndex") >= seen + 3)
    assert [one.ready for one in gateway.fleet.workers] == [True, False]
    assert gateway.router.table.urls("m") == (worker.url,)
