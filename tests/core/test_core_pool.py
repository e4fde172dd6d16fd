"""The pool of buffers: who gets which slots and in which order, what ends a wait, and what becomes of the region."""

import errno
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from rsrv.core.errors import Code, PoolAcquireTimeout, PoolWithdrawn, UsageError
from rsrv.core.shm.pool import BufferPool
from rsrv.core.shm.slot import PoolSlot

LONG = 30.0


def own_objects() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name}


def mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(f"/dev/shm/{name}" in line for line in maps)


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    before, others = own_objects(), set(threading.enumerate())
    yield
    assert own_objects() == before
    assert set(threading.enumerate()) <= others  # of which some may have ended meanwhile


@pytest.fixture(params=["shm", "inline"])
def pool(request):
    with BufferPool(4 * 1024, n_slots=4, use_shm=request.param == "shm") as pool:
        yield pool


@pytest.fixture
def inline():
    with BufferPool(4 * 1024, n_slots=4, use_shm=False) as pool:
        yield pool


class Waiter(threading.Thread):
    """Acquires in a thread; started, it is in the line before `start` returns."""

    def __init__(self, pool, span, deadline=None, done=None):
        super().__init__(daemon=True)
        self.pool, self.span, self.deadline, self.done = pool, span, deadline, done
        self.slot = self.error = None

    def start(self):
        waiting = self.pool.waiting
        super().start()
        end = time.monotonic() + LONG
        while self.pool.waiting == waiting and self.is_alive():
            assert time.monotonic() < end
            time.sleep(0.001)
        return self

    def run(self):
        try:
            self.slot = self.pool.acquire(self.span, self.deadline)
        except Exception as error:
            self.error = error
        if self.done is not None:
            self.done.append(self)

    def result(self):
        self.join(LONG)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.slot


# --- geometry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_bytes", "n_slots", "slot_bytes"),
    [(4096, 4, 1024), (4096, 1, 4096), (1000, 3, 320), (640, 10, 64), (100, 10, 64), (8, 8, 64), (1, 1, 64)],
)
@pytest.mark.parametrize("use_shm", [True, False])
def test_slots_are_equal_multiples_of_64_bytes(n_bytes, n_slots, slot_bytes, use_shm):
    with BufferPool(n_bytes, n_slots=n_slots, use_shm=use_shm) as pool:
        assert (pool.slot_bytes, pool.n_slots, pool.n_bytes) == (slot_bytes, n_slots, slot_bytes * n_slots)
        assert pool.memory.shape == (pool.n_bytes,)
        assert pool.memory.ctypes.data % 64 == 0
        slots = [pool.acquire() for _ in range(n_slots)]
        assert [(slot.index, slot.offset, slot.capacity) for slot in slots] == [
            (i, i * slot_bytes, slot_bytes) for i in range(n_slots)
        ]


@pytest.mark.parametrize(("n_bytes", "n_slots"), [(0, 1), (-1, 1), (64, 0), (64, -3), (7, 8)])
def test_sizes_that_make_no_pool_are_refused(n_bytes, n_slots):
    with pytest.raises(UsageError, match=f"{n_bytes} bytes in {n_slots} slots") as caught:
        BufferPool(n_bytes, n_slots=n_slots)
    assert caught.value.hint


def test_a_shared_pool_has_a_random_key_of_its_own_and_an_inline_one_has_none():
    with BufferPool(64, name="client") as a, BufferPool(64, name="client") as b, BufferPool(64, use_shm=False) as c:
        assert re.fullmatch(rf"/rsrv-client-{os.getpid()}-[0-9a-f]{{16}}", a.key)
        assert a.region_name == a.key[1:] == a.region.name
        assert a.key != b.key
        assert own_objects() >= {a.region_name, b.region_name}
        assert (c.region, c.region_name, c.key) == (None, "", "")


def test_an_explicit_key_is_taken_as_it_is_and_only_once():
    key = f"/rsrvtest-pool-{os.getpid()}-{os.urandom(4).hex()}"
    with BufferPool(64, key=key) as pool:
        assert (pool.key, pool.region_name) == (key, key[1:])
        assert key[1:] in own_objects()
        with pytest.raises(FileExistsError):
            BufferPool(64, key=key)
        assert key[1:] in own_objects()


