"""Who is asked last, and for how long: cooldowns, ejections, slow starts. A fake clock."""

from __future__ import annotations

import pytest

from rsrv.core.config.gateway import OutliersConfig
from rsrv.core.errors import Code
from rsrv.gateway.routing.standing import Standing
from rsrv.gateway.workers.outcome import Outcome

GONE = Outcome(Code.UNAVAILABLE, text="connection refused")
STOPPING = Outcome(Code.UNAVAILABLE, trailers={"rsrv-reason": "stopping"})


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make(clock, *urls, **config):
    standing = Standing(OutliersConfig(**config), clock)
    for url in urls:
        standing.joined(url, slowly=False)
        standing.probed(url, True)
    return standing


def refused(reason, code=Code.RESOURCE_EXHAUSTED):
    return Outcome(code, trailers={"rsrv-reason": reason})


def test_nobody_is_avoided_while_all_is_well(clock):
    standing = make(clock, "a", "b")
    assert standing.avoid("m") == frozenset()
    standing.succeeded("a")
    standing.succeeded("nobody")
    assert standing.avoid("m") == frozenset()


def test_a_worker_is_asked_last_until_the_first_probe_finds_it_ready(clock):
    standing = Standing(OutliersConfig(), clock)
    standing.joined("a", slowly=False)
    assert standing.avoid("m") == {"a"}
    standing.probed("a", True)
    assert standing.avoid("m") == frozenset()


@pytest.mark.parametrize("outcome", [GONE, STOPPING, refused("shed"), Outcome(Code.INTERNAL, text="no reason given")])
def test_a_worker_that_just_failed_is_asked_last_for_a_second(clock, outcome):
    standing = make(clock, "a", "b", cooldown_seconds=1.0)
    standing.failed("a", "m", outcome)
    assert standing.avoid("m") == standing.avoid("other") == {"a"}
    clock.now += 0.99
    assert standing.avoid("m") == {"a"}
    clock.now += 0.02
    assert standing.avoid("m") == frozenset()


@pytest.mark.parametrize(
    "outcome",
    [
        refused("queue_full"),
        refused("preparing", Code.UNAVAILABLE),
        refused("unknown_model", Code.NOT_FOUND),
        refused("device", Code.INTERNAL),
    ],
)
def test_what_concerns_one_model_leaves_the_worker_to_the_others(clock, outcome):
    standing = make(clock, "a", "b")
    standing.failed("a", "m", outcome)
    assert standing.avoid("m") == {"a"}
    assert standing.avoid("other") == frozenset()
    clock.now += 1.01
    assert standing.avoid("m") == frozenset()


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(Code.INVALID_ARGUMENT),
        Outcome(Code.DEADLINE_EXCEEDED),
        Outcome(Code.CANCELLED),
        Outcome(Code.UNAVAILABLE, sent=False),
    ],
)
def test_what_the_request_is_to_blame_for_changes_nothing(clock, outcome):
    standing = make(clock, "a", "b", consecutive_failures=1)
    for _ in range(10):
        standing.failed("a", "m", outcome)
    assert standing.avoid("m") == frozenset()


def test_failures_in_a_row_take_a_worker_out_longer_each_time(clock):
    config = OutliersConfig(
        consecutive_failures=3, eject_seconds=10, max_eject_seconds=25, cooldown_seconds=0, slow_start_seconds=0
    )
    standing = Standing(config, clock)
    for url in ("a", "b"):
        standing.joined(url, slowly=False)
        standing.probed(url, True)
    for seconds in (10, 20, 25, 25):
        for failure in range(3):
            assert not standing.is_ejected("a"), failure
            assert standing.failed("a", "m", GONE) == (seconds if failure == 2 else 0.0)
        assert standing.is_ejected("a")
        clock.now += seconds - 0.01
        assert standing.avoid("m") == {"a"}
        clock.now += 0.02
        assert standing.avoid("m") == frozenset()


def test_calls_that_were_on_their_way_take_a_worker_out_no_longer(clock):
    standing = make(
        clock, *"abcd", consecutive_failures=5, eject_seconds=10, cooldown_seconds=0.0, slow_start_seconds=0
    )
    assert [standing.failed("a", "m", GONE) for _ in range(32)] == [0.0] * 4 + [10.0] + [0.0] * 27
    clock.now += 10.01
    assert standing.avoid("m") == frozenset()
    assert [standing.failed("a", "m", GONE) for _ in range(5)] == [0.0] * 4 + [20.0]


def test_a_success_in_between_begins_the_count_anew(clock):
    standing = make(clock, "a", "b", consecutive_failures=2, cooldown_seconds=0.0)
    for _ in range(5):
        standing.failed("a", "m", GONE)
        standing.succeeded("a")
    assert not standing.is_ejected("a")


def test_no_more_than_a_share_of_the_workers_is_out(clock):
    standing = make(clock, *"abcd", consecutive_failures=1, max_ejected_fraction=0.5, cooldown_seconds=0.0)
    for url in "abcd":
        standing.failed(url, "m", GONE)
    assert [standing.is_ejected(url) for url in "abcd"] == [True, True, False, False]


def test_a_worker_that_returns_starts_slowly(clock):
    standing = make(clock, "a", "b", slow_start_seconds=10.0)
    standing.probed("a", False)
    assert standing.avoid("m") == {"a"}
    standing.probed("a", True)

    def share():
        return sum(standing.avoid("m") == frozenset() for _ in range(100))

    assert standing.avoid("m") == frozenset()  # it gets the first request, so that its return is seen at once
    assert share() == pytest.approx(10, abs=1)
    clock.now += 5.0
    assert share() == pytest.approx(50, abs=1)
    clock.now += 4.0
    assert share() == pytest.approx(90, abs=1)
    clock.now += 1.0
    assert share() == 100


def test_a_worker_that_joins_others_starts_slowly_and_one_of_the_start_does_not(clock):
    standing = make(clock, "a")
    standing.joined("b", slowly=True)
    standing.probed("b", True)
    assert 5 < sum(standing.avoid("m") == frozenset() for _ in range(100)) < 15


def test_a_worker_that_is_drained_is_asked_last_until_that_is_taken_back(clock):
    standing = make(clock, "a", "b")
    standing.drained("a", True)
    assert standing.avoid("m") == {"a"}
    standing.drained("a", False)
    assert standing.avoid("m") == frozenset()


def test_nothing_is_kept_of_a_worker_that_left(clock):
    standing = make(clock, "a", "b")
    standing.failed("a", "m", refused("queue_full"))
    standing.failed("a", "m", GONE)
    standing.left("a")
    standing.left("a")
    assert standing.avoid("m") == frozenset()
    standing.probed("a", False)
    standing.failed("a", "m", GONE)
    assert standing.avoid("m") == frozenset()
    assert not standing._special
    assert standing._cooling == 0
