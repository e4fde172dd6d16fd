"""The thread pool of the grpcio engine."""

import queue
import threading
import weakref

import pytest

from rsrv.rpc.threads import CallThreads

WAIT = 30


@pytest.fixture
def pool():
    pool = CallThreads(3, name="test-pool")
    yield pool
    pool.shutdown()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("test-pool")] == []


def test_tasks_run_with_their_arguments(pool):
    results = queue.SimpleQueue()
    pool.submit(lambda *args, **kwargs: results.put((args, kwargs)), 1, 2, a=3)
    assert results.get(timeout=WAIT) == ((1, 2), {"a": 3})


def test_threads_are_started_when_needed_and_never_more_than_the_size(pool):
    started, release = queue.SimpleQueue(), threading.Event()

    def task(number):
        started.put(number)
        release.wait(WAIT)

    assert pool.size == 0
    for number in range(5):
        pool.submit(task, number)
    assert sorted(started.get(timeout=WAIT) for _ in range(3)) == [0, 1, 2]
    assert pool.size == 3
    assert started.empty()
    release.set()
    assert [started.get(timeout=WAIT) for _ in range(2)] == [3, 4]
    assert pool.size == 3


def test_the_thread_that_became_idle_last_is_used_again(pool, wait_until):
    names = queue.SimpleQueue()
    gates = [threading.Event() for _ in range(3)]

    def task(gate):
        names.put(threading.current_thread().name)
        gate.wait(WAIT)

    for gate in gates:
        pool.submit(task, gate)
    first = [names.get(timeout=WAIT) for _ in range(3)]
    for number, gate in enumerate(gates):
        gate.set()
        wait_until(lambda number=number: len(pool._idle) == number + 1)
    last = pool._idle[-1].name
    assert last in first
    for _ in range(5):
        pool.submit(names.put, threading.get_ident)
        names.get(timeout=WAIT)
        wait_until(lambda: len(pool._idle) == 3)
        assert pool._idle[-1].name == last


def test_an_exception_of_a_task_leaves_its_thread_alive(pool, caplog):
    done = threading.Event()

    def bad():
        raise SystemExit("x")

    single = CallThreads(1, name="test-pool-single")
    single.submit(bad)
    single.submit(done.set)
    assert done.wait(WAIT)
    assert single.size == 1
    single.shutdown()
    assert "unexpected error on an engine thread" in caplog.text


def test_what_comes_afterwards_runs_on_the_same_thread_after_the_task(pool):
    order, done = [], threading.Event()

    def task():
        pool.afterwards(lambda: order.append(("after", threading.get_ident())))
        pool.afterwards(lambda: 1 / 0)
        pool.afterwards(done.set)
        order.append(("task", threading.get_ident()))

    pool.submit(task)
    assert done.wait(WAIT)
    assert [name for name, _ in order] == ["task", "after"]
    assert order[0][1] == order[1][1]


def test_a_pool_that_grows_begins_what_waits(pool):
    started, release = queue.SimpleQueue(), threading.Event()

    def task(number):
        started.put(number)
        release.wait(WAIT)

    for number in range(6):
        pool.submit(task, number)
    assert sorted(started.get(timeout=WAIT) for _ in range(3)) == [0, 1, 2]
    pool.grow(5)
    pool.grow(1)
    assert sorted(started.get(timeout=WAIT) for _ in range(2)) == [3, 4]
    assert (pool.size, started.empty()) == (5, True)
    release.set()
    assert started.get(timeout=WAIT) == 5


def test_after_a_shutdown_nothing_is_accepted():
    pool = CallThreads(2, name="test-pool-closed")
    pool.submit(lambda: None)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="stopped"):
        pool.submit(lambda: None)


def test_a_task_is_forgotten_before_the_next_one_comes(pool, wait_until):
    """A request of many megabytes must not live on in an idle thread."""

    class Body:
        pass

    body, done = Body(), threading.Event()
    alive = weakref.ref(body)
    pool.submit(lambda _: pool.afterwards(done.set), body)
    del body
    assert done.wait(WAIT)
    wait_until(lambda: alive() is None)
