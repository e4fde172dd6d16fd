"""Endpoints: what a process learns about a server and tells it, once for all handles, whatever the server answers."""

import gc
import logging
import threading
from contextlib import ExitStack

import grpc
import pytest
from support.client_stub import StubServer

from rsrv.client import KServeModel
from rsrv.client.budget import Budget
from rsrv.client.channels import ChannelOptions
from rsrv.client.connection import Connection
from rsrv.client.transport import endpoints
from rsrv.client.transport.endpoint import Endpoint
from rsrv.client.transport.lifecycle import client_shutdown
from rsrv.core.errors import (
    Code,
    DeadlineExceeded,
    RegionLimit,
    RsrvError,
    ServerUnreachable,
    ShmUnrecoverable,
    UsageError,
)
from rsrv.core.shm import OwnedRegion

UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, "unknown method", "")
INTERNAL = (grpc.StatusCode.INTERNAL, "broken", "internal")
REGISTER = "SystemSharedMemoryRegister"
UNREGISTER = "SystemSharedMemoryUnregister"
PROBE = "IsSameIPCNamespace"


def at(url, metadata=(), channel=None):
    return endpoints.acquire(ChannelOptions.build(url), metadata, channel)


def together(work, threads=8):
    """Call `work` in several threads at a time; returns their results or errors."""
    barrier = threading.Barrier(threads)
    results = []

    def one():
        barrier.wait(20)
        try:
            results.append(work())
        except RsrvError as error:
            results.append(error)

    running = [threading.Thread(target=one) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    return results


class Announced:
    """A lock that tells how many came for it before they wait."""

    def __init__(self, lock):
        self._lock = lock
        self.arrivals = threading.Semaphore(0)

    def acquire(self, timeout):
        self.arrivals.release()
        return self._lock.acquire(timeout=timeout)

    def release(self):
        self._lock.release()


@pytest.fixture
def endpoint(server):
    found = at(server.url)
    yield found
    endpoints.release(found)


@pytest.fixture
def region():
    with OwnedRegion.create("client", 4096) as made:
        yield made


# --- the choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "probe", "wanted"),
    [
        ("off", True, False),
        ("off", INTERNAL, False),
        ("auto", True, True),
        ("auto", False, False),
        ("auto", UNIMPLEMENTED, False),
        ("auto", INTERNAL, RsrvError),
        ("on", True, True),
        ("on", False, UsageError),
        ("on", UNIMPLEMENTED, True),
        ("on", INTERNAL, RsrvError),
    ],
)
def test_the_mode_and_the_servers_answer_decide_together(server, endpoint, mode, probe, wanted):
    if isinstance(probe, tuple):
        server.refuse[PROBE] = probe
    else:
        server.same_namespace = probe
    for _ in range(2):
        if isinstance(wanted, bool):
            assert endpoint.uses_shared_memory(mode, Budget(10)) is wanted
        else:
            with pytest.raises(wanted):
                endpoint.uses_shared_memory(mode, Budget(10))
    asked = 0 if mode == "off" else 1 if isinstance(wanted, bool) else 2  # an error is not remembered
    assert server.calls == [PROBE] * asked


def test_an_answer_for_one_mode_is_none_for_another(server, endpoint):
    server.refuse[PROBE] = UNIMPLEMENTED
    assert not endpoint.uses_shared_memory("off", Budget(10))
    assert not endpoint.uses_shared_memory("auto", Budget(10))
    assert endpoint.uses_shared_memory("on", Budget(10))
    assert not endpoint.uses_shared_memory("auto", Budget(10))
    assert server.calls == [PROBE, PROBE]


def test_concurrent_first_calls_of_a_mode_ask_once(server, endpoint):
    assert together(lambda: endpoint.uses_shared_memory("auto", Budget(20))) == [True] * 8
    assert server.calls == [PROBE]


def test_who_waits_for_anothers_question_keeps_to_its_own_deadline(server, endpoint):
    asked, answer = threading.Event(), threading.Event()
    honest = server.IsSameIPCNamespace

    def slow(request, context):
        asked.set()
        answer.wait(30)
        return honest(request, context)

    server.IsSameIPCNamespace = slow
    found = []
    first = threading.Thread(target=lambda: found.append(endpoint.uses_shared_memory("auto", Budget(30))))
    first.start()
    assert asked.wait(20)
    with pytest.raises(DeadlineExceeded):
        endpoint.uses_shared_memory("auto", Budget(0.05))
    answer.set()
    first.join(30)
    assert found == [True]
    assert server.calls == [PROBE]


