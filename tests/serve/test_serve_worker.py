"""A whole server in this process, on a fake device: bring-up, what it answers meanwhile, other RPCs, and its stop."""

import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from support.bundles import N, write_affine, write_model

from rsrv.core.config import (
    EndpointsConfig,
    GrpcConfig,
    HooksConfig,
    RuntimeConfig,
    SchedulerConfig,
    ServerConfig,
    ShmConfig,
    StartupConfig,
)
from rsrv.core.config.sections import BatchingConfig, FakeDeviceConfig, ModelSchedulingConfig
from rsrv.core.errors import ConfigError, PortTaken
from rsrv.core.shm import OwnedRegion
from rsrv.core.wire import RequestedOutput, ShmInput, decode_response, encode_request, join
from rsrv.protos import POOL, health, services
from rsrv.protos import inference as pb
from rsrv.serve import observe, serve, serve_worker
from rsrv.serve.loading import Loader
from rsrv.serve.residency.manager import Residency
from rsrv.serve.worker import RunningServer

V2 = "/inference.GRPCInferenceService/"


@pytest.fixture(autouse=True)
def _fake_is_allowed(monkeypatch):
    monkeypatch.setenv("RSRV_ALLOW_FAKE", "1")


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine")
    write_model(
        repo / "single", lambda x: (x,), {"x": ((2, 3), np.float32)}, {"y": ((2, 3), np.float32)}, batch_sizes=None
    )
    return repo


def config(repo, **sections):
    return ServerConfig(
        **{
            "model_dirs": [str(repo)],
            "model_control_mode": "static",
            "runtime": RuntimeConfig(backend="fake"),
            "endpoints": EndpointsConfig(grpc_port=0, http_port=0),
            **sections,
        }
    )


