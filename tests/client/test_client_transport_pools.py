"""The pools that all handles of a process share: made when needed, replaced when slots are lost, gone with the last."""

import errno
import os
import threading

import grpc
import pytest
from support.client_stub import own_shared_memory

from rsrv.client.budget import Budget
from rsrv.client.channels import ChannelOptions
from rsrv.client.transport import endpoints, pools
from rsrv.client.transport.lifecycle import client_init, client_shutdown
from rsrv.client.transport.pools import inline_pool, shared_pool
from rsrv.client.windows import OutOfSharedMemory
from rsrv.core.errors import PoolWithdrawn, RegionLimit, UsageError

REGISTER = "SystemSharedMemoryRegister"


@pytest.fixture(autouse=True)
def small_pools():
    with client_init(pool_bytes=8 * 1024, n_slots=8):
        yield
    client_init()


@pytest.fixture
def endpoint(server):
    found = endpoints.acquire(ChannelOptions.build(server.url))
    yield found
    endpoints.release(found)


def shared(endpoint, instead_of=None):
    return shared_pool(endpoint, Budget(20), instead_of)


def lose(pool, slots):
    for _ in range(slots):
        pool.acquire().release(reusable=False)


def test_the_shared_pool_is_one_and_registered_with_each_server_that_it_is_used_with(server, endpoint):
    other = endpoints.acquire(ChannelOptions.build(f"localhost:{server.port}"))
    pool = shared(endpoint)
    assert (pool.n_slots, pool.n_bytes, pool.region_name in own_shared_memory()) == (8, 8 * 1024, True)
    assert shared(other) is pool
    assert shared(endpoint) is pool
    assert server.calls == [REGISTER, REGISTER]
    assert server.regions == {pool.region_name: (pool.key, 8 * 1024)}
    endpoints.release(other)
    assert own_shared_memory() == {pool.region_name}