@pytest.mark.parametrize(
    ("probe", "why"),
    [(True, None), (False, "another IPC namespace"), (UNIMPLEMENTED, "does not say")],
)
def test_an_endpoint_says_why_it_goes_inline(server, endpoint, probe, why):
    assert endpoint.why_inline is None
    if isinstance(probe, tuple):
        server.refuse[PROBE] = probe
    else:
        server.same_namespace = probe
    endpoint.uses_shared_memory("auto", Budget(10))
    assert endpoint.why_inline is None if why is None else why in endpoint.why_inline
    endpoint.latch(RegionLimit("too many regions"))
    assert "too many regions" in endpoint.why_inline


def test_a_latched_endpoint_asks_nothing_and_is_inline_for_auto_and_an_error_for_on(server, endpoint, caplog):
    endpoint.uses_shared_memory("auto", Budget(10))
    calls = len(server.calls)
    with caplog.at_level(logging.WARNING):
        together(lambda: endpoint.latch(ShmUnrecoverable("gone")))
    assert len([record for record in caplog.records if "event=shm_given_up" in record.message]) == 1
    assert endpoint.latched
    assert not endpoint.uses_shared_memory("auto", Budget(10))
    assert not endpoint.uses_shared_memory("off", Budget(10))
    with pytest.raises(ShmUnrecoverable, match="given up: gone") as caught:
        endpoint.uses_shared_memory("on", Budget(10))
    assert "auto" in caught.value.hint
    assert len(server.calls) == calls
    endpoint.unlatch()
    assert endpoint.uses_shared_memory("auto", Budget(10))


# --- registrations ------------------------------------------------------------------------------------------------


def test_a_region_is_registered_once_however_many_ask(server, endpoint, region):
    assert endpoint.generation(region) == 0
    assert together(lambda: endpoint.register(region, 20)) == [None] * 8
    assert server.calls == [REGISTER]
    assert server.regions == {region.name: ("/" + region.name, 4096)}
    assert endpoint.generation(region) == 1


def test_a_refused_registration_is_raised_and_tried_again_by_the_next_call(server, endpoint, region):
    server.refuse[REGISTER] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many regions", "shm_limit")
    with pytest.raises(RegionLimit, match="too many"):
        endpoint.register(region, 20)
    assert endpoint.generation(region) == 0
    server.refuse.clear()
    endpoint.register(region, 20)
    assert endpoint.generation(region) == 1
    assert UNREGISTER not in server.calls


def test_those_who_waited_for_a_registration_share_its_failure(server, endpoint, region):
    server.refuse[REGISTER] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many regions", "shm_limit")
    with pytest.raises(RegionLimit):
        endpoint.register(region, 20)
    entry = endpoint._registrations[region.name]
    entry.lock = lock = Announced(entry.lock)
    lock._lock.acquire()
    results = []
    waiting = threading.Thread(target=lambda: results.extend(together(lambda: endpoint.register(region, 30))))
    waiting.start()
    assert all(lock.arrivals.acquire(timeout=20) for _ in range(8))
    lock._lock.release()
    waiting.join(60)
    assert [str(error) for error in results] == ["too many regions"] * 8
    assert server.calls == [REGISTER, REGISTER]
    server.refuse.clear()
    endpoint.register(region, 20)
    assert endpoint.renew(region, 1, 20)


def test_a_registration_that_was_not_confirmed_in_time_is_taken_back(server, endpoint, region):
    honest, go_on = server.SystemSharedMemoryRegister, threading.Event()

    def late(request, context):
        go_on.wait(30)
        return honest(request, context)

    server.SystemSharedMemoryRegister = late
    with pytest.raises(DeadlineExceeded):
        endpoint.register(region, 0.1)
    with server.unregistered:
        assert server.unregistered.wait_for(lambda: UNREGISTER in server.calls, 30)
    go_on.set()


