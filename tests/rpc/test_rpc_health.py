"""grpc.health.v1, asked by the stock client."""

import itertools
import queue
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rsrv.protos import health
from rsrv.rpc import HealthService

WAIT = 30
SERVING, NOT_SERVING, UNKNOWN_SERVICE = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


@pytest.fixture
def states():
    return {"": True, "resnet": False}


@pytest.fixture
def service(states):
    return HealthService(states.get)


@pytest.fixture
def stub(serve, service):
    _, channel = serve(service.routes(), threads=6, max_streams=4)
    return health_pb2_grpc.HealthStub(channel)


def request(name=""):
    return health_pb2.HealthCheckRequest(service=name)


def test_check_follows_the_state(stub, states):
    assert stub.Check(request(), timeout=WAIT).status == SERVING
    assert stub.Check(request("resnet"), timeout=WAIT).status == NOT_SERVING
    states["resnet"] = True
    assert stub.Check(request("resnet"), timeout=WAIT).status == SERVING


def test_check_of_an_unknown_service_is_not_found(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(request("nobody"), timeout=WAIT)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'nobody'" in caught.value.details()
    assert dict(caught.value.trailing_metadata())["rsrv-reason"] == "unknown_service"


def test_a_request_that_is_no_message_is_invalid(serve, service):
    _, channel = serve(service.routes())
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff\xff", timeout=WAIT)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
        next(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff\xff", timeout=WAIT))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_watch_sends_the_state_and_then_each_change_of_it(stub, service, states):
    watch = stub.Watch(request("resnet"), timeout=WAIT)
    assert next(watch).status == NOT_SERVING
    service.notify()  # nothing changed for this name, so nothing is sent
    states["resnet"] = True
    service.notify()
    assert next(watch).status == SERVING
    del states["resnet"]
    service.notify()
    assert next(watch).status == UNKNOWN_SERVICE
    watch.cancel()


def test_watch_of_an_unknown_service_says_so_and_goes_on(stub, service, states):
    watch = stub.Watch(request("later"), timeout=WAIT)
    assert next(watch).status == UNKNOWN_SERVICE
    states["later"] = True
    service.notify()
    assert next(watch).status == SERVING
    watch.cancel()


def test_changes_from_many_threads_end_in_the_last_state(stub, service, states):
    watch = stub.Watch(request(), timeout=WAIT)
    assert next(watch).status == SERVING

    def flip():
        for n in range(50):
            states[""] = bool(n % 2)
            service.notify()

    threads = [threading.Thread(target=flip) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states[""] = False
    service.notify()
    states[""] = None
    service.notify()
    seen = []
    for response in watch:
        seen.append(response.status)
        if response.status == UNKNOWN_SERVICE:
            break
    assert all(before != after for before, after in itertools.pairwise(seen))
    watch.cancel()


def test_a_watch_that_ends_is_forgotten(serve, service, wait_until):
    engine, channel = serve(service.routes())
    watch = health_pb2_grpc.HealthStub(channel).Watch(request())
    next(watch)
    assert len(service._watchers) == 1
    watch.cancel()
    wait_until(lambda: not service._watchers)
    wait_until(lambda: not engine.open_calls)


def test_open_watches_leave_threads_for_checks(stub):
    watches = [stub.Watch(request(), timeout=WAIT) for _ in range(4)]
    assert [next(watch).status for watch in watches] == [SERVING] * 4
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.Watch(request(), timeout=WAIT))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.Check(request(), timeout=WAIT).status == SERVING
    for watch in watches:
        watch.cancel()


def test_a_watch_ends_when_the_engine_stops(serve, service):
    engine, channel = serve(service.routes())
    watch = health_pb2_grpc.HealthStub(channel).Watch(request())
    next(watch)
    outcome = queue.SimpleQueue()

    def read():
        try:
            next(watch)
        except grpc.RpcError as error:
            outcome.put((error.code(), dict(error.trailing_metadata())["rsrv-reason"]))

    reader = threading.Thread(target=read)
    reader.start()
    engine.stop(WAIT)
    assert outcome.get(timeout=WAIT) == (grpc.StatusCode.UNAVAILABLE, "stopping")
    reader.join(WAIT)


def test_an_exception_of_the_check_is_internal(serve, caplog):
    def broken(name):
        raise ZeroDivisionError("secret")

    _, channel = serve(HealthService(broken).routes())
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(request(), timeout=WAIT)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")


def test_our_messages_and_the_stock_ones_are_the_same_bytes():
    ours = health.HealthCheckResponse(status=health.HealthCheckResponse.SERVICE_UNKNOWN).SerializeToString()
    assert health_pb2.HealthCheckResponse.FromString(ours).status == UNKNOWN_SERVICE
