"""Large copies with several threads: every byte once, in its place, errors as of one thread, nobody is needed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rsrv.core.shm.copiers import LEAST_BYTES, PART_BYTES, Copiers

SIZES = (0, 1, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1, 3 * LEAST_BYTES - 1, 5 * LEAST_BYTES + 7 * PART_BYTES + 3)
SOURCE = np.random.default_rng(0).integers(0, 256, max(SIZES), np.uint8)


@pytest.fixture
def make():
    made = []

    def copiers(threads):
        made.append(Copiers(threads))
        return made[-1]

    yield copiers
    for each in made:
        each.close()


def room(size):
    return memoryview(bytearray(size))


def fill(start, part):
    np.frombuffer(part, np.uint8)[:] = SOURCE[start : start + len(part)]


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_comes_to_its_place_once(make, threads, size):
    target, calls = np.zeros(size, np.uint8), []

    def counted(start, part):
        calls.append((start, len(part)))
        fill(start, part)

    make(threads).copy(counted, target.data)
    np.testing.assert_array_equal(target, SOURCE[:size])
    ends = np.cumsum([0, *(length for _, length in sorted(calls))])
    assert [start for start, _ in sorted(calls)] == ends[:-1].tolist()
    assert ends[-1] == size


def test_others_take_a_part_of_a_large_copy_and_none_of_a_small_one(make):
    copiers, names = make(1), set()
    both = threading.Barrier(2)

    def meet(start, part):
        names.add(threading.current_thread().name)
        if start < 2 * PART_BYTES:
            both.wait(60)  # two threads are at it at a time, or this breaks

    copiers.copy(meet, room(LEAST_BYTES))
    assert len(names) == 2
    names.clear()
    copiers.copy(lambda start, part: names.add(threading.current_thread().name), room(LEAST_BYTES - 1))
    assert names == {threading.current_thread().name}


def test_whoever_copies_waits_for_nobody_who_has_not_begun(make):
    copiers = make(1)
    busy, go_on = threading.Event(), threading.Event()
    me = threading.current_thread()

    def hold(start, part):
        if threading.current_thread() is first:
            assert busy.wait(60)
        else:
            busy.set()
            assert go_on.wait(60)

    first = threading.Thread(target=copiers.copy, args=(hold, room(LEAST_BYTES)))
    first.start()
    try:
        assert busy.wait(60)  # the only helper is at another copy
        names = set()
        copiers.copy(lambda start, part: names.add(threading.current_thread()), room(LEAST_BYTES))
        assert names == {me}
    finally:
        go_on.set()
        first.join()


@pytest.mark.parametrize("who", ["caller", "helper"])
def test_an_error_is_raised_when_nobody_writes_into_the_target_any_more(make, who):
    copiers, caller = make(1), threading.current_thread()
    both, inside, done = threading.Barrier(2), [], []

    def fail(start, part):
        inside.append(start)
        try:
            if start < 2 * PART_BYTES:
                both.wait(60)
                if (threading.current_thread() is caller) == (who == "caller"):
                    raise OSError("truncated")
        finally:
            done.append(start)

    with pytest.raises(OSError, match="truncated"):
        copiers.copy(fail, room(8 * LEAST_BYTES))
    assert sorted(inside) == sorted(done)
    target = np.zeros(LEAST_BYTES, np.uint8)
    copiers.copy(fill, target.data)  # and the next copy is as good as any
    np.testing.assert_array_equal(target, SOURCE[:LEAST_BYTES])


def test_many_copies_at_a_time_do_not_mix(make):
    copiers = make(3)

    def one(offset):
        target = np.zeros(LEAST_BYTES + offset, np.uint8)
        copiers.copy(lambda start, part: fill(start + offset, part), target.data)
        return np.array_equal(target, SOURCE[offset : LEAST_BYTES + 2 * offset])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, range(0, 2000, 50)))


def test_after_close_copies_are_made_alone(make):
    copiers = make(2)
    copiers.close()
    copiers.close()
    target = np.zeros(2 * LEAST_BYTES, np.uint8)
    copiers.copy(fill, target.data)
    np.testing.assert_array_equal(target, SOURCE[: 2 * LEAST_BYTES])


def test_a_pool_that_is_closed_amid_a_copy_helps_no_more(make):
    copiers = make(2)
    pool = copiers._pool
    copiers._pool = None
    copiers.close()
    pool.shutdown()
    copiers._pool = pool  # as whoever read it before `close` sees it
    target = np.zeros(2 * LEAST_BYTES, np.uint8)
    copiers.copy(fill, target.data)
    np.testing.assert_array_equal(target, SOURCE[: 2 * LEAST_BYTES])


def test_a_copy_waits_for_whoever_takes_the_task_of_a_thread_that_could_not_be_started(make, monkeypatch):
    copiers, caller = make(3), threading.current_thread()
    copiers.copy(fill, room(LEAST_BYTES))  # one thread is there
    both, rest = threading.Barrier(2), threading.Event()
    size = 3 * LEAST_BYTES

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    def held(start, part):
        if start < 2 * PART_BYTES:
            both.wait(60)
        if threading.current_thread() is not caller:
            assert rest.wait(60)
        elif start + len(part) == size:
            rest.set()
        fill(start, part)

    monkeypatch.setattr(copiers._pool._idle_semaphore, "acquire", lambda timeout=None: False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    target = np.zeros(size, np.uint8)
    copiers.copy(held, target.data)
    np.testing.assert_array_equal(target, SOURCE[:size])
