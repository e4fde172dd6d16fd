"""The budget of second attempts, and timers."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway_site import wait_until

from rsrv.core.config.gateway import RetriesConfig
from rsrv.gateway.routing.log_limit import LogLimit
from rsrv.gateway.routing.retries import RetryBudget
from rsrv.gateway.timers import Timers


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_retries_are_a_tenth_of_the_traffic_and_a_minimum():
    clock = Clock()
    budget = RetryBudget(RetriesConfig(ratio=0.1, minimum=5, window_seconds=10), clock)
    assert sum(budget.take() for _ in range(100)) == 5
    for _ in range(200):
        budget.request()
    assert sum(budget.take() for _ in range(100)) == 20
    assert (budget.total, budget.refused) == (25, 175)


def test_both_are_forgotten_after_the_window():
    clock = Clock()
    budget = RetryBudget(RetriesConfig(ratio=0.5, minimum=2, window_seconds=10), clock)
    for _ in range(10):
        budget.request()
    assert sum(budget.take() for _ in range(20)) == 7
    clock.now += 5.0
    assert not budget.take()
    clock.now += 5.1
    assert sum(budget.take() for _ in range(20)) == 2
    clock.now += 1000.0
    assert sum(budget.take() for _ in range(20)) == 2


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 40), st.integers(0, 40)), max_size=40))
def test_no_window_ever_has_more_retries_than_allowed(steps):
    clock = Clock()
    budget = RetryBudget(RetriesConfig(ratio=0.1, minimum=3, window_seconds=10), clock)
    requests: list[float] = []
    retries: list[float] = []
    for passed, asked, tried in steps:
        clock.now += passed
        for _ in range(asked):
            budget.request()
            requests.append(clock.now)
        for _ in range(tried):
            if budget.take():
                retries.append(clock.now)
        # The window moves in tenths and requests count for the tenth in which they are noticed, so the bound holds for
        # windows that are one tenth shorter against traffic that is up to one tenth, or 32 requests, older.
        recent = sum(at > clock.now - 9.0 for at in retries)
        assert recent <= 3 + 0.1 * (sum(at > clock.now - 22.0 for at in requests) + 32)


@pytest.fixture
def timers():
    timers = Timers()
    yield timers
    timers.close()


def test_functions_run_in_the_order_of_their_times_and_cancelled_ones_never(timers):
    ran: list[str] = []
    done, registered = threading.Event(), threading.Event()
    now = time.monotonic_ns()
    timers.at(0, lambda: registered.wait(10))  # so that nothing runs before all are there, and one is cancelled
    timers.at(now + 60_000_000, lambda: (ran.append("last"), done.set()))
    timers.at(now + 20_000_000, lambda: ran.append("first"))
    timers.at(now + 40_000_000, lambda: ran.append("never")).cancel()
    timers.at(now + 30_000_000, lambda: 1 / 0)  # is logged, and the others go on
    registered.set()
    assert done.wait(10)
    assert ran == ["first", "last"]


def test_many_cancelled_timers_take_no_memory(timers):
    far = time.monotonic_ns() + 3_600_000_000_000
    for _ in range(20_000):
        timers.at(far, lambda: None).cancel()
    assert len(timers._heap) < 5000


def test_after_close_nothing_runs():
    timers = Timers()
    ran = []
    running, go_on = threading.Event(), threading.Event()
    timers.at(0, lambda: (running.set(), go_on.wait(10)))
    assert running.wait(10)
    timers.at(1, lambda: ran.append(1))  # is due, and its turn has not come
    closing = threading.Thread(target=timers.close)
    closing.start()
    wait_until(lambda: timers._closed)
    go_on.set()
    closing.join()
    timers.close()
    assert not timers._thread.is_alive()
    assert ran == []


def test_lines_of_one_kind_are_logged_once_a_second_with_the_number_of_those_left_out():
    clock = Clock()
    limit = LogLimit(1.0, clock)
    assert [limit.take("a"), limit.take("a"), limit.take("b"), limit.take("a")] == [0, None, 0, None]
    clock.now += 1.0
    assert [limit.take("a"), limit.take("a"), limit.take("b")] == [2, None, 0]
    for number in range(5000):
        limit.take(number)
    assert len(limit._kinds) <= 1024
