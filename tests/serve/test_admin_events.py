"""The log of changes: order, bounds, gaps, and those who follow it."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from rsrv.serve.admin.events import EventLog


def numbers(events):
    return [event.seq for event in events]


def test_an_event_says_what_changed_from_what_to_what():
    log = EventLog(clock=lambda: 1234.5)
    event = log.append("net", 7, "admission", "open", "draining", "by hand")
    assert (event.seq, event.time, event.model, event.incarnation) == (1, 1234.5, "net", 7)
    assert (event.type, event.old, event.new, event.detail) == ("admission", "open", "draining", "by hand")
    assert log.read() == ([event], 1)


def test_reading_begins_where_the_reader_says():
    log = EventLog()
    for _ in range(5):
        log.append("net", 1, "x", "", "")
    assert numbers(log.read(4)[0]) == [4, 5]
    assert numbers(log.read(6)[0]) == []
    assert numbers(log.read(600)[0]) == []


def test_only_the_last_events_are_kept_and_the_answer_says_which_is_the_first():
    log = EventLog(capacity=3)
    for _ in range(10):
        log.append("net", 1, "x", "", "")
    events, first = log.read(2)
    assert (numbers(events), first, log.first_seq, log.next_seq) == ([8, 9, 10], 8, 8, 11)


def test_events_of_one_model_are_read_alone():
    log = EventLog()
    for name in ("a", "b", "a"):
        log.append(name, 1, "x", "", "")
    assert numbers(log.read(0, "a")[0]) == [1, 3]
    assert log.read(0, "c") == ([], 1)


def test_a_subscription_gets_what_comes_and_not_what_was():
    log, woken = EventLog(), []
    log.append("net", 1, "x", "", "")
    subscription = log.subscribe(lambda: woken.append(True))
    assert subscription.take() == (None, [])
    log.append("net", 1, "x", "", "")
    log.append("net", 1, "x", "", "")
    gap, events = subscription.take()
    assert (gap, numbers(events), len(woken)) == (None, [2, 3], 2)
    assert subscription.take() == (None, [])


def test_a_subscription_of_one_model_is_not_woken_for_another():
    log, woken = EventLog(), []
    subscription = log.subscribe(lambda: woken.append(True), model="a")
    log.append("b", 1, "x", "", "")
    assert woken == []
    log.append("a", 1, "x", "", "")
    assert (numbers(subscription.take()[1]), woken) == ([2], [True])


def test_a_reader_that_is_too_slow_learns_where_it_goes_on():
    log = EventLog(capacity=2)
    subscription = log.subscribe(lambda: None)
    for _ in range(5):
        log.append("net", 1, "x", "", "")
    gap, events = subscription.take()
    assert (gap, numbers(events)) == (4, [4, 5])
    assert subscription.take() == (None, [])


def test_a_number_of_an_earlier_process_gives_everything_after_a_gap():
    log = EventLog()
    log.append("net", 1, "x", "", "")
    gap, events = log.subscribe(lambda: None, from_seq=900).take()
    assert (gap, numbers(events)) == (1, [1])


def test_the_number_of_the_next_event_is_no_gap():
    log = EventLog()
    log.append("net", 1, "x", "", "")
    subscription = log.subscribe(lambda: None, from_seq=2)
    assert subscription.take() == (None, [])
    log.append("net", 1, "x", "", "")
    assert numbers(subscription.take()[1]) == [2]


def test_a_closed_subscription_is_not_woken():
    log, woken = EventLog(), []
    subscription = log.subscribe(lambda: woken.append(True))
    subscription.close()
    subscription.close()
    log.append("net", 1, "x", "", "")
    assert woken == []


def test_a_wake_up_may_read_the_log():
    log, seen = EventLog(), []
    subscription = log.subscribe(lambda: seen.append(numbers(subscription.take()[1])))
    log.append("net", 1, "x", "", "")
    assert seen == [[1]]


def test_many_threads_append_without_losing_a_number():
    log = EventLog(capacity=4000)
    threads = [
        threading.Thread(target=lambda: [log.append("net", 1, "x", "", "") for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(log.read()[0]) == list(range(1, 2001))


@given(st.integers(1, 8), st.lists(st.sampled_from(["append", "take"]), max_size=60))
def test_a_reader_sees_each_kept_event_once_and_every_loss_is_reported(capacity, steps):
    log = EventLog(capacity=capacity)
    subscription = log.subscribe(lambda: None)
    appended, expected = 0, 1
    for step in steps:
        if step == "append":
            log.append("net", 1, "x", "", "")
            appended += 1
            continue
        gap, events = subscription.take()
        oldest = max(appended - capacity, 0) + 1
        assert gap == (oldest if oldest > expected else None)
        assert numbers(events) == list(range(max(oldest, expected), appended + 1))
        expected = appended + 1