@pytest.mark.parametrize("bad", ["/a/b", "", "..", "x" * 300, "nul\0"])
def test_a_key_that_is_no_name_is_refused(bad):
    with pytest.raises(UsageError, match="name"):
        BufferPool(64, key=bad)


def test_a_name_that_is_none_is_refused():
    with pytest.raises(UsageError, match="name"):
        BufferPool(64, name="a/b")


def test_a_full_machine_is_an_os_error_and_leaves_nothing(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="shm-size"):
        BufferPool(1 << 20)


# --- who gets what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [0, -1, 5, 10**9])
def test_a_span_that_the_pool_can_never_have_is_refused_at_once(pool, span):
    with pytest.raises(UsageError, match=f"{span} adjacent slots") as caught:
        pool.acquire(span)
    assert "pool_bytes" in caught.value.hint
    assert pool.free == 4


def test_the_lowest_adjacent_slots_are_lent(pool):
    a, b, c = pool.acquire(), pool.acquire(), pool.acquire()
    a.release()
    c.release()
    assert pool.acquire(2).index == 2  # 0 is free too, but 1 is not
    assert pool.acquire().index == 0
    assert (b.index, pool.free, pool.lent) == (1, 0, 3)


def test_a_span_waits_until_adjacent_slots_are_free(pool):
    slots = [pool.acquire() for _ in range(4)]
    waiter = Waiter(pool, 2).start()
    slots[0].release()
    slots[2].release()
    assert pool.free == 2
    assert waiter.slot is None
    slots[1].release()
    assert (waiter.result().index, waiter.slot.span, waiter.slot.capacity) == (0, 2, 2048)


def test_the_line_is_served_in_order_even_when_a_later_one_would_fit(pool):
    whole, done = pool.acquire(4), []
    waiters = [Waiter(pool, span, done=done).start() for span in (4, 1, 1)]
    whole.release()
    assert waiters[0].result().span == 4
    assert done == waiters[:1]
    waiters[0].slot.release()
    assert [waiters[1].result().index, waiters[2].result().index] == [0, 1]


def test_a_newcomer_does_not_overtake_those_who_wait(pool):
    held = [pool.acquire() for _ in range(3)]  # one slot stays free
    large, small = Waiter(pool, 2).start(), Waiter(pool, 1).start()
    assert pool.free == 1
    assert small.slot is None
    held[2].release()
    assert large.result().index == 2
    held[0].release()
    assert small.result().index == 0


def test_under_contention_no_two_live_slots_overlap_and_all_come_back():
    with BufferPool(8 * 64, n_slots=8) as pool:
        failures = []

        def work(me):
            rng = random.Random(me)
            try:
                for _ in range(200):
                    with pool.acquire(rng.choice((1, 2)), time.monotonic() + LONG) as slot:
                        mine = slot.view(np.uint8, slot.capacity)
                        mine[:] = me
                        if rng.random() < 0.2:
                            time.sleep(0)
                        if not (mine == me).all():
                            failures.append((me, slot))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(me,)) for me in range(1, 33)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert not failures
        assert (pool.free, pool.lent) == (8, 0)
        with pool.acquire(8, time.monotonic() + LONG) as drained:
            assert drained.index == 0


# --- what ends a wait ---------------------------------------------------------------------------------------------


def test_a_waiter_wakes_by_itself_at_its_deadline(pool):
    pool.acquire(4)
    started = time.monotonic()
    with pytest.raises(PoolAcquireTimeout) as caught:
        pool.acquire(2, started + 0.2)
    assert time.monotonic() >= started + 0.2
    assert caught.value.waited >= 0.19
    assert (caught.value.span, caught.value.code) == (2, Code.DEADLINE_EXCEEDED)
    assert pool.waiting == 0


def test_an_expired_deadline_fails_even_when_slots_are_free(pool):
    with pytest.raises(PoolAcquireTimeout):
        pool.acquire(1, time.monotonic())
    assert pool.free == 4


