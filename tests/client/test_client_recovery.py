"""The recovery ladder: a server that forgot our memory, and every way in which reminding it can fail."""

import asyncio
import threading

import grpc
import numpy as np
import pytest
from support.client_stub import StubServer

from rsrv.client import KServeModel
from rsrv.client.budget import Budget
from rsrv.client.channels import ChannelOptions
from rsrv.client.steps import arun, run
from rsrv.client.transport import endpoints
from rsrv.client.transport.lifecycle import client_shutdown
from rsrv.client.transport.recovery import is_stale, with_recovery
from rsrv.core.errors import (
    Code,
    DeadlineExceeded,
    InvalidRequest,
    RsrvError,
    ServerUnreachable,
    ShmUnrecoverable,
    UnknownModel,
    UnregisteredRegion,
    UsageError,
    WrongState,
)
from rsrv.core.shm import OwnedRegion

X = np.arange(8, dtype=np.float32).reshape(2, 4)
REGISTER = "SystemSharedMemoryRegister"
REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many regions", "shm_limit")
AWAY = (grpc.StatusCode.UNAVAILABLE, "going down", "")
STALE = UnregisteredRegion("r")


def scripted(*outcomes):
    """Steps that end one way after another; `left` is what was not needed."""
    left = list(outcomes)

    def send():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
        yield

    send.left = left
    return send


@pytest.fixture
def endpoint(server):
    found = endpoints.acquire(ChannelOptions.build(server.url))
    yield found
    endpoints.release(found)


@pytest.fixture
def region(endpoint):
    with OwnedRegion.create("client", 4096) as made:
        endpoint.register(made, 20)
        yield made


def recover(endpoint, region, send, budget=None):
    return run(with_recovery(endpoint, region, Budget(20) if budget is None else budget, send))


# --- tier 1 -------------------------------------------------------------------------------------------------------


def test_a_request_that_works_costs_no_more(server, endpoint, region):
    assert recover(endpoint, region, scripted(5)) == 5
    assert server.calls == [REGISTER]


def test_a_forgotten_region_is_registered_and_the_request_sent_again(server, endpoint, region):
    assert recover(endpoint, region, scripted(STALE, 5)) == 5
    assert server.calls == [REGISTER, REGISTER]
    assert endpoint.generation(region) == 2


def test_a_region_that_another_request_has_registered_since_is_only_used_again(server, endpoint, region):
    def send():
        if len(server.calls) == 1:
            assert endpoint.renew(region, 1, 20)  # meanwhile
            raise STALE
        return 5
        yield

    assert recover(endpoint, region, send) == 5
    assert server.calls == [REGISTER, REGISTER]


def test_an_event_loop_goes_on_while_a_region_is_registered_again(server, endpoint, region):
    honest, go_on = server.SystemSharedMemoryRegister, threading.Event()

    def late(request, context):
        go_on.wait(20)
        return honest(request, context)

    server.SystemSharedMemoryRegister = late

    async def both():
        request = asyncio.create_task(arun(with_recovery(endpoint, region, Budget(60), scripted(STALE, 5))))
        await asyncio.sleep(0)
        go_on.set()  # nobody else would
        return await request

    assert asyncio.run(both()) == 5
    assert endpoint.generation(region) == 2


@pytest.mark.parametrize(
    ("error", "stale"),
    [
        (UnregisteredRegion("r"), True),
        (RsrvError("precondition", code=Code.FAILED_PRECONDITION, reason=""), True),
        (UnknownModel("Unable to find shared memory region: 'REGION'"), True),  # Triton
        (UnknownModel("unknown model 'twice'"), False),
        (WrongState("weights are moving", reason="residency"), False),
        (InvalidRequest("no"), False),
        (ServerUnreachable("away"), False),
        (RsrvError("internal", reason=""), False),
    ],
)
def test_what_counts_as_forgotten(region, error, stale):
    error.message = error.message.replace("REGION", region.name)
    assert is_stale(error, region) is stale


def test_an_error_of_another_kind_is_the_requests(server, endpoint, region):
    with pytest.raises(InvalidRequest, match="no"):
        recover(endpoint, region, scripted(InvalidRequest("no"), 5))
    with pytest.raises(InvalidRequest, match="still no"):
        recover(endpoint, region, scripted(STALE, InvalidRequest("still no"), 5))
    assert server.calls == [REGISTER, REGISTER]


# --- and beyond ---------------------------------------------------------------------------------------------------


def test_a_server_that_forgets_again_at_once_is_given_up(server, endpoint, region):
    send = scripted(STALE, STALE, 5)
    with pytest.raises(ShmUnrecoverable, match="does not keep") as caught:
        recover(endpoint, region, send)
    assert caught.value.__cause__ is STALE
    assert "auto" in caught.value.hint
    assert (send.left, server.calls) == ([5], [REGISTER, REGISTER])


def test_a_server_that_was_lost_once_more_since_is_told_once_more(server, endpoint, region):
    """It restarted again while the request that followed the first renewal was waiting to be sent again."""
    outcomes, lost = [STALE, STALE, 5], 0

    def send():
        nonlocal lost
        outcome = outcomes.pop(0)
        if outcome is not STALE:
            return outcome
        lost += len(outcomes) == 1
        raise STALE
        yield

    assert run(with_recovery(endpoint, region, Budget(20), send, lambda: lost)) == 5
    assert server.calls == [REGISTER] * 3


def test_once_an_endpoint_is_closed_a_forgotten_region_says_so(server, endpoint, region):
    client_shutdown()
    with pytest.raises(UsageError, match="closed"):
        recover(endpoint, region, scripted(STALE, 5))
    assert server.calls == [REGISTER, "SystemSharedMemoryUnregister"]


