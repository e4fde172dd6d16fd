"""When a change is acted on: two looks that see the same, on plain values and times."""

import pytest
from repository_support import seen

from rsrv.serve.repository.settling import COARSE_SECONDS, Settling
from rsrv.serve.repository.snapshot import FileStat

OLD, NEW = seen("a"), seen("a", version=2)


@pytest.fixture
def settling():
    return Settling(1.0)


@pytest.mark.parametrize("state", [NEW, None], ids=["changed", "gone"])
def test_the_first_look_does_nothing_and_the_second_equal_one_acts(settling, state):
    assert settling.look({"a": state}, 10.0) == set()
    assert settling.next_due(10.0) == 10.5
    assert settling.look({"a": state}, 10.5) == {"a"}


def test_two_looks_that_are_too_close_do_not_act(settling):
    settling.look({"a": NEW}, 10.0)
    assert settling.look({"a": NEW}, 10.4) == set()
    assert settling.look({"a": NEW}, 10.5) == {"a"}


def test_a_bundle_that_keeps_changing_is_not_acted_on(settling):
    for step in range(20):
        assert settling.look({"a": seen("a", version=step)}, 10.0 + step / 2) == set()


def test_a_change_that_is_undone_is_forgotten(settling):
    settling.look({"a": NEW}, 10.0)
    settling.look({}, 10.2)
    assert settling.pending() == set()
    assert settling.look({"a": NEW}, 10.6) == set()


def test_after_an_event_the_change_is_acted_on_when_nothing_happened_for_the_settle_time(settling):
    settling.event(["a"], 10.0)
    assert settling.next_due(10.0) == 10.4
    assert settling.look({"a": NEW}, 10.4) == set()
    assert settling.next_due(10.4) == 11.0
    assert settling.look({"a": NEW}, 10.9) == set()
    assert settling.look({"a": NEW}, 11.0) == {"a"}


def test_every_further_event_starts_the_settle_time_anew(settling):
    settling.event(["a"], 10.0)
    settling.look({"a": NEW}, 10.5)
    settling.event(["a"], 11.0)
    assert settling.look({"a": NEW}, 11.0) == set()
    assert settling.next_due(11.0) == 11.4
    assert settling.look({"a": NEW}, 11.4) == set()
    assert settling.look({"a": NEW}, 12.0) == {"a"}


def test_a_first_look_that_is_a_little_late_delays_nothing(settling):
    settling.event(["a"], 10.0)
    settling.look({"a": NEW}, 10.5)
    assert settling.next_due(10.5) == 11.0


def test_a_look_right_after_the_event_counts_as_the_first(settling):
    settling.event(["a"], 10.0)
    settling.look({"a": NEW}, 10.01)
    assert settling.next_due(10.01) == 11.0
    assert settling.look({"a": NEW}, 11.0) == {"a"}


def test_an_event_with_nothing_behind_it_is_looked_at_once(settling):
    settling.event(["a"], 10.0)
    assert settling.due(10.5) == {"a"}
    settling.look({}, 10.5)
    assert settling.pending() == set()


def test_events_of_one_name_do_not_hold_up_another(settling):
    settling.event(["a", "b"], 10.0)
    settling.look({"a": NEW, "b": seen("b")}, 10.5)
    settling.event(["b"], 10.7)
    assert settling.look({"a": NEW, "b": seen("b")}, 11.0) == {"a"}


def test_files_with_whole_seconds_for_times_settle_for_as_long_as_such_a_second_may_last(settling):
    whole = FileStat(5, 3_000_000_000, 4_000_000_000, 9)
    state = seen("a", weights=whole)
    settling.look({"a": state}, 10.0)
    assert settling.look({"a": state}, 10.5) == set()
    assert settling.next_due(10.5) == 10.0 + COARSE_SECONDS
    assert settling.look({"a": state}, 10.0 + COARSE_SECONDS) == {"a"}


def test_a_whole_second_that_only_rsync_wrote_into_the_file_does_not_count_as_coarse():
    assert not FileStat(5, 3_000_000_000, 4_000_000_001, 9).is_coarse


def test_a_name_that_is_due_but_waits_for_something_else_asks_for_no_further_look(settling):
    settling.look({"a": NEW}, 10.0)
    settling.look({"a": NEW}, 10.5)
    assert settling.next_due(10.5) is None