def test_only_one_of_many_renews_a_registration(server, endpoint, region):
    endpoint.register(region, 20)
    seen = endpoint.generation(region)
    server.regions.clear()
    results = together(lambda: endpoint.renew(region, seen, 20))
    assert sorted(results) == [False] * 7 + [True]
    assert server.calls == [REGISTER, REGISTER]
    assert endpoint.generation(region) == 2


def test_those_who_waited_for_a_renewal_share_its_failure(server, endpoint, region):
    endpoint.register(region, 20)
    server.refuse[REGISTER] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many regions", "shm_limit")
    entry = endpoint._registrations[region.name]
    entry.lock = lock = Announced(entry.lock)
    lock._lock.acquire()
    results = []
    waiting = threading.Thread(target=lambda: results.extend(together(lambda: endpoint.renew(region, 1, 30))))
    waiting.start()
    assert all(lock.arrivals.acquire(timeout=20) for _ in range(8))
    lock._lock.release()
    waiting.join(60)
    assert [str(error) for error in results] == ["too many regions"] * 8
    assert server.calls == [REGISTER, REGISTER]
    server.refuse.clear()
    assert endpoint.renew(region, 1, 20)  # a later one asks again


def test_a_region_that_was_given_up_is_not_renewed(server, endpoint, region):
    endpoint.register(region, 20)
    endpoint.unregister(region, wait=True)
    assert server.regions == {}
    with pytest.raises(ShmUnrecoverable, match="no longer registered"):
        endpoint.renew(region, 1, 20)
    endpoint.unregister(region, wait=True)  # unknown now: nothing is sent
    assert server.calls == [REGISTER, UNREGISTER]


def refusing_known_names(server, text="shared memory region already in manager"):
    """Like Triton, which refuses to register a name that it holds."""
    honest = server.SystemSharedMemoryRegister

    def register(request, context):
        if request.name in server.regions:
            StubServer.abort(context, grpc.StatusCode.ALREADY_EXISTS, text)
        return honest(request, context)

    server.SystemSharedMemoryRegister = register


def test_a_server_that_holds_our_random_name_already_holds_our_region(server, endpoint, region):
    refusing_known_names(server)
    server.regions[region.name] = (region.key, region.byte_size)
    endpoint.register(region, 20)
    assert endpoint.generation(region) == 1
    assert server.calls == [REGISTER]


def test_a_name_that_others_may_have_used_is_freed_first(server, endpoint):
    refusing_known_names(server)
    with OwnedRegion.create("client", 4096, key="/rsrv-test-transport-of-a-user") as region:
        server.regions[region.name] = ("/something-else", 1)
        endpoint.register(region, 20)
    assert server.calls == [REGISTER, UNREGISTER, REGISTER]
    assert server.regions == {region.name: (region.key, 4096)}


def test_a_server_that_is_not_there_is_an_error_of_the_registration(server, endpoint, region):
    server.stop()
    with pytest.raises(ServerUnreachable) as caught:
        endpoint.register(region, 20)
    assert caught.value.code is Code.UNAVAILABLE
    assert endpoint.generation(region) == 0


# --- endpoints of a process ---------------------------------------------------------------------------------------


def test_handles_that_reach_a_server_in_the_same_way_share_an_endpoint(server):
    first, second = at(server.url), at(f"grpc://{server.url}")
    other_words = at(server.url, [("authorization", "Bearer x")])
    with grpc.insecure_channel(server.url) as channel:
        own, same_own = at(server.url, (), channel), at(server.url, (), channel)
        assert first is second
        assert own is same_own
        assert len({first, other_words, own}) == 3
        for one in (first, second, other_words, own, same_own):
            endpoints.release(one)
        assert endpoints.of_this_process.all() == ()
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")  # never closed by us


def test_the_last_user_unregisters_everything_and_hangs_up(server, region):
    first, second = at(server.url), at(server.url)
    first.register(region, 20)
    endpoints.release(first)
    assert set(server.regions) == {region.name}
    endpoints.release(second)
    assert server.regions == {}
    endpoints.release(second)  # once too often does no harm
    with pytest.raises(UsageError, match="closed"):
        first.register(region, 20)


def test_a_server_that_hangs_does_not_hold_the_last_user(server, region, monkeypatch):
    monkeypatch.setattr("rsrv.client.transport.endpoint.UNREGISTER_SECONDS", 0.2)
    release = threading.Event()
    server.SystemSharedMemoryUnregister = lambda request, context: release.wait(30)
    found = at(server.url)
    found.register(region, 20)
    endpoints.release(found)  # would wait 30 s for an answer
    assert not release.is_set()
    release.set()