class Client:
    """Calls of one server, messages in and out."""

    def __init__(self, server, options=()):
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=list(options))
        self.http_port = server.http_port

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def call(self, method, **fields):
        request, response = getattr(pb, f"{method}Request"), getattr(pb, f"{method}Response")
        body = request(**fields).SerializeToString()
        return response.FromString(self.channel.unary_unary(V2 + method)(body, timeout=60))

    def infer(self, *inputs, model="affine", **kw):
        return decode_response(
            self.channel.unary_unary(V2 + "ModelInfer")(join(encode_request(model, inputs, **kw)), timeout=60)
        )

    def health(self, name=""):
        body = health.HealthCheckRequest(service=name).SerializeToString()
        answer = self.channel.unary_unary("/grpc.health.v1.Health/Check")(body, timeout=60)
        return health.HealthCheckResponse.FromString(answer).status

    def http(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def refused(function, *arguments, **kw):
    """Code, reason and text of the error that a call ends with."""
    with pytest.raises(grpc.RpcError) as error:
        function(*arguments, **kw)
    reason = dict(error.value.trailing_metadata()).get("rsrv-reason")
    return error.value.code().name, reason, error.value.details()


X = ("x", np.ones((1, 3), np.float32))


@pytest.fixture(scope="module")
def server(repo):
    patch = pytest.MonkeyPatch()
    patch.setenv("RSRV_ALLOW_FAKE", "1")
    settings = SchedulerConfig(models={"affine": ModelSchedulingConfig(max_batch_size=4)})
    with_settings = config(repo, scheduler=settings)
    server = serve(with_settings, worker="w7", blocking=False)
    yield server
    server.stop()
    patch.undo()


@pytest.fixture
def client(server):
    with Client(server) as client:
        yield client


def test_a_stuck_execution_makes_the_server_unready_until_it_returns(repo):
    gate, entered = threading.Event(), threading.Event()
    settings = config(
        repo,
        runtime=RuntimeConfig(backend="fake", fake=FakeDeviceConfig(seconds_per_row=1e-6)),
        scheduler=SchedulerConfig(discipline="fifo", dispatch_timeout_seconds=0.02),
    )
    server = serve(settings, blocking=False)
    changed = threading.Condition()

    def notify():
        with changed:
            changed.notify_all()

    server.faces.health.notify = notify
    try:
        with Client(server) as client:
            server.device._sleep = lambda seconds: (entered.set(), gate.wait(60))
            call = threading.Thread(target=client.infer, args=(X,))
            call.start()
            assert entered.wait(60)
            with changed:
                assert changed.wait_for(lambda: not server.lifecycle.readiness().ready, 60)
            status, body = client.http("/readyz")
            assert status == 503
            assert json.loads(body)["reason"].startswith("an execution of model 'affine' (batch key 1) runs for ")
            assert "rsrv_worker_dispatch_stuck 1.0" in client.http("/metrics")[1]
            gate.set()
            call.join()
            with changed:
                assert changed.wait_for(lambda: server.lifecycle.readiness().ready, 60)
            assert client.http("/readyz")[0] == 200
            assert "rsrv_worker_dispatch_stuck 0.0" in client.http("/metrics")[1]
    finally:
        gate.set()
        server.stop()


# --- bring-up -------------------------------------------------------------------------------------------------------


def test_both_ports_answer_before_any_bundle_is_opened_and_models_are_served_as_they_get_ready(repo, monkeypatch):
    gates = {"affine": threading.Event(), "single": threading.Event()}
    opened_all = threading.Event()
    compile_model = Loader._compile

    def gated(self, opened, *rest):
        # No model gets here before all are opened.
        opened_all.set()
        gates[opened.entry.name].wait(60)
        return compile_model(self, opened, *rest)

    monkeypatch.setattr(Loader, "_compile", gated)
    server = RunningServer(config(repo, startup=StartupConfig(ready_when="all")))
    server.open()
    try:
        with Client(server) as client:
            assert client.call("ServerLive").live
            assert not client.call("ServerReady").ready
            assert refused(client.infer, X) == (
                "UNAVAILABLE",
                "preparing",
                "model 'affine' is not known yet: the server is starting",
            )
            assert refused(client.infer, X, model="nobody")[:2] == ("UNAVAILABLE", "preparing")
            assert client.http("/livez") == (200, "ok")
            status, body = client.http("/readyz")
            assert (status, json.loads(body)["reason"]) == (503, "the model directories are not read yet")

            changed = threading.Event()
            server.registry.on_change, told = lambda name: changed.set(), server.registry.on_change
            server.start_loading()
            while not server.registry.scanned:
                assert changed.wait(60)
            server.registry.on_change = told
            assert refused(client.infer, X) == ("UNAVAILABLE", "preparing", "model 'affine' is being prepared")
            assert refused(client.infer, X, model="nobody")[:2] == ("NOT_FOUND", "unknown_model")
            assert not client.call("ModelReady", name="affine").ready
            assert opened_all.wait(60)
            assert list(client.call("ModelMetadata", name="affine").batch_sizes) == [1, 4, 8]
            assert client.health("affine") == health.HealthCheckResponse.NOT_SERVING
            gates["affine"].set()
            with server._changed:
                server._changed.wait_for(lambda: server.registry.progress().prepared == 1, 60)
            assert client.infer(X).array("y").shape == (1, 3)
            assert client.health("affine") == health.HealthCheckResponse.SERVING
            status, body = client.http("/readyz")
            body = json.loads(body)
            assert (status, body["reason"]) == (503, "not ready: single (preparing)")
            expected = {"models": 2, "prepared": 1, "failed": 0, "programs": 4, "compiled": 3, "from_cache": 0}
            assert body["progress"] == expected
            assert body["phase"] == "compiled 3/4"
            gates["single"].set()
            assert server.wait_ready(60).ready
            assert client.http("/readyz")[0] == client.http("/v2/health/ready")[0] == 200
            assert client.health() == health.HealthCheckResponse.SERVING
    finally:
        for gate in gates.values():
            gate.set()
        server.stop()


def test_a_stop_while_models_are_prepared_ends_without_them(repo):
    server = RunningServer(config(repo))
    server.open()
    server.start_loading()
    server.stop()
    assert server.lifecycle.state == "stopped"


def test_a_guard_refuses_before_anything_is_opened(repo):
    class Refused(Exception):
        pass

    @observe.register_serve_guard
    def guard(cfg):
        raise Refused(cfg.model_dirs)

    try:
        with pytest.raises(Refused):
            serve(config(repo), blocking=False)
    finally:
        observe.unregister_serve_guard(guard)


def test_heartbeats_tell_of_up_every_request_and_down(repo):
    seen = []
    f = observe.register_heartbeat(lambda event, detail: seen.append((event, detail)))
    cfg = config(repo)
    try:
        server = serve(cfg, blocking=False)
        with Client(server) as client:
            client.infer(X)
            refused(client.infer, ("x", np.ones((1, 4), np.float32)))
        server.stop()
        server.stop()
    finally:
        observe.unregister_heartbeat(f)
    assert seen == [("up", cfg), ("request", "affine"), ("request", "affine"), ("down", cfg)]


@pytest.mark.parametrize("face", ["grpc_port", "http_port"])
def test_a_taken_port_is_found_before_any_bundle_is_opened_and_nothing_is_left(repo, server, face, monkeypatch):
    monkeypatch.setattr(Loader, "load_all", lambda self: pytest.fail("a bundle was opened"))
    ports = {"grpc_port": 0, "http_port": 0, face: getattr(server, face)}
    before = set(threading.enumerate())
    taken = config(repo, endpoints=EndpointsConfig(**ports))
    with pytest.raises(PortTaken):
        serve(taken, blocking=False)
    with pytest.raises(PortTaken):
        RunningServer(taken).open()
    assert set(threading.enumerate()) - before == set()


def test_a_stop_does_not_wait_for_company_of_accepted_requests(repo):
    server = serve(config(repo, batching=BatchingConfig(max_wait_ms=1e9)), blocking=False)
    with Client(server) as client, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(client.infer, X)
        until = time.monotonic() + 60
        while not server.scheduler.stats()["affine"].queue_depth and time.monotonic() < until:
            time.sleep(0.001)
        server.stop(60.0)
        assert answer.result().array("y").tolist() == [[3.0, 3.0, 3.0]]


def test_after_a_stop_no_thread_no_port_and_no_region_is_left(repo):
    before = set(threading.enumerate())
    server = serve(config(repo), blocking=False)
    with Client(server) as client, OwnedRegion.create("test", 64) as region:
        client.call("SystemSharedMemoryRegister", name="r", key=region.key, byte_size=64)
        client.infer(X)
        server.stop()
        assert refused(client.infer, X)[0] == "UNAVAILABLE"
    assert len(server.shm) == 0
    assert set(threading.enumerate()) - before == set()


def test_http_can_be_off(repo):
    server = serve(config(repo, endpoints=EndpointsConfig(grpc_port=0, http_port=None)), blocking=False)
    assert server.http_port is None
    server.stop()


# --- what it answers ------------------------------------------------------------------------------------------------


def test_metadata_has_only_the_extensions_that_exist(client):
    about = client.call("ServerMetadata")
    assert about.name == "rsrv"
    assert list(about.extensions) == [
        "system_shared_memory",
        "model_repository",
        "model_configuration",
        "statistics",
        "rsrv_control",
        "rsrv_admin",
    ]


def test_models_are_described_in_wire_terms(client):
    metadata = client.call("ModelMetadata", name="affine")
    assert metadata.platform == "xla_stablehlo"
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("x", "FP32", [-1, 3])]
    assert [(t.HasField("batch_axis"), t.batch_axis) for t in metadata.inputs] == [(True, 0)]
    assert list(metadata.batch_sizes) == [1, 4, 8]
    assert list(metadata.versions) == []
    assert list(client.call("ModelMetadata", name="single").batch_sizes) == []  # no axis counts rows
    assert client.call("ModelMetadata", name="affine", version="1").name == "affine"
    assert refused(client.call, "ModelMetadata", name="affine", version="3")[:2] == ("NOT_FOUND", "unknown_model")
    assert refused(client.call, "ModelMetadata", name="nobody")[:2] == ("NOT_FOUND", "unknown_model")


