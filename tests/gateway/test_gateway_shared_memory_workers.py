"""Shared memory over gRPC: real channels and gates, the proxy's second try, and Triton's own client."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
from support.calls import FakeCall
from support.gateway_front import SECONDS, Front
from support.gateway_site import request_body, wait_until

from rsrv.core.errors import Code
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire.headers import RequestedOutput
from rsrv.gateway.shm.shared_memory import SharedMemory
from rsrv.protos import inference as pb

PATH = "/inference.GRPCInferenceService/SystemSharedMemory"
WITH_REGION = request_body(outputs=[RequestedOutput("y", OutputTarget("r", 0, 8))])


def register(memory, name="r"):
    body = pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=8).SerializeToString()
    return FakeCall(body, path=f"{PATH}Register"), memory.register


@pytest.fixture
def site(make_site):
    site = make_site(2)
    # Its clock stands still: what is not done again within a second is not, however long the test takes.
    site.memory = SharedMemory(site.fleet, site.counters, timeout=SECONDS, clock=lambda: site.now)
    site.proxy = replace(site.proxy, regions=site.memory)
    return site


def test_a_worker_that_started_anew_is_told_its_regions_before_the_client_sees_an_error(site):
    call, handler = register(site.memory)
    assert call.serve(handler).code is Code.OK
    for mock in site.mocks:
        mock.regions.clear()  # as after a restart that no probe has seen yet
    for _ in range(4):
        assert site.post(WITH_REGION).code is Code.OK
    assert [list(mock.regions) for mock in site.mocks] == [["r"], ["r"]]
    assert [mock.count("SystemSharedMemoryRegister") for mock in site.mocks] == [2, 2]


def test_a_region_that_nobody_registered_is_the_clients_error_and_costs_one_replay(site):
    call, handler = register(site.memory, "other")
    call.serve(handler)
    for _ in range(6):
        call = site.post(WITH_REGION)
        assert (call.code, call.reason) == (Code.FAILED_PRECONDITION, "shm_unregistered")
    assert [mock.count("SystemSharedMemoryRegister") for mock in site.mocks] == [2, 2]


def test_inference_waits_while_a_worker_is_told_of_a_region(site):
    for mock in site.mocks:
        mock.hang("SystemSharedMemoryRegister")
    call, handler = register(site.memory)
    handler(call)
    waiting = site.call(request_body())
    site.proxy.handle(waiting)
    wait_until(lambda: all(mock.count("SystemSharedMemoryRegister") for mock in site.mocks))
    assert sum(worker.waiting for worker in site.fleet.workers) == 1
    assert site.served() == [0, 0]
    for mock in site.mocks:
        mock.resume("SystemSharedMemoryRegister")
    call.serve(lambda _: None)
    waiting.serve(lambda _: None)
    assert (call.code, waiting.code) == (Code.OK, Code.OK)


def test_inference_does_not_wait_longer_than_its_deadline(site):
    for mock in site.mocks:
        mock.hang("SystemSharedMemoryRegister")
    call, handler = register(site.memory)
    handler(call)
    late = site.post(request_body(), seconds=0.1)
    assert late.code is Code.DEADLINE_EXCEEDED
    assert site.served() == [0, 0]
    for mock in site.mocks:
        mock.resume("SystemSharedMemoryRegister")
    assert call.serve(lambda _: None).code is Code.OK


def test_a_worker_that_is_killed_does_not_keep_clients_from_registering(site):
    site.mocks[0].close()
    call, handler = register(site.memory)
    assert call.serve(handler).code is Code.OK
    site.mocks[0].restart()
    proceeded = []
    site.memory.welcome(site.fleet.get(site.mocks[0].url), lambda: proceeded.append(True))
    wait_until(lambda: proceeded)
    assert list(site.mocks[0].regions) == ["r"]


def test_a_worker_that_missed_a_change_answers_no_request_for_shared_memory_before_it_was_told(site):
    call, handler = register(site.memory)
    call.serve(handler)
    mock = site.mocks[0]
    worker = site.fleet.get(mock.url)
    mock.fail("SystemSharedMemoryRegister", Code.UNAVAILABLE, times=2)
    again, handler = register(site.memory)  # as r, with something else in it
    again.serve(handler)
    assert worker.behind
    site.mocks[1].fail("ModelInfer", Code.UNAVAILABLE)
    assert site.post(request_body()).code is Code.OK, "others may use it"
    told = mock.count("SystemSharedMemoryRegister")
    refused = site.post(WITH_REGION)
    assert (refused.code, worker.behind) == (Code.UNAVAILABLE, True)
    assert mock.count("SystemSharedMemoryRegister") == told + 1, "it was tried"
    assert site.post(WITH_REGION).code is Code.OK
    assert (list(mock.regions), worker.behind) == (["r"], False)


def test_a_worker_that_came_back_in_another_namespace_is_an_error_that_says_so(site):
    call, handler = register(site.memory)
    call.serve(handler)
    for mock in site.mocks:
        mock.regions.clear()
        mock.fail("SystemSharedMemoryRegister", Code.INVALID_ARGUMENT, "cannot open /r", reason="invalid")
        proceeded = []
        site.memory.welcome(site.fleet.get(mock.url), lambda proceeded=proceeded: proceeded.append(True))
        wait_until(lambda proceeded=proceeded: proceeded)
    refused = site.post(WITH_REGION)
    assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "shm_unregistered")
    assert "unregistered shared memory region 'r'" in refused.error.message
    again, handler = register(site.memory)  # what a client does then
    assert again.serve(handler).reason == "invalid"
    assert "cannot open /r" in again.error.message


def test_tritonclient_sees_no_difference_to_a_single_worker():
    triton = pytest.importorskip("tritonclient.grpc")
    with ExitStack() as stack:
        front = Front(stack)
        client = stack.enter_context(triton.InferenceServerClient(front.url))
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("m")
        assert not client.is_model_ready("other")
        assert client.get_server_metadata().name == "rsrv"
        assert client.get_model_metadata("m").platform == "mock"
        assert client.get_model_config("m") == pb_like(client)
        assert [row.name for row in client.get_model_repository_index().models] == ["m"]
        assert client.get_inference_statistics().model_stats == []
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        client.register_system_shared_memory("a region", "/key", 64, 8)
        client.register_system_shared_memory("other", "/other", 1)
        status = client.get_system_shared_memory_status(as_json=True)["regions"]
        assert status["a region"] == {"name": "a region", "key": "/key", "byte_size": "64", "offset": "8"}
        assert list(client.get_system_shared_memory_status("other").regions) == ["other"]
        client.unregister_system_shared_memory("other")
        assert list(client.get_system_shared_memory_status().regions) == ["a region"]
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions
        assert [mock.regions for mock in front.mocks] == [{}, {}]


def pb_like(client):
    """An empty answer of the client's own class."""
    from tritonclient.grpc import service_pb2

    return service_pb2.ModelConfigResponse()