@pytest.mark.parametrize("deadline", [None, float("inf"), 1e18])
def test_a_deadline_that_never_comes_is_none(pool, deadline):
    slot = pool.acquire(4)
    waiter = Waiter(pool, 1, deadline).start()
    slot.release()
    assert waiter.result().index == 0


def test_who_gives_up_at_the_head_lets_the_others_pass(pool):
    held = pool.acquire(3)
    impatient = Waiter(pool, 2, time.monotonic() + 0.3).start()
    patient = Waiter(pool, 1).start()
    with pytest.raises(PoolAcquireTimeout):
        impatient.result()
    assert patient.result().index == 3
    held.release()


def test_a_waiter_that_is_interrupted_leaves_the_line(pool):
    def interrupt(*_):
        raise KeyboardInterrupt

    def when_it_waits():
        end = time.monotonic() + LONG
        while not pool.waiting and time.monotonic() < end:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGALRM)

    held = pool.acquire(4)
    before = signal.signal(signal.SIGALRM, interrupt)
    other = threading.Thread(target=when_it_waits)
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            pool.acquire(1, time.monotonic() + 2 * LONG)
        other.join(LONG)
    finally:
        signal.signal(signal.SIGALRM, before)
    held.release()
    assert (pool.free, pool.waiting) == (4, 0)


# --- giving back --------------------------------------------------------------------------------------------------


def test_a_double_release_is_an_error_also_after_somebody_else_has_the_slot(pool):
    first = pool.acquire(2)
    first.release()
    with pytest.raises(UsageError, match="double release of slot 0"):
        first.release()
    again = pool.acquire(2)
    assert again.index == first.index
    with pytest.raises(UsageError, match="double release"):
        pool.release(first)
    assert again.live
    assert pool.free == 2


def test_a_slot_of_another_pool_is_not_taken(pool, inline):
    with pytest.raises(UsageError, match="does not belong"):
        pool.release(inline.acquire())
    assert inline.free == 3


