"""What runs next, and what leaves the queues unrun: the pure part, without threads and with a clock of its own."""

import numpy as np
import pytest
from sched_support import Clock, paper_model, rows_of, spec

from rsrv.core.errors import DeadlineExceeded, InvalidRequest, ModelUnloaded, QueueFull
from rsrv.serve.scheduler.backlog import Backlog
from rsrv.serve.scheduler.stats import Counters, nearest_rank


class Desk:
    """A backlog and its clock; each request is one tick younger than the one before."""

    def __init__(self, *models, depth=100):
        self.clock = Clock()
        self.backlog = Backlog(depth)
        self.models = {m.name: m for m in models}
        for m in models:
            self.backlog.add(m)

    def accept(self, name, rows=1, *, deadline_ns=0, variant=(), tick=1):
        self.clock.ns += tick
        return self.backlog.accept(
            self.models[name], {}, rows, variant, deadline_ns, lambda result: None, self.clock.ns
        )

    def next(self):
        work = self.backlog.next(self.clock.ns)
        return None if work is None else (work.queue.model.name, work.batch_key, work.tickets)


def test_the_model_with_the_oldest_request_goes_first():
    desk = Desk(paper_model("a"), paper_model("b"))
    older = [desk.accept("b", 2), desk.accept("b", 2)]
    younger = desk.accept("a")
    assert desk.next() == ("b", 4, older)
    assert desk.next() == ("a", 1, [younger])
    assert desk.next() is None
    assert not desk.backlog.waiting


def test_equally_old_requests_are_served_by_model_name():
    desk = Desk(paper_model("b"), paper_model("a"))
    desk.accept("b", tick=0)
    desk.accept("a", tick=0)
    assert [desk.next()[0], desk.next()[0]] == ["a", "b"]


def test_a_full_queue_refuses_and_the_queue_of_another_model_does_not():
    desk = Desk(paper_model("a"), paper_model("b"), depth=2)
    desk.accept("a")
    desk.accept("a")
    with pytest.raises(QueueFull, match=r"'a' is full: 2 requests"):
        desk.accept("a")
    desk.accept("b")
    assert desk.backlog.queues["a"].counters.dropped == {"queue_full": 1}


def test_expired_and_cancelled_requests_do_not_hold_queue_depth():
    desk = Desk(paper_model("a"), depth=2)
    expired = desk.accept("a", deadline_ns=desk.clock.ns + 1000)
    cancelled = desk.accept("a")
    desk.clock.advance(1)
    cancelled.cancel()
    kept = desk.accept("a")
    assert [(t, type(e).__name__) for t, e in desk.backlog.dropped] == [
        (expired, "DeadlineExceeded"),
        (cancelled, "Cancelled"),
    ]
    assert desk.next() == ("a", 1, [kept])


def test_an_expired_request_deep_in_the_queue_makes_room_for_a_new_one():
    desk = Desk(paper_model("a"), depth=2)
    first, expired = desk.accept("a"), desk.accept("a", deadline_ns=desk.clock.ns + 1000)
    with pytest.raises(QueueFull):
        desk.accept("a")
    desk.clock.advance(1)
    desk.accept("a", deadline_ns=desk.clock.ns + 10**12)
    assert [t for t, _ in desk.backlog.dropped] == [expired]
    assert desk.backlog.queues["a"].tickets[0] is first
    with pytest.raises(QueueFull):
        desk.accept("a")


def test_expired_and_cancelled_requests_do_not_shape_the_plan():
    desk = Desk(paper_model("a", keys=(1, 2, 4)))
    first = desk.accept("a")
    gone = [desk.accept("a", deadline_ns=desk.clock.ns + 1000), desk.accept("a")]
    gone[1].cancel()
    last = desk.accept("a")
    desk.clock.advance(1)
    assert desk.next() == ("a", 2, [first, last])
    assert [t for t, _ in desk.backlog.dropped] == gone


def test_a_queue_of_dropped_requests_only_is_no_work():
    desk = Desk(paper_model("a"), paper_model("b"))
    desk.accept("a").cancel()
    kept = desk.accept("b")
    assert desk.next() == ("b", 1, [kept])
    assert desk.next() is None
    assert len(desk.backlog.dropped) == 1


def test_a_deadline_that_passed_is_refused_at_once_and_one_in_the_future_is_not():
    desk = Desk(paper_model("a"))
    with pytest.raises(DeadlineExceeded, match="before queueing"):
        desk.accept("a", deadline_ns=desk.clock.ns)
    ticket = desk.accept("a", deadline_ns=desk.clock.ns + 2)
    assert desk.next() == ("a", 1, [ticket])


def test_a_request_prepared_for_an_earlier_incarnation_is_refused():
    old, new = paper_model("a"), paper_model("a", incarnation=2)
    desk = Desk(old)
    desk.backlog.remove("a")
    with pytest.raises(ModelUnloaded, match="incarnation 1"):
        desk.accept("a")
    desk.backlog.add(new)
    with pytest.raises(ModelUnloaded, match="incarnation 1"):
        desk.accept("a")


def test_a_name_is_scheduled_once():
    desk = Desk(paper_model("a"))
    with pytest.raises(ValueError, match="'a' is already scheduled"):
        desk.backlog.add(paper_model("a"))


def test_retries_run_alone_and_before_everything_else():
    desk = Desk(paper_model("a", keys=(1, 4)), paper_model("b"))
    a = [desk.accept("a"), desk.accept("a", 3)]
    b = desk.accept("b")
    work = desk.backlog.next(desk.clock.ns)
    assert work.tickets == a
    desk.backlog.retry(work.queue, work.tickets)
    assert desk.backlog.waiting
    assert desk.next() == ("a", 1, a[:1])
    assert desk.next() == ("a", 4, a[1:])
    assert desk.next() == ("b", 1, [b])