def test_a_config_has_tritons_batching_only_where_it_fits(client):
    config = client.call("ModelConfig", name="affine").config
    assert (config.name, config.platform, config.max_batch_size) == ("affine", "xla_stablehlo", 8)
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [("x", pb.TYPE_FP32, [3])]
    config = client.call("ModelConfig", name="single").config
    assert config.max_batch_size == 0
    assert [(t.name, list(t.dims)) for t in config.output] == [("y", [2, 3])]
    assert refused(client.call, "ModelConfig", name="nobody")[0] == "NOT_FOUND"


def test_readiness_of_models_and_the_index(client):
    assert client.call("ModelReady", name="affine").ready
    assert not client.call("ModelReady", name="affine", version="2").ready
    assert not client.call("ModelReady", name="nobody").ready
    index = client.call("RepositoryIndex", repository_name="ignored", ready=True)
    assert [(m.name, m.version, m.state, m.reason) for m in index.models] == [
        ("affine", "", "READY", ""),
        ("single", "", "READY", ""),
    ]


def test_statistics_of_an_unknown_model_are_not_found(client):
    assert refused(client.call, "ModelStatistics", name="nobody")[0] == "NOT_FOUND"
    assert [s.name for s in client.call("ModelStatistics").model_stats] == ["affine", "single"]