def test_many_threads_that_release_one_slot_free_it_once(inline):
    slot, errors, gate = inline.acquire(), [], threading.Barrier(8)

    def give_back():
        gate.wait(LONG)
        try:
            slot.release()
        except UsageError as error:
            errors.append(error)

    threads = [threading.Thread(target=give_back) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert (len(errors), inline.free, inline.lent) == (7, 4, 0)


def test_a_slot_can_come_back_where_this_thread_holds_the_lock(inline):
    # A finalizer runs wherever the garbage collector strikes.
    slot, waiter = inline.acquire(4), Waiter(inline, 4).start()
    with inline._held():
        slot.release()
    waiter.result().release()
    assert inline.free == 4


def test_slots_that_a_late_server_may_write_into_are_never_lent_again(pool):
    late, other = pool.acquire(), pool.acquire()
    late.release(reusable=False)
    other.release()
    assert (pool.withdrawn, pool.free, pool.lent) == (1, 3, 0)
    assert [pool.acquire().index for _ in range(3)] == [1, 2, 3]


def test_a_span_that_no_longer_exists_fails_at_once_and_so_do_those_who_wait_for_it(pool):
    slots = [pool.acquire() for _ in range(4)]
    three, two = Waiter(pool, 3).start(), Waiter(pool, 2).start()
    slots[1].release(reusable=False)
    with pytest.raises(PoolWithdrawn, match="never again have 3 adjacent slots"):
        three.result()
    with pytest.raises(PoolWithdrawn):
        pool.acquire(3, time.monotonic() + LONG)
    assert two.slot is None
    assert two.error is None
    slots[2].release()
    slots[3].release()
    assert two.result().index == 2
    two.slot.release(reusable=False)
    slots[0].release()
    assert pool.acquire().index == 0
    with pytest.raises(PoolWithdrawn, match="3 of them"):
        pool.acquire(2)


def test_withdrawing_everything_leaves_nothing_to_lend(pool):
    pool.acquire(4).release(reusable=False)
    assert (pool.withdrawn, pool.free) == (4, 0)
    with pytest.raises(PoolWithdrawn):
        pool.acquire()


def test_poisoned_slots_show_who_reads_after_the_release(monkeypatch):
    monkeypatch.setenv("RSRV_POOL_POISON", "1")
    with BufferPool(256, n_slots=4) as pool:
        a, b, c = pool.acquire(), pool.acquire(), pool.acquire()
        pool.memory[:] = 7
        a.release()
        c.release(reusable=False)  # the server may still read what lies there
        assert [set(pool.memory[i * 64 : (i + 1) * 64].tolist()) for i in range(4)] == [{0xA5}, {7}, {7}, {7}]
        assert b.live


# --- the end ------------------------------------------------------------------------------------------------------


def test_closing_fails_those_who_wait_and_those_who_come(pool):
    held, waiter = pool.acquire(4), Waiter(pool, 1).start()
    pool.close()
    for attempt in (waiter.result, pool.acquire):
        with pytest.raises(PoolWithdrawn, match="lends no more"):
            attempt()
    held.release()
    pool.close()


def test_a_closed_pool_is_unlinked_at_once_and_unmapped_with_its_last_slot():
    pool = BufferPool(1024, n_slots=2)
    name, slots = pool.region_name, [pool.acquire(), pool.acquire()]
    pool.close()
    assert name not in own_objects()
    assert mapped(name)
    slots[0].release()
    slots[1].view(np.uint8, 4)[:] = 1
    assert mapped(name)
    slots[1].release()
    assert not mapped(name)
    with pytest.raises(UsageError, match="released"):
        slots[1].view(np.uint8, 4)


def test_an_array_that_outlives_its_closed_pool_keeps_its_memory():
    pool = BufferPool(64, n_slots=1)
    name = pool.region_name
    with pool, pool.acquire() as slot:
        array = slot.view(np.uint8, 64)
    array[:] = 5
    assert mapped(name)
    assert array.sum() == 320
    del array, pool, slot
    assert not mapped(name)


def test_a_retired_pool_keeps_its_name_until_somebody_closes_it_when_the_last_slot_is_back():
    pool = BufferPool(1024, n_slots=2)
    name, a, b, calls = pool.region_name, pool.acquire(), pool.acquire(), []

    def idle():
        calls.append(pool.lent)
        pool.close()

    pool.retire(idle)
    with pytest.raises(PoolWithdrawn):
        pool.acquire()
    a.release(reusable=False)
    assert not calls
    assert name in own_objects()
    b.release()
    assert calls == [0]
    assert name not in own_objects()
    assert not mapped(name)
    pool.retire()
    assert calls == [0]


def test_retiring_an_idle_pool_is_over_at_once(pool):
    calls = []
    pool.retire(lambda: calls.append("idle"))
    assert calls == ["idle"]


def test_a_pool_that_nobody_closed_goes_with_its_last_reference():
    pool = BufferPool(64)
    name = pool.region_name
    slot = pool.acquire()
    del pool
    assert name in own_objects()
    del slot
    assert name not in own_objects()


CHILD = """
    import os, sys
    os.environ["RSRV_POOL_POISON"] = "1"
    from rsrv.core.errors import PoolWithdrawn
    from rsrv.core.shm import BufferPool

    pool = BufferPool(256, n_slots=4)
    slot = pool.acquire()
    pool.memory[:] = 7
    with pool._held():  # as if another thread had the lock at the moment of the fork
        child = os.fork()
    if not child:
        try:
            pool.acquire()
        except PoolWithdrawn as error:
            assert str(os.getppid()) in str(error)
        else:
            os._exit(1)
        slot.release()
        pool.retire(lambda: os._exit(2))
        pool.close()
        del pool, slot
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert os.path.exists("/dev/shm/" + pool.region_name)
    assert set(pool.memory.tolist()) == {7}
    slot.release()
    assert pool.acquire(4).index == 0
    print(pool.region_name)
"""


def test_a_forked_child_gets_no_slot_and_touches_nothing_and_the_parent_unlinks_at_exit():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(CHILD)], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert not os.path.exists(f"/dev/shm/{result.stdout.strip()}")


def test_the_public_names_are_those_of_the_module():
    from rsrv.core import shm

    assert (shm.BufferPool, shm.PoolSlot) == (BufferPool, PoolSlot)
