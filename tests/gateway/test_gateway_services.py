"""The RPCs beside inference, over gRPC on loopback, with scripted workers."""

import time
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import FakeCall
from support.gateway_front import SECONDS, Front, refusal
from support.gateway_site import wait_until
from support.mock_worker import MockModel

import rsrv
from rsrv.core.errors import Code
from rsrv.gateway.faces.services import NAMESPACE_SECONDS
from rsrv.gateway.routing.table import NotReady
from rsrv.protos import inference as pb


@pytest.fixture
def front():
    with ExitStack() as stack:
        yield Front(stack)


# --- what the gateway says itself -------------------------------------------------------------------------------------


def test_the_gateway_lives_and_is_ready_as_it_is_told(front):
    assert front.call("ServerLive").live
    assert front.call("ServerReady").ready
    front.is_ready = False
    assert not front.call("ServerReady").ready


def test_the_metadata_names_rsrv_and_what_a_gateway_can_do(front):
    found = front.call("ServerMetadata")
    assert (found.name, found.version) == ("rsrv", rsrv.__version__)
    assert list(found.extensions) == ["system_shared_memory", "model_configuration", "statistics"]


def test_a_model_is_ready_when_a_worker_is_routed_to(front):
    front.install(m=front.mocks, missing={"cold": NotReady("preparing", "preparing")})
    ready = {name: front.call("ModelReady", name=name).ready for name in ("m", "cold", "unknown", "")}
    assert ready == {"m": True, "cold": False, "unknown": False, "": False}
    assert front.call("ModelReady", name="m", version="1").ready
    assert not front.call("ModelReady", name="m", version="2").ready


def test_the_memory_of_cards_is_answered_as_a_worker_does(front):
    assert not front.call("CudaSharedMemoryStatus").regions
    front.call("CudaSharedMemoryUnregister")
    assert [mock.seen("CudaSharedMemoryUnregister") for mock in front.mocks] == [[], []]


def test_health_names_the_gateway_its_service_and_models(front):
    front.install(m=front.mocks, missing={"cold": NotReady("preparing", "preparing")})
    assert [front.services.is_serving(name) for name in ("", "inference.GRPCInferenceService", "m", "cold")] == [
        True,
        True,
        True,
        False,
    ]
    assert front.services.is_serving("unknown") is None


def test_who_watches_health_hears_of_readiness_and_of_models(front):
    stub = health_pb2_grpc.HealthStub(front.channel)
    gateway = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=SECONDS)
    model = stub.Watch(health_pb2.HealthCheckRequest(service="m"), timeout=SECONDS)
    kinds = health_pb2.HealthCheckResponse
    assert (next(gateway).status, next(model).status) == (kinds.SERVING, kinds.SERVING)
    front.is_ready = False
    front.fleet.probed(front.mocks[0].url, False)
    assert next(gateway).status == kinds.NOT_SERVING
    front.install()
    assert next(model).status == kinds.SERVICE_UNKNOWN
    gateway.cancel()
    model.cancel()


def test_a_change_of_nothing_wakes_nobody(front):
    told = []
    front.services.health.notify = lambda: told.append(1)
    front.services.changed()
    front.services.changed()
    front.install(m=front.mocks)
    assert len(told) == 1
    front.install(m=front.mocks, other=front.mocks)
    assert len(told) == 2


# --- metadata and configuration: forwarded ----------------------------------------------------------------------------


def test_metadata_and_configuration_are_a_workers_own_bytes(front):
    front.install(m=front.mocks[1:])
    body = pb.ModelMetadataResponse(name="m", platform="p", versions=["1"]).SerializeToString() + b"\x98\x06\x01"
    front.mocks[1].answer("ModelMetadata", body)
    assert front.call("ModelMetadata", name="m").SerializeToString() == body
    assert front.call("ModelConfig", name="m") == pb.ModelConfigResponse()
    assert [mock.count("ModelMetadata") for mock in front.mocks] == [0, 1]


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.NOT_FOUND])
def test_another_worker_is_asked_when_the_first_cannot_answer(front, code):
    first, second = sorted(front.mocks, key=lambda mock: mock.url)
    first.fail("ModelMetadata", code)
    assert front.call("ModelMetadata", name="m").platform == "mock"
    assert (first.count("ModelMetadata"), second.count("ModelMetadata")) == (1, 1)


def test_a_worker_that_is_away_is_passed_over(front):
    for mock in front.mocks[:1]:
        mock.close()
    assert front.call("ModelMetadata", name="m").platform == "mock"


def test_a_refusal_is_handed_on_with_its_reason_and_nobody_else_is_asked(front):
    for mock in front.mocks:
        mock.fail("ModelMetadata", Code.INVALID_ARGUMENT, "bad", reason="invalid")
    with pytest.raises(grpc.RpcError) as error:
        front.call("ModelMetadata", name="m")
    code, reason, text = refusal(error)
    assert (code, reason) == ("INVALID_ARGUMENT", "invalid")
    assert text.startswith("worker 127.0.0.1:")
    assert text.endswith(": bad")
    assert sum(mock.count("ModelMetadata") for mock in front.mocks) == 1


