import gc
import threading
import time
import weakref
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from sched_support import Clock

from rsrv.core.errors import DeadlineExceeded, HookError, ServerStopping
from rsrv.serve.hook_pool import HookPool, Job


@pytest.fixture
def pool():
    pool = HookPool(2)
    yield pool
    pool.close()


@pytest.fixture
def clock(monkeypatch):
    """The time of the pool; it passes only when told."""
    clock = Clock()
    monkeypatch.setattr("rsrv.serve.hook_pool.time", SimpleNamespace(monotonic_ns=clock, monotonic=time.monotonic))
    return clock


def run(pool, work, **kw):
    answers = SimpleQueue()
    pool.submit(Job(work, lambda value, error: answers.put((value, error)), what="hook h of model 'm'", **kw))
    return answers


def test_a_value_and_an_exception_reach_the_caller(pool):
    assert run(pool, lambda: 3).get() == (3, None)
    value, error = run(pool, lambda: 1 // 0).get()
    assert value is None
    assert isinstance(error, ZeroDivisionError)


def test_jobs_overlap_on_as_many_threads_as_the_pool_has_and_no_more(pool):
    both = threading.Barrier(2, timeout=20)
    answers = [run(pool, lambda: both.wait() >= 0) for _ in range(6)]
    assert [a.get() for a in answers] == [(True, None)] * 6
    assert len(pool._workers) == 2


def test_a_job_past_its_time_fails_its_thread_is_replaced_and_the_late_value_is_dropped(pool):
    release, lost = threading.Event(), threading.Event()
    answers = run(pool, release.wait, timeout=0.02, lost=lost.set)
    value, error = answers.get()
    assert value is None
    assert isinstance(error, HookError)
    assert error.message == "hook h of model 'm' did not return within 0.02 s"
    assert lost.wait(20)
    both = threading.Barrier(2, timeout=20)
    assert [a.get() for a in [run(pool, both.wait) for _ in range(2)]] in (
        [(0, None), (1, None)],
        [(1, None), (0, None)],
    )
    assert pool.lost_threads == 1
    release.set()
    assert run(pool, lambda: 1).get() == (1, None)
    assert answers.empty()


def test_a_job_that_waits_behind_a_lost_thread_runs_on_the_replacement():
    pool = HookPool(1)
    release = threading.Event()
    hung = run(pool, release.wait, timeout=0.02)
    behind = run(pool, lambda: "ran", timeout=60)
    assert isinstance(hung.get()[1], HookError)
    assert behind.get() == ("ran", None)
    release.set()
    pool.close()


def test_a_deadline_answers_the_request_but_costs_no_thread(clock, pool):
    release, running = threading.Event(), threading.Event()

    def work():
        running.set()
        release.wait()

    answers = run(pool, work, deadline_ns=clock() + 20_000_000)
    assert running.wait(20)
    clock.advance(0.02)
    assert isinstance(answers.get()[1], DeadlineExceeded)
    assert pool.lost_threads == 0
    release.set()
    assert run(pool, lambda: 1).get() == (1, None)
    assert answers.empty()


def test_a_job_whose_deadline_passes_in_the_queue_never_runs():
    pool = HookPool(1)
    release, ran = threading.Event(), threading.Event()
    first = run(pool, release.wait)
    second = run(pool, ran.set, deadline_ns=time.monotonic_ns() + 1)
    assert isinstance(second.get()[1], DeadlineExceeded)
    release.set()
    assert first.get() == (True, None)
    assert run(pool, lambda: 1).get() == (1, None)
    assert not ran.is_set()
    pool.close()


def test_answered_jobs_do_not_pile_up_in_the_watch(pool):
    for _ in range(2000):
        assert run(pool, lambda: 1, timeout=3600, deadline_ns=time.monotonic_ns() + 3600 * 10**9).get() == (1, None)
    assert len(pool._due) < 1000


def test_a_job_that_hangs_past_its_deadline_costs_its_thread_at_the_time_limit_however_busy_the_pool_is(clock, pool):
    release, running, lost = threading.Event(), threading.Event(), threading.Event()

    def work():
        running.set()
        release.wait()

    answers = run(pool, work, timeout=0.02, deadline_ns=clock() + 10_000_000, lost=lost.set)
    assert running.wait(20)
    clock.advance(0.01)
    assert isinstance(answers.get()[1], DeadlineExceeded)
    for _ in range(600):  # the watch forgets what is answered
        assert run(pool, lambda: 1, timeout=3600).get() == (1, None)
    assert pool.lost_threads == 0
    clock.advance(0.01)
    assert lost.wait(20)
    assert pool.lost_threads == 1
    release.set()


def test_an_answered_job_keeps_nothing_of_its_request_until_its_time_limit(pool):
    class Tensors:
        pass

    tensors, answered = Tensors(), threading.Event()
    alive = weakref.ref(tensors)
    pool.submit(
        Job(lambda held=tensors: None, lambda value, error, held=tensors: answered.set(), what="x", timeout=3600)
    )
    del tensors
    assert answered.wait(20)
    assert run(pool, lambda: 1).get() == (1, None)
    until = time.monotonic() + 20
    while alive() is not None:
        assert time.monotonic() < until
        gc.collect()
        time.sleep(0.001)
    assert pool._due


def test_a_closed_pool_answers_queued_and_new_jobs_with_stopping():
    pool = HookPool(1)
    release, running = threading.Event(), threading.Event()

    def work():
        running.set()
        return release.wait()

    first = run(pool, work)
    queued = run(pool, lambda: 1)
    assert running.wait(20)
    closer = threading.Thread(target=pool.close, args=(20,))
    closer.start()
    while not pool._closed:
        time.sleep(0.001)
    release.set()
    closer.join()
    assert first.get() == (True, None)
    assert isinstance(queued.get()[1], ServerStopping)
    assert isinstance(run(pool, lambda: 1).get()[1], ServerStopping)
    pool.close()


def test_an_error_in_the_callback_does_not_end_the_thread(caplog):
    pool = HookPool(1)

    def broken(value, error):
        raise RuntimeError("no")

    pool.submit(Job(lambda: 1, broken, what="x"))
    assert run(pool, lambda: 2).get() == (2, None)
    pool.close()
    assert "could not be delivered" in caplog.text
