"""A model's queue: requests that leave from the middle, that come back, and the deadlines that it remembers."""

import random

import pytest
from sched_support import lone_queue, paper_model, spec

from rsrv.core.errors import Cancelled, DeadlineExceeded
from rsrv.serve.scheduler.plan import Plan
from rsrv.serve.scheduler.queue import Ticket


def queue_of(*deadlines, **options):
    queue = lone_queue(paper_model(**options))
    return queue, [put(queue, deadline) for deadline in deadlines]


def put(queue, deadline=0, rows=1, variant=()):
    ticket = Ticket(queue, {}, rows, variant, deadline, print, 0)
    queue.append(ticket)
    return ticket


def test_the_earliest_deadline_is_known_whatever_leaves_and_returns():
    queue, (a, b, c, d) = queue_of(500, 0, 300, 400)
    assert queue.urgent_ns == 300
    queue.drop(c)
    assert queue.urgent_ns == 400
    assert queue.take(Plan(4, 2, False)) == [a, b]
    assert queue.urgent_ns == 400
    queue.put_back([a, b])
    queue.drop(d)
    assert queue.urgent_ns == 500
    assert queue.take(Plan(4, 2, False)) == [a, b]
    assert (queue.urgent_ns, queue.depth, queue.rows) == (0, 0, 0)


def test_what_was_taken_comes_back_to_the_front_in_order():
    queue, tickets = queue_of(0, 0, 0, 0)
    taken = queue.take(Plan(4, 3, False))
    queue.put_back(taken)
    assert [*queue.live()] == tickets
    assert queue.depth == 4


def test_taking_from_behind_others_counts_how_often_these_were_passed():
    queue, (a, b, c, d, e) = queue_of(0, 0, 0, 0, 0)
    assert queue.take(Plan(4, 3, False, (0, 2, 4))) == [a, c, e]
    assert [*queue.live()] == [b, d]
    assert (b.overtaken, d.overtaken) == (2, 1)


def test_holes_are_skipped_when_requests_are_taken():
    queue, (a, b, c, d) = queue_of(0, 0, 0, 0)
    queue.drop(b)
    assert queue.take(Plan(4, 2, False, (0, 2))) == [a, d]
    assert [*queue.live()] == [c]
    queue.drop(c)
    assert not queue.tickets


def test_the_first_ticket_always_waits():
    queue, (a, b, c) = queue_of(0, 0, 0)
    queue.drop(b)
    queue.drop(a)
    assert queue.tickets[0] is c


def test_many_holes_and_dead_deadlines_are_cleaned_up():
    queue, tickets = queue_of(*range(1000, 1200))
    random.Random(0).shuffle(tickets)
    for ticket in tickets[:-1]:
        queue.drop(ticket)
    assert len(queue.tickets) <= 40
    assert len(queue._deadlines) <= 40
    assert queue.urgent_ns == tickets[-1].deadline_ns


def test_requests_that_ran_are_not_kept_alive_by_their_deadlines():
    queue, _ = queue_of(10**18)
    for round_ in range(200):
        put(queue, 10**12 + round_)
    queue.take(Plan(8, 200, False))
    for round_ in range(200):
        put(queue, 10**6 + round_)
        queue.take(Plan(1, 1, False))
    assert len(queue._deadlines) < 100


def test_a_random_life_of_a_queue_agrees_with_a_plain_list():
    rng = random.Random(1)
    queue, model = lone_queue(paper_model()), []
    for _ in range(3000):
        what = rng.random()
        if what < 0.5 or not model:
            model.append(put(queue, rng.choice([0, rng.randrange(1, 10**6)]), rng.randint(1, 3)))
        elif what < 0.7:
            queue.drop(model.pop(rng.randrange(len(model))))
        elif what < 0.9:
            n = rng.randint(1, min(3, len(model)))
            assert queue.take(Plan(8, n, False)) == model[:n]
            del model[:n]
        else:
            taken = queue.take(Plan(8, 1, False))
            queue.put_back(taken)
        assert [*queue.live()] == model
        assert (queue.depth, queue.rows) == (len(model), sum(t.rows for t in model))
        assert queue.urgent_ns == min((t.deadline_ns for t in model if t.deadline_ns), default=0)


def test_plans_are_kept_until_something_changes():
    queue, _ = queue_of(0, keys=(1, 4))
    first = queue.next_plan()
    assert queue.next_plan() is first
    for _ in range(3):
        put(queue)
    assert queue.planned is None
    full = queue.next_plan()
    assert full == Plan(4, 4, True)
    put(queue)
    assert queue.planned is full, "nothing that comes behind a full batch changes it"
    queue.cap = 2
    queue.replan()
    assert queue.next_plan() == Plan(1, 1, True)


def test_a_verdict_says_why_a_request_must_not_run():
    queue, (ticket,) = queue_of(1000)
    assert ticket.verdict(999) is None
    assert ticket.verdict(998, margin_ns=1) is None
    late = ticket.verdict(1000)
    assert (late.reason, type(late.error)) == ("deadline", DeadlineExceeded)
    hopeless = ticket.verdict(998, margin_ns=2)
    assert (hopeless.reason, type(hopeless.error)) == ("laxity", DeadlineExceeded)
    ticket.cancel()
    assert isinstance(ticket.verdict(0).error, Cancelled)
    assert list(queue.cancelled) == [ticket]


@pytest.mark.parametrize(
    ("options", "cap", "expected"),
    [
        ({"keys": (1, 4, 8)}, None, 8),
        ({"keys": (1, 4, 8)}, 3, 3),
        ({"keys": (1, 4, 8)}, 30, 8),
        ({"keys": (0,)}, None, 0),
        ({"keys": (1, 4), "outputs": [spec("mean", 2)]}, 3, 0),
    ],
)
def test_the_most_rows_that_are_merged(options, cap, expected):
    queue = lone_queue(paper_model(**options))
    queue.cap = cap
    assert queue.max_batch_size == expected