@pytest.mark.parametrize(
    "method",
    [
        "CudaSharedMemoryRegister",
        "NoSuchMethod",
    ],
)
def test_what_is_not_built_is_unimplemented(client, method):
    with pytest.raises(grpc.RpcError) as error:
        client.channel.unary_unary(V2 + method)(b"", timeout=60)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_there_are_no_regions_on_a_card_and_all_of_them_can_be_unregistered(client):
    client.call("CudaSharedMemoryUnregister", name="")
    assert not client.call("CudaSharedMemoryStatus").regions


@pytest.mark.parametrize("method", ["GetSchedulingStatus", "Repack"])
def test_a_worker_has_no_control_service_of_a_gateway(client, method):
    with pytest.raises(grpc.RpcError) as error:
        client.channel.unary_unary(f"/reactant_control.GatewayControlService/{method}")(b"", timeout=60)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_body_that_is_not_the_message_is_an_invalid_argument(client):
    for method in ("ModelMetadata", "ModelInfer", "SystemSharedMemoryRegister"):
        with pytest.raises(grpc.RpcError) as error:
            client.channel.unary_unary(V2 + method)(b"\xff\xff\xff", timeout=60)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_follows_the_server_and_each_model(client):
    serving = health.HealthCheckResponse.SERVING
    assert client.health() == client.health("affine") == client.health("inference.GRPCInferenceService") == serving
    assert refused(client.health, "nobody")[0] == "NOT_FOUND"