def test_a_staged_batch_grows_by_what_fits_behind_it():
    desk = Desk(paper_model("a", keys=(1, 4)))
    desk.accept("a")
    work = desk.backlog.next(desk.clock.ns)
    assert (work.batch_key, work.final) == (1, False)
    assert desk.backlog.grow(work) is None
    for _ in range(5):
        desk.accept("a")
    grown = desk.backlog.grow(work)
    assert (grown.batch_key, len(grown.tickets), grown.final) == (4, 4, True)
    assert grown.tickets[0] is work.tickets[0]
    assert len(work.queue.tickets) == 2


def test_a_failed_plan_costs_the_request_that_showed_it_and_no_other(caplog):
    broken = paper_model("a")
    broken.__dict__["batch_keys_by_variant"] = {(): (4, None)}
    desk = Desk(broken, paper_model("b"))
    bad, good = desk.accept("a", 3), desk.accept("b")
    assert desk.next() is None
    assert [t for t, _ in desk.backlog.dropped] == [bad]
    assert desk.next() == ("b", 1, [good])
    assert "planning failed model=a" in caplog.text


def test_clearing_takes_one_queue_or_everything():
    desk = Desk(paper_model("a"), paper_model("b"))
    a, b = desk.accept("a"), desk.accept("b")
    retried = desk.accept("a")
    queue = desk.backlog.queues["a"]
    queue.tickets.remove(retried)
    desk.backlog.retry(queue, [retried])
    assert desk.backlog.clear(queue) == [retried, a]
    assert desk.backlog.waiting
    assert desk.backlog.clear() == [b]
    assert not desk.backlog.waiting


@pytest.mark.parametrize(("quantile", "expected"), [(0.0, 1), (0.5, 5), (0.51, 6), (0.9, 9), (0.99, 10), (1.0, 10)])
def test_quantiles_are_nearest_rank(quantile, expected):
    assert nearest_rank(range(1, 11), quantile) == expected


def test_the_quantile_of_nothing_is_zero():
    assert nearest_rank([], 0.5) == 0


def test_wait_quantiles_look_at_the_last_1024_requests():
    counters = Counters()
    counters.record(8, 8, 0, 10, [5_000_000_000] * 500)
    assert counters.snapshot("m", 1, 0).queue_wait_seconds[0.5] == 5.0
    counters.record(8, 8, 0, 10, [1_000_000_000] * 1024)
    snapshot = counters.snapshot("m", 1, 3)
    assert set(snapshot.queue_wait_seconds.values()) == {1.0}
    assert (snapshot.dispatch_count, snapshot.requests_served, snapshot.rows_served) == (2, 1524, 16)
    assert (snapshot.total_compute_seconds, snapshot.batch_keys, snapshot.queue_depth) == (20e-9, {8: 2}, 3)


# --- what a model takes -------------------------------------------------------------------------------------------


def test_rows_beyond_the_largest_key_and_no_rows_are_refused_naming_it():
    m = paper_model(keys=(1, 4, 8))
    for rows in (0, -1, 9):
        with pytest.raises(InvalidRequest, match=rf"{rows} rows; 1 to 8 .*compiled: 1, 4, 8"):
            m.check({"x": np.zeros((max(rows, 0), 2), np.float32)}, rows, ())
    m.check({"x": np.zeros((3, 2), np.float32)}, 3, ())


def test_an_uncompiled_variant_is_refused_naming_the_compiled_ones():
    m = paper_model(inputs=[spec("x", "n", "?", "?")], variants=((3, 4), (8, 8)))
    with pytest.raises(InvalidRequest, match=r"sizes \[5, 5\] of .*; compiled: \[3, 4\], \[8, 8\]"):
        m.check({"x": np.zeros((1, 5, 5), np.float32)}, 1, (5, 5))
    m.check({"x": np.zeros((1, 8, 8), np.float32)}, 1, (8, 8))


def test_a_model_that_cannot_be_padded_takes_its_compiled_rows_only():
    m = paper_model(keys=(1, 4), outputs=[spec("mean", 2)])
    assert not m.coalescable
    m.check({"x": rows_of(1, 2, 3, 4)}, 4, ())
    with pytest.raises(InvalidRequest, match="exactly 1 or 4 rows"):
        m.check({"x": rows_of(1, 2, 3)}, 3, ())


def test_a_single_program_without_a_size_takes_the_rows_of_its_signature():
    m = paper_model(keys=(0,), fixed_rows=3)
    assert (m.batch_keys(()), m.largest(()), m.coalescable) == ((0,), 3, False)
    m.check({"x": rows_of(1, 2, 3)}, 3, ())
    with pytest.raises(InvalidRequest, match="exactly 3 rows"):
        m.check({"x": rows_of(1, 2)}, 2, ())


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"x": rows_of(1, 2)}, r"'x' .* is float32\[2, 2\]; a request of 1 rows needs float32\[1, 2\]"),
        ({"x": rows_of(1).astype(np.float64)}, r"is float64\[1, 2\]"),
        ({"x": rows_of(1)[0]}, r"is float32\[2\]"),
        ({"z": rows_of(1)}, "'x' .* is missing; got z"),
        ({}, r"missing: x, unknown: \(none\)"),
        ({"x": rows_of(1), "z": rows_of(1)}, r"missing: \(none\), unknown: z"),
    ],
)
def test_inputs_that_would_spoil_a_batch_are_refused(inputs, text):
    with pytest.raises(InvalidRequest, match=text):
        paper_model().check(inputs, 1, ())
