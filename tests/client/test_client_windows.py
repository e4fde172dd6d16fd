"""The window allocator of a handle, with a registrar that only remembers."""

import errno
import os
import threading
from itertools import pairwise

import pytest
from support.client_stub import own_shared_memory

from rsrv.client.windows import OutOfSharedMemory, WindowPool
from rsrv.core.errors import ServerUnreachable


class Remembering:
    def __init__(self):
        self.events = []
        self.refuse = None

    def register(self, region, timeout):
        self.events.append(("register", region.name))
        if self.refuse is not None:
            raise self.refuse

    def unregister(self, region, *, wait):
        self.events.append(("unregister", region.name))


class Remembered(WindowPool):
    """Knows its windows, so that a test may leave them to the fixture."""

    def __init__(self, registrar):
        super().__init__(registrar)
        self.taken = set()

    def acquire(self, n_bytes, timeout):
        window = super().acquire(n_bytes, timeout)
        self.taken.add(window)
        return window

    def release(self, window, *, reusable=True):
        self.taken.discard(window)
        super().release(window, reusable=reusable)


def no_limit():
    return None


@pytest.fixture
def registrar():
    return Remembering()


@pytest.fixture
def pool(registrar):
    pool = Remembered(registrar)
    yield pool
    for window in list(pool.taken):
        pool.release(window)
    pool.close()


def test_windows_in_use_never_overlap_and_start_on_64_bytes(pool):
    windows = [pool.acquire(n, no_limit) for n in (1, 64, 65, 1000, 7)]
    spans = sorted((w.offset, w.offset + w.byte_size) for w in windows)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert [w.byte_size for w in windows] == [64, 64, 128, 1024, 64]
    assert len({w.region.name for w in windows}) == 1


def test_a_released_window_is_used_again(pool, registrar):
    first, second = pool.acquire(100, no_limit), pool.acquire(100, no_limit)
    pool.release(first)
    assert pool.acquire(100, no_limit).offset == first.offset
    assert second.offset != first.offset
    assert len(registrar.events) == 1


def test_a_region_without_room_is_replaced_by_a_larger_one_that_is_registered_first(pool, registrar):
    small = pool.acquire(1000, no_limit)
    name = small.region.name
    pool.release(small)
    large = pool.acquire(10 << 20, no_limit)
    assert large.region.byte_size >= 10 << 20
    assert registrar.events == [("register", name), ("register", large.region.name), ("unregister", name)]
    assert own_shared_memory() == {large.region.name}


def test_an_outgrown_region_stays_while_a_call_uses_it(pool, registrar):
    busy = pool.acquire(1000, no_limit)
    large = pool.acquire(10 << 20, no_limit)
    assert own_shared_memory() == {busy.region.name, large.region.name}
    assert ("unregister", busy.region.name) not in registrar.events
    pool.release(busy)
    assert ("unregister", busy.region.name) in registrar.events
    assert own_shared_memory() == {large.region.name}


def test_a_window_that_may_still_be_written_takes_its_region_with_it(pool):
    doubtful, other = pool.acquire(100, no_limit), pool.acquire(100, no_limit)
    pool.release(doubtful, reusable=False)
    fresh = pool.acquire(100, no_limit)
    assert fresh.region.name != doubtful.region.name
    assert doubtful.region.name in own_shared_memory()  # the other call still uses it
    pool.release(other)
    assert own_shared_memory() == {fresh.region.name}


def test_a_refused_registration_leaves_no_region(pool, registrar):
    registrar.refuse = ServerUnreachable("gone")
    with pytest.raises(ServerUnreachable):
        pool.acquire(100, no_limit)
    assert own_shared_memory() == set()
    registrar.refuse = None
    assert pool.acquire(100, no_limit).offset == 0


def test_close_waits_for_no_call_but_takes_its_region_when_it_ends(pool):
    window = pool.acquire(100, no_limit)
    pool.close()
    pool.close()
    assert own_shared_memory() == {window.region.name}
    pool.release(window)
    assert own_shared_memory() == set()


def test_a_pool_that_nobody_closed_is_unlinked_when_it_is_collected(registrar):
    pool = WindowPool(registrar)
    pool.release(pool.acquire(100, no_limit))
    assert len(own_shared_memory()) == 1
    del pool
    assert own_shared_memory() == set()


def test_no_room_on_this_machine_is_told_apart_from_a_refusal_of_the_server(pool, monkeypatch):
    def full(fd, offset, n_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfSharedMemory, match="no room for 65536 bytes of shared memory; free some or enlarge it"):
        pool.acquire(100, no_limit)
    assert own_shared_memory() == set()


def test_no_descriptor_left_on_this_machine_is_out_of_shared_memory_too(pool, monkeypatch):
    def full(prefix, n_bytes):
        raise OSError(errno.EMFILE, "Too many open files", "/dev/shm/rsrv-client")

    monkeypatch.setattr("rsrv.client.windows.OwnedRegion.create", full)
    with pytest.raises(OutOfSharedMemory, match="a shared memory region cannot be created: Too many open files"):
        pool.acquire(100, no_limit)


def test_many_threads_never_share_a_byte(pool):
    """Each thread fills its window with its own number and finds nothing else in it afterwards."""
    foreign = []

    def work(number):
        for step in range(50):
            window = pool.acquire(64 + 640 * (step % 7), no_limit)
            view = window.region.view[window.offset : window.offset + window.byte_size]
            view[:] = bytes([number]) * len(view)
            if bytes(view) != bytes([number]) * len(view):
                foreign.append(number)
            view.release()
            pool.release(window, reusable=step % 10 != 0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert foreign == []
    assert len(own_shared_memory()) <= 1