def test_reflection_tells_of_our_services(client):
    from rsrv.protos import reflection

    body = reflection.ServerReflectionRequest(list_services="").SerializeToString()
    stream = client.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(
        iter([body]), timeout=60
    )
    [answer] = [reflection.ServerReflectionResponse.FromString(m) for m in stream]
    names = {s.name for s in answer.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
    assert names <= set(services())
    assert POOL.FindServiceByName("inference.GRPCInferenceService").methods_by_name["ModelInfer"]


# --- shared memory --------------------------------------------------------------------------------------------------


def test_regions_in_and_out_and_their_bookkeeping(client):
    from rsrv.core.dtypes import DType
    from rsrv.core.tensors import OutputTarget

    with OwnedRegion.create("test", 48) as region:
        region.view[:12] = np.float32([1, 2, 3]).tobytes()
        client.call("SystemSharedMemoryRegister", name="r", key=region.key, byte_size=48)
        row = client.call("SystemSharedMemoryStatus", name="r").regions["r"]
        assert (row.name, row.key.lstrip("/"), row.offset, row.byte_size) == ("r", region.name, 0, 48)
        assert not client.call("SystemSharedMemoryStatus", name="other").regions
        x = ShmInput("x", DType.F32, (1, 3), "r", 0, 12)
        answer = client.infer(x, outputs=[RequestedOutput("y", OutputTarget("r", 16, 12))])
        assert answer.arrays() == {"y": None}
        np.testing.assert_array_equal(np.frombuffer(region.view[16:28], np.float32), [6, 6, 6])
        text = refused(client.infer, x, outputs=[RequestedOutput("y", OutputTarget("r", 16, 11))])
        assert text[:2] == ("INVALID_ARGUMENT", "invalid")
        assert "needs 12 bytes" in text[2]
        assert (
            refused(client.infer, x, outputs=[RequestedOutput("y", OutputTarget("r", 40, 12))])[0] == "INVALID_ARGUMENT"
        )
        client.call("SystemSharedMemoryUnregister", name="r")
        client.call("SystemSharedMemoryUnregister", name="r")
        code, reason, text = refused(client.infer, x)
        assert (code, reason) == ("FAILED_PRECONDITION", "shm_unregistered")
        assert "unregistered shared memory region 'r'" in text


def test_a_region_that_is_truncated_too_small_or_unlinked_fails_only_its_requests(client):
    from rsrv.core.dtypes import DType

    with OwnedRegion.create("test", 4096) as region:
        assert (
            refused(client.call, "SystemSharedMemoryRegister", name="r", key=region.key, byte_size=4097)[0]
            == "INVALID_ARGUMENT"
        )
        client.call("SystemSharedMemoryRegister", name="r", key=region.key, offset=4000, byte_size=96)
        for offset, n in ((96, 12), (2**62, 12), (0, 2**62), (90, 12)):
            code, reason, text = refused(client.infer, ShmInput("x", DType.F32, (1, 3), "r", offset, n))
            assert (code, reason) == ("INVALID_ARGUMENT", "invalid"), text
        x = ShmInput("x", DType.F32, (1, 3), "r", 84, 12)
        assert client.infer(x).array("y").shape == (1, 3)
        os.truncate(f"/dev/shm/{region.name}", 4090)
        code, reason, text = refused(client.infer, x)
        assert (code, reason) == ("INVALID_ARGUMENT", "invalid")
        assert "truncated" in text
        os.truncate(f"/dev/shm/{region.name}", 4096)
        os.unlink(f"/dev/shm/{region.name}")
        assert client.infer(x).array("y").shape == (1, 3)
        client.call("SystemSharedMemoryUnregister", name="r")
        assert refused(client.infer, x)[:2] == ("FAILED_PRECONDITION", "shm_unregistered")


def test_a_message_of_5_mb_passes_and_one_over_the_limit_says_which_limit(tmp_path):
    write_affine(tmp_path / "wide", features=1_310_720, batch_sizes=(1,))
    server = serve(config(tmp_path, grpc=GrpcConfig(max_recv_msg_bytes=6_000_000)), blocking=False)
    try:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        with Client(server, options) as client:
            x = np.ones((1, 1_310_720), np.float32)
            assert client.infer(("x", x), model="wide").array("y").nbytes == 5_242_880
            code, _, text = refused(client.infer, ("x", x), ("y", x[:, :300_000]), model="wide")
            assert code == "RESOURCE_EXHAUSTED"
            assert "larger than max" in text
            assert "6000000" in text
    finally:
        server.stop()


def test_the_namespace_probe_compares_the_nonce(client):
    with OwnedRegion.create("test", 64) as region:
        region.view[:16] = b"0123456789abcdef"
        assert client.call("IsSameIPCNamespace", name=region.key).same
        assert client.call("IsSameIPCNamespace", name=region.key, nonce=b"0123456789abcdef").same
        assert not client.call("IsSameIPCNamespace", name=region.key, nonce=b"another nonce 16").same
    assert not client.call("IsSameIPCNamespace", name=region.key).same
    assert not client.call("IsSameIPCNamespace").same


def test_shared_memory_can_be_off(repo):
    server = serve(config(repo, shm=ShmConfig(enabled=False)), blocking=False)
    try:
        with Client(server) as client:
            extensions = list(client.call("ServerMetadata").extensions)
            assert extensions == [
                "model_repository",
                "model_configuration",
                "statistics",
                "rsrv_control",
                "rsrv_admin",
            ]
            assert (
                refused(client.call, "SystemSharedMemoryRegister", name="r", key="/r", byte_size=1)[0]
                == "UNIMPLEMENTED"
            )
            with OwnedRegion.create("test", 64) as region:
                assert not client.call("IsSameIPCNamespace", name=region.key).same
    finally:
        server.stop()


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_have_the_workers_label_and_no_client_chooses_a_series(client):
    client.infer(X)
    refused(client.infer, X, model="evil\nname")
    refused(client.infer, ("x", np.ones((1, 4), np.float32)))
    status, text = client.http("/metrics?x=1")
    assert status == 200
    assert 'rsrv_worker_requests_total{model="affine",status="OK",worker="w7"}' in text
    assert 'rsrv_worker_requests_total{model="affine",status="INVALID_ARGUMENT",worker="w7"}' in text
    assert 'rsrv_worker_requests_total{model="_unknown",status="NOT_FOUND",worker="w7"}' in text
    assert "evil" not in text
    assert 'rsrv_worker_model_max_batch_size{model="affine",worker="w7"} 4.0' in text
    assert 'rsrv_worker_model_max_batch_size{model="single",worker="w7"} 0.0' in text
    assert 'rsrv_worker_state{state="serving",worker="w7"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_every_series_of_the_exposition_is_in_the_table_and_has_its_type_and_labels(client):
    from prometheus_client.parser import text_string_to_metric_families

    from rsrv.serve.series import PREFIX, SERIES

    client.infer(X)
    families = [f for f in text_string_to_metric_families(client.http("/metrics")[1]) if f.name.startswith(PREFIX)]
    assert families
    for family in families:
        name = family.name.removeprefix(PREFIX)
        series = SERIES.get(name) or SERIES[f"{name}_total"]
        assert family.type == series.type
        assert family.documentation == series.help
        for sample in family.samples:
            assert set(sample.labels) - {"le", "worker"} == set(series.labels)


# --- hooks over the wire ----------------------------------------------------------------------------------------------

HANGING = """
import threading
release = threading.Event()
def preprocess(inputs):
    release.wait(0 if inputs["x"][0, 0] == 0 else 60)
    return inputs
"""


def test_a_model_whose_hooks_hang_too_often_is_failed_and_the_others_go_on(repo, tmp_path):
    write_affine(tmp_path / "hanging", hooks=HANGING)
    write_affine(tmp_path / "affine")
    server = serve(config(tmp_path, hooks=HooksConfig(timeout_seconds=0.05, max_lost=2)), blocking=False)
    release = server.registry.prepared("hanging").hooks.preprocess.__globals__["release"]
    try:
        with Client(server) as client:
            assert client.infer(("x", np.zeros((1, 3), np.float32)), model="hanging").array("y").shape == (1, 3)
            for _ in range(2):
                code, reason, text = refused(client.infer, X, model="hanging")
                assert (code, reason) == ("INTERNAL", "hook_error")
                assert "did not return within 0.05 s" in text
            with server._changed:
                server._changed.wait_for(lambda: server.registry.progress().failed == 1, 60)
            code, reason, text = refused(client.infer, ("x", np.zeros((1, 3), np.float32)), model="hanging")
            assert (code, reason) == ("UNAVAILABLE", "failed")
            assert "2 hook calls did not return in time" in text
            assert client.infer(X).array("y").shape == (1, 3)
            assert "rsrv_worker_hook_threads_lost_total 2.0" in client.http("/metrics")[1]
    finally:
        release.set()
        server.stop()


def test_client_tensors_are_those_of_the_hooks(tmp_path):
    hooks = (
        "import numpy as np\ndef preprocess(i): return {'x': np.repeat(i['words'][:, None], 3, 1).astype(np.float32)}\n"
    )
    write_affine(tmp_path / "words", hooks=hooks, client_inputs={"words": ((N,), np.int64)})
    server = serve(config(tmp_path), blocking=False)
    try:
        with Client(server) as client:
            metadata = client.call("ModelMetadata", name="words")
            assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("words", "INT64", [-1])]
            answer = client.infer(("words", np.int64([2, 5])), model="words")
            # The fake device fills each row with the sum of its input row.
            np.testing.assert_array_equal(answer.array("y"), [[6, 6, 6], [15, 15, 15]])
    finally:
        server.stop()


