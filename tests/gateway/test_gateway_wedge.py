"""When a gateway should end because nothing it does reaches a worker."""

import pytest

from rsrv.gateway.discovery.wedge import WedgeRule


@pytest.mark.parametrize("responsive", [False, True])
@pytest.mark.parametrize("enough", [False, True])
def test_it_ends_only_after_an_answer_ever_and_enough_silent_rounds(responsive, enough):
    rule = WedgeRule(3)
    if responsive:
        assert not rule.round(["ready", "silent"], 0)
    results = [rule.round(["silent", "silent"], 0) for _ in range(3 if enough else 2)]
    assert results[:2] == [False, False]
    assert results[-1] is (responsive and enough)


def test_a_fleet_that_never_answered_is_one_that_starts():
    rule = WedgeRule(3)
    assert not any(rule.round(["silent"], 0) for _ in range(50))


def test_a_refusal_is_neither_an_answer_nor_silence():
    rule = WedgeRule(2)
    rule.round(["refused"], 0)
    assert not any(rule.round(["silent"], 0) for _ in range(5))
    rule.round(["unready"], 0)
    rule.round(["silent"], 0)
    assert not rule.round(["refused"], 0)
    assert not rule.round(["silent"], 0)
    assert rule.round(["silent"], 0)


def test_one_worker_that_is_not_silent_resets_the_count():
    rule = WedgeRule(2)
    rule.round(["ready"], 0)
    rule.round(["silent", "silent"], 0)
    assert not rule.round(["silent", "ready"], 0)
    assert not rule.round(["silent", "silent"], 0)


def test_it_never_ends_while_a_request_is_in_flight():
    rule = WedgeRule(2)
    rule.round(["ready"], 0)
    assert not any(rule.round(["silent"], 1) for _ in range(5))
    assert rule.round(["silent"], 0)


def test_connections_are_built_anew_and_tried_before_it_ends():
    rule = WedgeRule(1)
    rule.round(["ready"], 0)
    assert [rule.round(["silent"], 0), rule.round(["silent"], 0)] == [False, True]


def test_zero_rounds_switch_it_off_and_an_empty_fleet_is_not_wedged():
    off = WedgeRule(0)
    off.round(["ready"], 0)
    assert not any(off.round(["silent"], 0) for _ in range(9))
    empty = WedgeRule(2)
    empty.round(["ready"], 0)
    assert not any(empty.round([], 0) for _ in range(9))