def test_a_refused_renewal_is_not_tried_twice_by_one_request(server, endpoint, region):
    server.refuse[REGISTER] = REFUSED
    send = scripted(STALE, 5)
    with pytest.raises(ShmUnrecoverable, match=r"refuses to register .* too many regions"):
        recover(endpoint, region, send)
    assert (send.left, server.calls) == ([5], [REGISTER, REGISTER])


def test_a_server_that_goes_away_during_the_renewal_is_waited_for_by_the_request(server, endpoint, region):
    server.refuse[REGISTER] = AWAY

    def send():
        if len(server.calls) == 1:
            raise STALE
        if len(server.calls) == 2:  # the renewal failed; the retries of this send waited for the server
            server.refuse.clear()
            raise STALE
        return 5
        yield

    assert recover(endpoint, region, send) == 5
    assert server.calls == [REGISTER] * 3


def test_a_server_that_goes_away_whenever_it_is_asked_is_given_up_in_the_end(server, endpoint, region):
    server.refuse[REGISTER] = AWAY
    with pytest.raises(ShmUnrecoverable):
        recover(endpoint, region, scripted(*[STALE] * 9))
    assert server.calls.count(REGISTER) < 9


def test_a_renewal_without_an_answer_ends_with_the_deadline_of_the_request(server, endpoint, region):
    go_on = threading.Event()
    server.SystemSharedMemoryRegister = lambda request, context: go_on.wait(30)
    try:
        with pytest.raises(DeadlineExceeded):
            recover(endpoint, region, scripted(STALE, 5), Budget(0.2))
    finally:
        go_on.set()


def test_a_renewal_that_takes_too_long_is_a_reason_to_give_up(server, endpoint, region, monkeypatch):
    monkeypatch.setattr("rsrv.client.transport.recovery.SETUP_SECONDS", 0.1)
    go_on = threading.Event()
    server.SystemSharedMemoryRegister = lambda request, context: go_on.wait(30)
    try:
        with pytest.raises(ShmUnrecoverable, match=r"more than 0\.1 s"):
            recover(endpoint, region, scripted(STALE, 5), Budget(None))
    finally:
        go_on.set()


def test_once_an_endpoint_is_latched_its_requests_register_nothing(server, endpoint, region):
    endpoint.latch(ShmUnrecoverable("gone"))
    with pytest.raises(ShmUnrecoverable):
        recover(endpoint, region, scripted(STALE, 5))
    assert server.calls == [REGISTER]
    endpoint.unlatch()


# --- with real requests -------------------------------------------------------------------------------------------


def test_eight_requests_that_fail_together_cause_one_registration(server):
    """The registry is wiped when all eight have arrived, so that all of them are told so."""
    arrived = threading.Barrier(8, action=server.regions.clear)
    honest = server.ModelInfer
    sent = {str(number) for number in range(8)}

    def infer(request, context):
        if request.id in sent:
            sent.remove(request.id)
            arrived.wait(20)
        return honest(request, context)

    server.ModelInfer = infer
    answers = []
    with KServeModel(server.url, "twice", shared_memory="on", deadline=60) as model:
        large = np.ones((8 * 40_000, 4), np.float32)
        model.infer({"x": large})  # one region with room for all eight
        registered = server.calls.count(REGISTER)

        def call(number):
            x = np.full((3, 4), number, np.float32)
            answers.append(np.array_equal(model.infer({"x": x}, id=str(number))["y"], 2 * x))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert answers == [True] * 8
    assert server.calls.count(REGISTER) == registered + 1


def test_a_restarted_server_is_told_of_the_region_by_the_next_call(server):
    with KServeModel(server.url, "twice", shared_memory="on") as model:
        model.infer({"x": X})
        server.stop()
        reborn = StubServer(server.url)
        with reborn:
            np.testing.assert_array_equal(model.infer({"x": X + 1})["y"], 2 * (X + 1))
            assert reborn.calls.count(REGISTER) == 1


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_server_that_takes_no_region_again_is_sent_its_tensors_inline_unless_insisted(server, mode):
    with KServeModel(server.url, "twice", shared_memory=mode) as model:
        model.infer({"x": X})
        server.regions.clear()
        server.refuse[REGISTER] = REFUSED
        if mode == "on":
            with pytest.raises(ShmUnrecoverable):
                model.infer({"x": X})
            server.refuse.clear()
            np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
            return
        for _ in range(2):
            np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
            assert server.requests[-1].raw_input_contents
        assert model.endpoint.latched
        assert server.calls.count("IsSameIPCNamespace") == 1
        server.refuse.clear()
        endpoints.of_this_process.reprobe.probe_latched()
        assert not model.endpoint.latched
        np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
        assert not server.requests[-1].raw_input_contents


def test_a_stock_server_that_restarted_is_understood(server):
    """Triton says NOT_FOUND and names the region, without a reason of ours."""
    honest = server._path

    def path(context, region, offset, size):
        if region not in server.regions:
            text = f"Unable to find shared memory region: '{region}'"
            server.abort(context, grpc.StatusCode.NOT_FOUND, text)
        return honest(context, region, offset, size)

    server._path = path
    server.refuse["IsSameIPCNamespace"] = (grpc.StatusCode.UNIMPLEMENTED, "no such method", "")
    with KServeModel(server.url, "twice", shared_memory="on") as model:
        model.infer({"x": X})
        server.regions.clear()
        np.testing.assert_array_equal(model.infer({"x": X})["y"], 2 * X)