# --- entry points -----------------------------------------------------------------------------------------------------


def test_a_node_file_names_the_worker_and_its_ports(repo, tmp_path, monkeypatch):
    monkeypatch.setenv("RSRV_WORKER_ENDPOINTS_HTTP_PORT", "0")
    node = tmp_path / "node.yaml"
    node.write_text(
        f"model_repo: {repo}\nglobal: {{runtime: {{backend: fake}}}}\n"
        "workers: [{name: a, port: 0}, {name: b, port: 0}]\n"
    )
    server = serve_worker(node, "b", blocking=False)
    try:
        assert server.worker == "b"
        with Client(server) as client:
            assert 'worker="b"' in client.http("/metrics")[1]
    finally:
        server.stop()
    with pytest.raises(ConfigError, match="there are 2 workers"):
        serve(node, blocking=False)


def test_a_blocking_serve_returns_when_another_thread_stops_the_server(repo):
    listening = queue.SimpleQueue()
    thread = threading.Thread(target=serve, args=(config(repo),), kwargs={"on_listening": listening.put})
    thread.start()
    server = listening.get(timeout=60)
    assert server.wait_ready(60).ready
    with Client(server) as client:
        client.infer(X)
    server.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_stop_frees_nothing_while_models_are_still_being_loaded(repo, monkeypatch):
    servers, freed, early = [], threading.Event(), []

    def load_all(self):
        threading.Thread(target=servers[0].stop).start()
        assert self._stopping.wait(60)
        early.append(freed.wait(0.3))  # long enough for a stop that does not wait

    free = Residency.free
    monkeypatch.setattr(Loader, "load_all", load_all)
    monkeypatch.setattr(Residency, "free", lambda self: (freed.set(), free(self)))
    serve(config(repo), on_listening=servers.append)
    assert early == [False]
    assert freed.is_set()


def test_an_error_of_the_bring_up_ends_a_blocking_serve(repo, monkeypatch):
    def broken(self):
        raise RuntimeError("the device fell over")

    monkeypatch.setattr(Loader, "load_all", broken)
    states = []
    with pytest.raises(RuntimeError, match="fell over"):
        serve(config(repo), on_listening=lambda server: states.append(server.lifecycle))
    assert states[0].state == "stopped"