def test_concurrent_first_uses_make_one_pool(server, endpoint):
    found = []
    threads = [threading.Thread(target=lambda: found.append(shared(endpoint))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert server.calls == [REGISTER]


def test_the_pools_go_with_the_last_endpoint(server):
    first, second = (endpoints.acquire(ChannelOptions.build(server.url)) for _ in range(2))
    pool, inline = shared(first), inline_pool()
    slot = pool.acquire()
    endpoints.release(first)
    assert pool.region_name in own_shared_memory()
    endpoints.release(second)
    assert own_shared_memory() == set()
    assert server.regions == {}
    slot.view("u1", (8,))[:] = 3  # what is lent stays usable
    slot.release()
    for closed in (pool, inline):
        with pytest.raises(PoolWithdrawn):
            closed.acquire()
    assert inline_pool() is not inline
    client_shutdown()


def test_a_pool_that_lost_more_than_half_of_its_slots_is_replaced_when_its_last_slot_is_back(server, endpoint):
    old = shared(endpoint)
    slot = old.acquire()
    lose(old, 4)
    assert shared(endpoint) is old
    lose(old, 1)
    new = shared(endpoint)
    assert new is not old
    assert set(server.regions) == own_shared_memory() == {old.region_name, new.region_name}
    with pytest.raises(PoolWithdrawn):
        old.acquire()
    slot.release()
    assert shared(endpoint) is new
    assert own_shared_memory() == {new.region_name}
    with server.unregistered:
        assert server.unregistered.wait_for(lambda: set(server.regions) == {new.region_name}, 30)


def test_who_was_turned_away_gets_another_pool_and_all_the_same(server, endpoint):
    old = shared(endpoint)
    slots = [old.acquire() for _ in range(8)]
    for number, slot in enumerate(slots):
        slot.release(reusable=number != 3)
    with pytest.raises(PoolWithdrawn):
        old.acquire(8)
    new = shared(endpoint, old)
    assert new is not old
    assert shared(endpoint, old) is new  # the next one that was turned away by the old one
    assert shared(endpoint) is new
    assert own_shared_memory() == {new.region_name}


def test_a_pool_with_slots_out_for_ever_goes_at_shutdown(server, endpoint):
    old = shared(endpoint)
    kept = old.acquire()
    shared(endpoint, old)
    assert len(own_shared_memory()) == 2
    client_shutdown()
    assert own_shared_memory() == set()
    assert server.regions == {}
    kept.release()


def test_the_inline_pool_is_one_and_of_the_size_that_was_asked_for(endpoint):
    pool = inline_pool()
    assert inline_pool() is pool
    assert (pool.region, pool.n_bytes, pool.n_slots) == (None, 8 * 1024, 8)


def test_a_refused_registration_leaves_the_pool_for_other_servers(server, endpoint):
    server.refuse[REGISTER] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many regions", "shm_limit")
    with pytest.raises(RegionLimit):
        shared(endpoint)
    server.refuse.clear()
    (name,) = own_shared_memory()
    assert shared(endpoint).region_name == name


# --- room ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def room(monkeypatch):
    """A /dev/shm with so many free bytes."""
    free = {"bytes": 1 << 20}
    honest = os.posix_fallocate

    def statvfs(path):
        assert path.rstrip("/") == "/dev/shm"
        return os.statvfs_result((4096, 4096, 1 << 20, free["bytes"] // 4096, free["bytes"] // 4096, 0, 0, 0, 0, 255))

    def fallocate(fd, offset, n_bytes):
        if n_bytes > free["bytes"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(fd, offset, n_bytes)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    return free


@pytest.mark.parametrize(("free", "size"), [(1 << 20, 1 << 19), (4 << 30, 256 << 20)])
def test_by_default_the_shared_pool_leaves_half_of_the_room_to_others(endpoint, room, monkeypatch, free, size):
    made = []

    class Noted:
        def __init__(self, n_bytes, **options):
            made.append((n_bytes, options["use_shm"], options["n_slots"]))
            raise OSError(errno.ENOSPC, "seen enough")

    monkeypatch.setattr("rsrv.core.shm.pool.BufferPool", Noted)
    client_init()
    room["bytes"] = free
    with pytest.raises(OutOfSharedMemory, match="seen enough"):
        shared(endpoint)
    assert made == [(size, True, 8)]


def test_a_size_that_was_asked_for_is_kept_or_fails(endpoint, room):
    client_init(pool_bytes=1 << 20, n_slots=2)
    assert shared(endpoint).n_bytes == 1 << 20
    room["bytes"] = 4096
    client_init(pool_bytes=1 << 20, n_slots=2)
    with pytest.raises(OutOfSharedMemory, match="a pool of 1048576 bytes") as caught:
        shared(endpoint)
    assert "client_init(pool_bytes" in caught.value.hint
    room["bytes"] = 1 << 20
    assert shared(endpoint).n_bytes == 1 << 20  # there is room again


def test_a_machine_without_any_room_is_an_error_that_says_so(endpoint, room):
    client_init()
    room["bytes"] = 0
    with pytest.raises(OutOfSharedMemory, match="no room for"):
        shared(endpoint)
    assert own_shared_memory() == set()


@pytest.mark.parametrize(("size", "slots"), [(0, 8), (-1, 8), (4096, 0), (4096, -2), (4, 8)])
def test_impossible_sizes_are_refused_by_name(endpoint, size, slots):
    before = inline_pool()
    with pytest.raises(UsageError, match=r"pool_bytes=|n_slots="):
        client_init(pool_bytes=size, n_slots=slots)
    assert inline_pool() is before


def test_new_settings_close_the_pools_of_before(server, endpoint):
    old = shared(endpoint)
    client_init(pool_bytes=4096, n_slots=2)
    with server.unregistered:
        assert server.unregistered.wait_for(lambda: server.regions == {}, 30)
    assert own_shared_memory() == set()
    new = shared(endpoint)
    assert (new is not old, new.n_bytes, new.n_slots) == (True, 4096, 2)
    assert pools.inline_pool().n_slots == 2


def test_new_settings_leave_a_pool_to_those_who_still_use_it(server, endpoint):
    old = shared(endpoint)
    waiting = inline_pool()
    slot = old.acquire()
    client_init(pool_bytes=4096, n_slots=2)
    new = shared(endpoint)
    assert set(server.regions) == own_shared_memory() == {old.region_name, new.region_name}
    for closed in (old, waiting):
        with pytest.raises(PoolWithdrawn):
            closed.acquire()
    slot.release()
    pools.sweep()
    assert own_shared_memory() == {new.region_name}
    with server.unregistered:
        assert server.unregistered.wait_for(lambda: set(server.regions) == {new.region_name}, 30)


def test_who_still_has_the_pools_of_before_is_lent_the_new_ones(endpoint):
    before = pools._pools
    client_init(pool_bytes=4096, n_slots=2)
    assert before.shared(endpoint, Budget(20)) is shared(endpoint)
    assert len(own_shared_memory()) == 1


def test_a_closed_endpoint_is_lent_no_pool_that_nobody_would_close(server, endpoint):
    shared(endpoint)
    client_shutdown()
    with pytest.raises(UsageError, match="closed"):
        shared(endpoint)
    assert own_shared_memory() == set()