def test_the_last_word_of_the_last_worker_is_the_answer(front):
    for mock in front.mocks:
        mock.fail("ModelMetadata", Code.UNAVAILABLE, "stopping", reason="stopping")
    with pytest.raises(grpc.RpcError) as error:
        front.call("ModelMetadata", name="m")
    assert refusal(error)[:2] == ("UNAVAILABLE", "stopping")


def test_a_model_that_nobody_is_known_to_have_is_looked_for_once(front):
    with pytest.raises(grpc.RpcError) as error:
        front.call("ModelMetadata", name="new")
    assert refusal(error) == ("NOT_FOUND", "unknown_model", "model 'new' not found on any worker")
    assert len(front.refreshed) == 1
    front.found = lambda: front.install(new=front.mocks)
    assert front.call("ModelMetadata", name="new").platform == "mock"


def test_a_model_that_is_not_ready_is_described_by_whoever_has_it(front):
    front.install(missing={"cold": NotReady("preparing", "preparing")})
    front.mocks[0].fail("ModelMetadata", Code.NOT_FOUND, reason="unknown_model")
    assert front.call("ModelMetadata", name="cold").platform == "mock"
    assert front.refreshed == []


def test_a_client_that_gives_up_ends_the_call_to_the_worker(front):
    for mock in front.mocks:
        mock.hang("ModelConfig")
    body = pb.ModelConfigRequest(name="m").SerializeToString()
    call = front.channel.unary_unary("/inference.GRPCInferenceService/ModelConfig", None, None).future(body)
    first = min(front.mocks, key=lambda mock: mock.url)
    assert first.entered.acquire(timeout=SECONDS)
    call.cancel()
    wait_until(lambda: first.cancelled == {"ModelConfig": 1})


def test_the_trace_of_a_client_goes_along_and_its_secrets_do_not(front):
    front.call("ModelMetadata", name="m", metadata=(("traceparent", "00-1-2-01"), ("authorization", "Bearer x")))
    (seen,) = [seen for mock in front.mocks for seen in mock.seen("ModelMetadata")]
    assert seen.metadata["traceparent"] == "00-1-2-01"
    assert "authorization" not in seen.metadata