def test_two_addresses_of_one_server_do_not_take_the_region_from_each_other(server):
    """Each registers the shared pool under the same name; the second must leave no moment without it."""
    other = f"localhost:{server.port}"
    first, second = at(server.url), at(other)
    assert first is not second
    with OwnedRegion.create("client", 4096) as region:
        first.register(region, 20)
        second.register(region, 20)
        assert UNREGISTER not in server.calls
        endpoints.release(second)  # takes it from the first, which gets it back when a request of it fails
        assert server.regions == {}
        assert first.renew(region, first.generation(region), 20)
        assert set(server.regions) == {region.name}
        endpoints.release(first)


def test_all_handles_share_what_one_of_them_learned(server):
    with KServeModel(server.url, "twice") as first, KServeModel(server.url, "twice") as second:
        assert first.endpoint is second.endpoint
        for handle in (first, second):
            assert handle.endpoint.uses_shared_memory("auto", Budget(10))
    assert server.calls.count(PROBE) == 1


def test_shutting_down_closes_the_handles_that_are_open(server, region):
    handle = KServeModel(server.url, "twice", shared_memory="off")
    handle.endpoint.register(region, 20)
    client_shutdown()
    assert server.regions == {}
    with pytest.raises(UsageError, match="closed"):
        handle.metadata()
    with KServeModel(server.url, "twice", shared_memory="off") as another:
        assert another.metadata().name == "twice"
    handle.close()
    client_shutdown()


def test_a_server_that_did_not_see_our_memory_is_asked_again_after_the_interval(server):
    now = 100.0
    found = Endpoint(Connection(ChannelOptions.build(server.url)), interval=lambda: 60.0, clock=lambda: now)
    server.same_namespace = False  # as a gateway says while a worker is away
    assert found.route("auto") is None
    assert not found.uses_shared_memory("auto", Budget(10))
    server.same_namespace = True
    now = 159.0
    assert found.route("auto") is False
    now = 160.0
    assert found.route("auto") is None
    assert found.uses_shared_memory("auto", Budget(10))
    now = 1e6
    assert found.route("auto") is True
    assert server.calls == [PROBE, PROBE]
    found.close()


def test_without_an_interval_an_answer_is_for_ever(server):
    now = 0.0
    found = Endpoint(Connection(ChannelOptions.build(server.url)), clock=lambda: now)
    server.same_namespace = False
    assert not found.uses_shared_memory("auto", Budget(10))
    now = 1e6
    assert found.route("auto") is False
    found.close()


def test_a_goodbye_without_an_answer_shortens_those_that_follow(monkeypatch):
    connection = Connection(ChannelOptions.build("127.0.0.1:1"))
    waits = []

    def tell(method, body, timeout, *, wait):
        waits.append(timeout)
        return len(waits) == 3

    monkeypatch.setattr(connection, "tell", tell)
    monkeypatch.setattr("rsrv.client.transport.endpoint.Endpoint._tell_of", register_at_once)
    found = Endpoint(connection)
    with ExitStack() as stack:
        regions = [stack.enter_context(OwnedRegion.create("client", 64)) for _ in range(4)]
        for region in regions:
            found.register(region, 20)
            found.unregister(region, wait=True)
    assert waits == [5.0, 0.05, 0.05, 5.0]  # the third was answered: the server is well again


def register_at_once(self, entry, region, timeout):
    entry.generation += 1


def test_what_the_collector_took_is_unregistered_at_the_next_registration(server, endpoint):
    dropped = OwnedRegion.create("client", 4096)
    endpoint.register(dropped, 20)
    del dropped
    gc.collect()
    with OwnedRegion.create("client", 4096) as region:
        endpoint.register(region, 20)
        with server.unregistered:
            assert server.unregistered.wait_for(lambda: set(server.regions) == {region.name}, 30)


def test_a_closed_endpoint_is_not_given_up(server, caplog):
    found = at(server.url)
    client_shutdown()
    with caplog.at_level(logging.WARNING):
        found.latch(ShmUnrecoverable("gone"))
    assert (found.latched, caplog.text) == (False, "")