def test_a_malformed_request_is_invalid_and_reaches_no_worker(front):
    for method in ("ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "IsSameIPCNamespace"):
        with pytest.raises(grpc.RpcError) as error:
            front.channel.unary_unary(f"/inference.GRPCInferenceService/{method}", None, None)(b"\xff", timeout=SECONDS)
        assert refusal(error)[:2] == ("INVALID_ARGUMENT", "invalid")
        assert [mock.count(method) for mock in front.mocks] == [0, 0]


# --- index and statistics: of all workers -----------------------------------------------------------------------------


def test_the_index_is_the_union_and_ready_wins(front):
    front.mocks[0].models = {"m": MockModel(state="UNAVAILABLE", reason="preparing"), "a": MockModel()}
    front.mocks[1].models = {"m": MockModel(), "b": MockModel(state="UNAVAILABLE", reason="manifest: no")}
    rows = {row.name: (row.state, row.reason) for row in front.call("RepositoryIndex").models}
    assert rows == {"m": ("READY", ""), "a": ("READY", ""), "b": ("UNAVAILABLE", "manifest: no")}
    assert {row.name for row in front.call("RepositoryIndex", ready=True).models} == {"m", "a"}


def test_a_worker_that_is_away_or_talks_nonsense_is_left_out_of_the_index(front):
    front.mocks[0].models = {"m": MockModel()}
    front.mocks[1].answer("RepositoryIndex", b"\xff\xff")
    assert [row.name for row in front.call("RepositoryIndex").models] == ["m"]
    front.mocks[1].close()
    assert [row.name for row in front.call("RepositoryIndex").models] == ["m"]


def test_an_index_that_nobody_answers_is_unavailable(front):
    for mock in front.mocks:
        mock.fail("RepositoryIndex", Code.UNAVAILABLE)
    with pytest.raises(grpc.RpcError) as error:
        front.call("RepositoryIndex")
    assert refusal(error)[:2] == ("UNAVAILABLE", "no_workers")


def test_a_worker_that_is_not_ready_is_not_waited_for(front):
    front.mocks[0].hang("RepositoryIndex")
    front.fleet.probed(front.mocks[0].url, False)
    assert [row.name for row in front.call("RepositoryIndex").models] == ["m"]
    assert front.mocks[0].count("RepositoryIndex") == 0


def test_statistics_are_summed_over_the_workers_that_have_the_model(front):
    row = pb.ModelStatistics(name="m", version="1", inference_count=3)
    row.inference_stats.success.count = 2
    for mock in front.mocks:
        mock.answer("ModelStatistics", pb.ModelStatisticsResponse(model_stats=[row]).SerializeToString())
    (found,) = front.call("ModelStatistics", name="m").model_stats
    assert (found.inference_count, found.inference_stats.success.count) == (6, 4)
    front.mocks[1].fail("ModelStatistics", Code.NOT_FOUND, reason="unknown_model")
    assert front.call("ModelStatistics", name="m").model_stats[0].inference_count == 3


def test_statistics_of_a_model_that_nobody_has_are_not_found(front):
    for mock in front.mocks:
        mock.fail("ModelStatistics", Code.NOT_FOUND, "unknown", reason="unknown_model")
    with pytest.raises(grpc.RpcError) as error:
        front.call("ModelStatistics", name="x")
    assert refusal(error)[:2] == ("NOT_FOUND", "unknown_model")


def test_that_one_worker_does_not_know_a_model_does_not_make_it_unknown(front):
    front.mocks[0].fail("ModelStatistics", Code.NOT_FOUND, reason="unknown_model")
    front.mocks[1].close()
    with pytest.raises(grpc.RpcError) as error:
        front.call("ModelStatistics", name="x")
    assert refusal(error)[0] == "UNAVAILABLE"


def test_without_workers_the_index_is_empty_and_a_model_unknown():
    with ExitStack() as stack:
        front = Front(stack, 0)
        assert not front.call("RepositoryIndex").models
        assert not front.call("ModelStatistics").model_stats
        assert not front.call("IsSameIPCNamespace", name="x").same
        for method in ("ModelStatistics", "ModelMetadata"):
            with pytest.raises(grpc.RpcError) as error:
                front.call(method, name="x")
            assert refusal(error)[:2] == ("NOT_FOUND", "unknown_model")


# --- the probe of the IPC namespace -----------------------------------------------------------------------------------


def test_the_namespace_is_the_same_when_all_workers_say_so_and_the_name_is_no_label(front):
    assert front.call("IsSameIPCNamespace", name="rsrv-probe-1", nonce=b"n" * 16).same
    for mock in front.mocks:
        (seen,) = mock.seen("IsSameIPCNamespace")
        assert pb.IsSameIPCNamespaceRequest.FromString(seen.body).nonce == b"n" * 16
    assert front.counters.snapshot().statuses == {("IsSameIPCNamespace", "", "OK"): 1}


@pytest.mark.parametrize("spoil", ["no", "error", "unimplemented", "garbage"])
def test_one_worker_that_answers_something_else_is_enough_for_no(front, spoil):
    mock = front.mocks[1]
    match spoil:
        case "no":
            mock.answer("IsSameIPCNamespace", pb.IsSameIPCNamespaceResponse(same=False).SerializeToString())
        case "error":
            mock.fail("IsSameIPCNamespace", Code.INTERNAL)
        case "unimplemented":
            mock.fail("IsSameIPCNamespace", Code.UNIMPLEMENTED)
        case "garbage":
            mock.answer("IsSameIPCNamespace", b"\xff")
    assert not front.call("IsSameIPCNamespace", name="x").same


@pytest.mark.parametrize("silence", ["away", "stopping", "hung", "not ready"])
def test_a_worker_that_does_not_answer_has_no_say_about_the_namespace(front, silence):
    mock, other = front.mocks
    match silence:
        case "away":
            mock.close()
        case "stopping":
            mock.fail("IsSameIPCNamespace", Code.UNAVAILABLE, reason="stopping")
        case "hung":
            mock.fail("IsSameIPCNamespace", Code.DEADLINE_EXCEEDED)
        case "not ready":
            front.fleet.probed(mock.url, False)
    assert front.call("IsSameIPCNamespace", name="x").same
    if silence == "not ready":
        assert mock.count("IsSameIPCNamespace") == 0
    other.close()
    assert not front.call("IsSameIPCNamespace", name="x").same, "somebody has to say so"


@pytest.mark.parametrize(("left", "most"), [(0.8, 0.4), (60.0, NAMESPACE_SECONDS), (None, NAMESPACE_SECONDS)])
def test_a_hung_worker_does_not_use_up_the_time_of_who_asks_about_the_namespace(front, monkeypatch, left, most):
    asked = []
    monkeypatch.setattr(
        "rsrv.gateway.faces.services.fan_out",
        lambda workers, path, body, seconds, on_all, passed: (asked.append(seconds), on_all({})),
    )
    deadline = 0 if left is None else time.monotonic_ns() + int(left * 1e9)
    call = FakeCall(path="/inference.GRPCInferenceService/IsSameIPCNamespace", deadline_ns=deadline)
    front.services.is_same_ipc_namespace(call)
    assert not pb.IsSameIPCNamespaceResponse.FromString(call.message).same
    assert 0 <= asked[0] <= most
