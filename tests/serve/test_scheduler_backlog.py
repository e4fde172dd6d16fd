"""What runs next, and what leaves the queues unrun: the pure part, without threads and with a clock of its own."""

import numpy as np
import pytest
from sched_support import Desk, paper_model, rows_of, spec

from rsrv.core.errors import DeadlineExceeded, InvalidRequest, ModelUnloaded, QueueFull
from rsrv.serve.scheduler.backlog import Backlog
from rsrv.serve.scheduler.plan import Plan
from rsrv.serve.scheduler.policy import ModelPolicy, Policy
from rsrv.serve.scheduler.stats import nearest_rank, snapshot


def fifo(*models, **settings):
    return Desk(*models, policy=Policy(discipline="fifo", **settings))


def test_the_model_with_the_oldest_request_goes_first():
    desk = fifo(paper_model("a"), paper_model("b"))
    older = [desk.accept("b", 2), desk.accept("b", 2)]
    younger = desk.accept("a")
    assert desk.next() == ("b", 4, older)
    assert desk.next() == ("a", 1, [younger])
    assert desk.next() is None
    assert not desk.backlog.waiting


def test_equally_old_requests_are_served_by_model_name():
    desk = fifo(paper_model("b"), paper_model("a"))
    desk.accept("b", tick=0)
    desk.accept("a", tick=0)
    assert [desk.next()[0], desk.next()[0]] == ["a", "b"]


def test_a_full_queue_refuses_and_the_queue_of_another_model_does_not():
    desk = fifo(paper_model("a"), paper_model("b"), max_queue_depth=2)
    desk.accept("a")
    desk.accept("a")
    with pytest.raises(QueueFull, match=r"'a' is full: 2 requests"):
        desk.accept("a")
    desk.accept("b")
    assert desk.backlog.queues["a"].counters.dropped == {"queue_full": 1}


def test_expired_and_cancelled_requests_do_not_hold_queue_depth():
    desk = fifo(paper_model("a"), max_queue_depth=2)
    expired = desk.accept("a", deadline_ns=desk.clock.ns + 1000)
    cancelled = desk.accept("a")
    desk.clock.advance(1)
    cancelled.cancel()
    kept = desk.accept("a")
    assert {t: (reason, type(e).__name__) for t, reason, e in desk.backlog.dropped} == {
        expired: ("deadline", "DeadlineExceeded"),
        cancelled: ("cancelled", "Cancelled"),
    }
    assert desk.next() == ("a", 1, [kept])


def test_an_expired_request_deep_in_the_queue_makes_room_for_a_new_one():
    desk = fifo(paper_model("a"), max_queue_depth=2)
    first, expired = desk.accept("a"), desk.accept("a", deadline_ns=desk.clock.ns + 1000)
    with pytest.raises(QueueFull):
        desk.accept("a")
    desk.clock.advance(1)
    desk.accept("a", deadline_ns=desk.clock.ns + 10**12)
    assert [t for t, _, _ in desk.backlog.dropped] == [expired]
    assert desk.backlog.queues["a"].tickets[0] is first
    with pytest.raises(QueueFull):
        desk.accept("a")


def test_expired_and_cancelled_requests_do_not_shape_the_plan():
    desk = fifo(paper_model("a", keys=(1, 2, 4)))
    first = desk.accept("a")
    gone = [desk.accept("a", deadline_ns=desk.clock.ns + 1000), desk.accept("a")]
    gone[1].cancel()
    last = desk.accept("a")
    desk.clock.advance(1)
    assert desk.next() == ("a", 2, [first, last])
    assert {t for t, _, _ in desk.backlog.dropped} == {*gone}


def test_a_queue_of_dropped_requests_only_is_no_work():
    desk = fifo(paper_model("a"), paper_model("b"))
    desk.accept("a").cancel()
    kept = desk.accept("b")
    assert desk.next() == ("b", 1, [kept])
    assert desk.next() is None
    assert len(desk.backlog.dropped) == 1


def test_a_deadline_that_passed_is_refused_at_once_and_one_in_the_future_is_not():
    desk = fifo(paper_model("a"))
    with pytest.raises(DeadlineExceeded, match="before queueing"):
        desk.accept("a", deadline_ns=desk.clock.ns)
    ticket = desk.accept("a", deadline_ns=desk.clock.ns + 2)
    assert desk.next() == ("a", 1, [ticket])


def test_a_request_prepared_for_an_earlier_incarnation_is_refused():
    old, new = paper_model("a", incarnation=1), paper_model("a", incarnation=2)
    desk = fifo(old)
    desk.backlog.remove("a")
    with pytest.raises(ModelUnloaded, match="incarnation 1"):
        desk.accept("a")
    desk.backlog.add(new)
    with pytest.raises(ModelUnloaded, match="incarnation 1"):
        desk.accept("a")


def test_a_name_is_scheduled_once():
    desk = fifo(paper_model("a"))
    with pytest.raises(ValueError, match="'a' is already scheduled"):
        desk.backlog.add(paper_model("a"))


def test_retries_run_alone_and_before_everything_else():
    desk = fifo(paper_model("a", keys=(1, 4)), paper_model("b"))
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
    desk = fifo(paper_model("a", keys=(1, 4)))
    desk.accept("a")
    work = desk.backlog.next(desk.clock.ns)
    assert (work.batch_key, work.final) == (1, False)
    assert desk.backlog.grow(work, desk.clock.ns) is None
    for _ in range(5):
        desk.accept("a")
    grown = desk.backlog.grow(work, desk.clock.ns)
    assert (grown.batch_key, len(grown.tickets), grown.final) == (4, 4, True)
    assert grown.tickets[0] is work.tickets[0]
    assert len(work.queue.tickets) == 2


def test_a_failed_plan_costs_the_request_that_showed_it_and_no_other(caplog):
    broken = paper_model("a")
    broken.__dict__["batch_keys_by_variant"] = {(): (4, None)}
    desk = fifo(broken, paper_model("b"))
    bad, good = desk.accept("a", 3), desk.accept("b")
    assert desk.next() == ("b", 1, [good])
    assert [(t, reason) for t, reason, _ in desk.backlog.dropped] == [(bad, "internal")]
    assert "planning failed model=a" in caplog.text


def test_clearing_takes_one_queue_or_everything():
    desk = fifo(paper_model("a"), paper_model("b"))
    a, b = desk.accept("a"), desk.accept("b")
    retried = desk.accept("a")
    queue = desk.backlog.queues["a"]
    queue.drop(retried)
    desk.backlog.retry(queue, [retried])
    assert desk.backlog.clear(desk.clock.ns, queue) == [retried, a]
    assert desk.backlog.waiting
    assert desk.backlog.clear(desk.clock.ns) == [b]
    assert not desk.backlog.waiting


@pytest.mark.parametrize(("quantile", "expected"), [(0.0, 1), (0.5, 5), (0.51, 6), (0.9, 9), (0.99, 10), (1.0, 10)])
def test_quantiles_are_nearest_rank(quantile, expected):
    assert nearest_rank(range(1, 11), quantile) == expected


def test_the_quantile_of_nothing_is_zero():
    assert nearest_rank([], 0.5) == 0


def test_wait_quantiles_look_at_the_last_1024_requests():
    queue = Backlog(Policy()).add(paper_model())
    queue.counters.record(8, 8, 0, 10, [5_000_000_000] * 500)
    assert snapshot(queue, 0.0, 0).queue_wait_seconds[0.5] == 5.0
    queue.counters.record(8, 8, 0, 10, [1_000_000_000] * 1024)
    stats = snapshot(queue, 0.0, 0)
    assert set(stats.queue_wait_seconds.values()) == {1.0}
    assert (stats.dispatch_count, stats.requests_served, stats.rows_served) == (2, 1524, 16)
    assert (stats.total_compute_seconds, stats.batch_keys) == (20e-9, {8: 2})


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


# --- batching windows ---------------------------------------------------------------------------------------------

MS = 10**6


def windowed(*models, ms=5, **settings):
    return Desk(*models, policy=Policy(max_wait_ns=ms * MS, **settings))


def test_a_request_waits_for_company_until_its_window_closes():
    desk = windowed(paper_model(keys=(1, 4)))
    ticket = desk.accept("m")
    assert desk.next() is None
    assert desk.backlog.waiting
    assert desk.backlog.ripe_ns == desk.clock.ns + 5 * MS
    desk.clock.advance(0.0049)
    assert desk.next() is None
    desk.clock.advance(0.0001)
    assert desk.next() == ("m", 1, [ticket])
    assert desk.backlog.ripe_ns is None
    assert not desk.backlog.waiting


def test_a_window_closes_early_when_the_largest_size_is_full():
    desk = windowed(paper_model(keys=(1, 4)))
    tickets = [desk.accept("m") for _ in range(3)]
    assert desk.next() is None
    tickets.append(desk.accept("m"))
    assert desk.next() == ("m", 4, tickets)


def test_a_window_closes_early_when_nothing_that_comes_later_would_fit():
    desk = windowed(paper_model(keys=(1, 4)))
    tickets = [desk.accept("m", 3), desk.accept("m", 3)]
    assert desk.next() == ("m", 4, tickets[:1])
    assert desk.next() is None, "the second has room for one more"


def test_a_window_closes_early_when_a_smaller_size_is_the_cheaper_one():
    desk = windowed(paper_model(keys=(1, 2, 4)))
    desk.seed("m", {1: 0.010, 2: 0.011, 4: 0.060}, runs=8)
    tickets = [desk.accept("m") for _ in range(4)]
    assert desk.next() == ("m", 2, tickets[:2])


def test_a_window_closes_early_when_a_deadline_gets_near():
    desk = windowed(paper_model(keys=(1, 4)))
    desk.seed("m", {1: 0.002, 4: 0.004})
    desk.accept("m", within=0.006)
    assert desk.backlog.ripe_ns == desk.clock.ns + 2 * MS, "half of what is left beside the execution"
    desk.accept("m", within=0.004)
    assert desk.backlog.ripe_ns < desk.clock.ns + MS
    desk.clock.advance(0.001)
    assert desk.next()[0] == "m"


def test_a_window_is_the_business_of_its_model_alone():
    desk = Desk(
        paper_model("patient"), paper_model("prompt"), policy=Policy(models={"patient": ModelPolicy(max_wait_ns=MS)})
    )
    desk.accept("patient")
    ticket = desk.accept("prompt")
    assert desk.next() == ("prompt", 1, [ticket])
    assert desk.next() is None
    desk.clock.advance(0.001)
    assert desk.next()[0] == "patient"


def test_what_a_batch_leaves_behind_opens_a_window_of_its_own():
    desk = windowed(paper_model(keys=(1, 4)))
    for _ in range(4):
        desk.accept("m")
    desk.clock.advance(0.003)
    last = desk.accept("m")
    assert desk.next()[1] == 4
    assert desk.next() is None
    assert desk.backlog.ripe_ns == last.enqueued_ns + 5 * MS


def test_a_request_that_waits_can_be_cancelled_and_can_expire():
    desk = windowed(paper_model(), ms=10**6)
    cancelled, expired = desk.accept("m"), desk.accept("m", within=1)
    cancelled.cancel()
    desk.clock.advance(2)
    assert desk.next() is None
    assert {*desk.dropped()} == {(cancelled, "cancelled"), (expired, "deadline")}
    assert not desk.backlog.waiting


def test_in_a_hurry_no_window_is_open():
    desk = windowed(paper_model("a"), paper_model("b"))
    desk.accept("a")
    desk.backlog.hurry()
    desk.accept("b")
    assert {desk.next()[0], desk.next()[0]} == {"a", "b"}


# --- deadlines that cannot be met ---------------------------------------------------------------------------------


def edf(*models, **settings):
    return Desk(*models, policy=Policy(discipline="edf", shed_late=False, **settings))


def test_edf_drops_what_would_end_late_and_runs_what_would_not():
    desk = edf(paper_model(keys=(1,)))
    desk.seed("m", {1: 0.010})
    hopeless, fine = desk.accept("m", within=0.009), desk.accept("m", within=0.011)
    assert desk.next() == ("m", 1, [fine])
    assert desk.dropped() == [(hopeless, "laxity")]


def test_other_disciplines_drop_only_what_is_late_already():
    for discipline in ("fifo", "fair"):
        desk = Desk(paper_model(keys=(1,)), policy=Policy(discipline=discipline))
        desk.seed("m", {1: 0.010})
        ticket = desk.accept("m", within=0.009)
        assert desk.next() == ("m", 1, [ticket])


def test_edf_counts_on_the_wait_for_the_device():
    desk = edf(paper_model(keys=(1,)))
    desk.seed("m", {1: 0.010})
    ticket = desk.accept("m", within=0.015)
    assert desk.next(busy_ns=6 * MS) is None
    assert desk.dropped() == [(ticket, "laxity")]


def test_an_unmeasured_program_is_no_reason_to_drop():
    desk = edf(paper_model(keys=(1,)))
    ticket = desk.accept("m", within=1e-6)
    assert desk.next() == ("m", 1, [ticket])


def test_a_measurement_that_nothing_confirmed_lately_is_no_reason_to_drop():
    desk = edf(paper_model(keys=(1,)))
    desk.seed("m", {1: 10.0})
    lost = desk.accept("m", within=0.5)
    assert desk.next() is None
    assert desk.dropped() == [(lost, "laxity")]
    desk.clock.advance(2)
    probe = desk.accept("m", within=0.5)
    assert desk.next() == ("m", 1, [probe])


def test_edf_prefers_the_batch_that_meets_the_tightest_deadline():
    desk = edf(paper_model(keys=(1, 4)))
    desk.seed("m", {1: 0.010, 4: 0.020})
    tight = desk.accept("m", within=0.015)
    desk.accept("m", within=1)
    assert desk.next() == ("m", 1, [tight])
    assert desk.dropped() == []


def test_edf_gives_up_one_request_rather_than_a_full_batch():
    desk = edf(paper_model(keys=(1, 8)))
    desk.seed("m", {1: 0.010, 8: 0.012})
    tight = desk.accept("m", within=0.011)
    rest = [desk.accept("m", within=1) for _ in range(8)]
    assert desk.next() == ("m", 8, rest)
    assert desk.dropped() == [(tight, "laxity")]


def test_a_deadline_deep_in_a_queue_promotes_its_model_but_not_the_request():
    desk = edf(paper_model("a", keys=(1,)), paper_model("b", keys=(1,)))
    first = desk.accept("a", within=50)
    desk.accept("b", within=10)
    desk.accept("a", within=1)
    assert desk.next() == ("a", 1, [first])


def test_a_request_is_refused_on_arrival_when_the_queue_alone_takes_longer_than_it_has():
    desk = Desk(paper_model(keys=(1, 4)))
    desk.seed("m", {1: 0.010, 4: 0.020})
    desk.accept("m", within=0.001)
    for _ in range(8):
        desk.accept("m")
    with pytest.raises(DeadlineExceeded, match=r"9 rows to run first, .* at least 50.0 ms; its deadline is in 49.0 ms"):
        desk.accept("m", within=0.049)
    desk.accept("m", within=0.051)
    assert desk.queue("m").counters.dropped == {"predicted": 1}


def test_nothing_is_refused_for_the_queue_when_that_is_switched_off_or_unknown():
    desk = Desk(paper_model(keys=(1, 4)), policy=Policy(shed_late=False))
    desk.seed("m", {1: 0.010, 4: 0.020})
    desk.accept("m")
    desk.accept("m", within=0.001)
    desk = Desk(paper_model(keys=(1, 4)))
    desk.seed("m", {1: 0.010})
    desk.accept("m")
    desk.accept("m", within=0.001)


def test_an_earlier_deadline_goes_before_a_staged_batch_only_under_edf_and_of_another_model():
    for discipline, expected in (("edf", True), ("fifo", False), ("fair", False)):
        desk = Desk(paper_model("a"), paper_model("b"), policy=Policy(discipline=discipline))
        desk.accept("a", within=10)
        staged = desk.backlog.next(desk.clock.ns)
        assert desk.backlog.precedes(desk.accept("b", within=5), staged) is expected
        assert not desk.backlog.precedes(desk.accept("b", within=20), staged)
        assert not desk.backlog.precedes(desk.accept("b"), staged)
        assert not desk.backlog.precedes(desk.accept("a", within=1), staged)


def test_a_batch_that_is_put_back_is_as_if_it_had_never_been_taken():
    desk = edf(paper_model("a", keys=(1, 4)), paper_model("b"))
    tickets = [desk.accept("a", within=10) for _ in range(5)]
    batch = desk.backlog.next(desk.clock.ns)
    urgent = desk.accept("b", within=1)
    desk.backlog.put_back(batch)
    assert desk.next() == ("b", 1, [urgent])
    assert desk.next() == ("a", 4, tickets[:4])
    assert desk.next() == ("a", 1, tickets[4:])
    assert not desk.backlog.waiting


def test_what_was_planned_behind_a_batch_is_planned_anew_when_that_is_put_back():
    desk = edf(paper_model("a", keys=(1, 2, 4)))
    first, *others = [desk.accept("a", rows) for rows in (4, 1, 1, 1, 1)]
    batch = desk.backlog.next(desk.clock.ns)
    assert desk.queue("a").next_plan() == Plan(4, 4, True)
    desk.backlog.put_back(batch)
    assert desk.next() == ("a", 4, [first])
    assert desk.next() == ("a", 4, others)


def test_a_request_that_was_put_back_expires_once():
    desk = edf(paper_model("a", keys=(1,)))
    late, sooner = desk.accept("a", within=2), desk.accept("a", within=1)
    desk.backlog.put_back(desk.backlog.next(desk.clock.ns))
    desk.clock.advance(5)
    assert desk.next() is None
    assert desk.dropped() == [(sooner, "deadline"), (late, "deadline")]
    assert (desk.queue("a").depth, desk.queue("a").rows) == (0, 0)
    last = desk.accept("a")
    assert desk.next() == ("a", 1, [last])


def test_a_batch_that_is_put_back_has_no_window_any_more():
    desk = windowed(paper_model(keys=(1, 4)))
    tickets = [desk.accept("m") for _ in range(4)]
    batch = desk.backlog.next(desk.clock.ns)
    tickets.append(desk.accept("m"))
    desk.backlog.put_back(batch)
    assert desk.backlog.ripe_ns is None
    assert desk.next() == ("m", 4, tickets[:4])


def test_a_request_that_is_retried_alone_stays_alone_when_it_is_put_back():
    desk = edf(paper_model("a", keys=(1, 2)), paper_model("b"))
    failed = [desk.accept("a", within=9), desk.accept("a", within=9)]
    batch = desk.backlog.next(desk.clock.ns)
    desk.backlog.retry(batch.queue, failed)
    desk.backlog.settled(batch.queue)
    again = desk.backlog.next(desk.clock.ns)
    younger, urgent = desk.accept("a", within=9), desk.accept("b", within=1)
    assert not desk.backlog.precedes(urgent, again)
    desk.backlog.put_back(again)
    assert [desk.next()[2] for _ in range(4)] == [failed[:1], failed[1:], [urgent], [younger]]


# --- shapes -------------------------------------------------------------------------------------------------------


def test_mixed_shapes_fill_batches_when_requests_may_be_passed():
    model = paper_model(inputs=[spec("x", "n", "?")], keys=(1, 2), variants=((3,), (5,)))
    desk = Desk(model, policy=Policy(variant_overtakes=1))
    a1, b1, a2, b2 = [desk.accept("m", variant=variant) for variant in ((3,), (5,), (3,), (5,))]
    assert desk.next() == ("m", 2, [a1, a2])
    assert b1.overtaken == 1
    assert desk.next() == ("m", 2, [b1, b2])


def test_a_staged_batch_grows_by_requests_that_pass_others():
    model = paper_model(inputs=[spec("x", "n", "?")], keys=(1, 2), variants=((3,), (5,)))
    desk = Desk(model, policy=Policy(variant_overtakes=1))
    a1 = desk.accept("m", variant=(3,))
    staged = desk.backlog.next(desk.clock.ns)
    b = desk.accept("m", variant=(5,))
    a2 = desk.accept("m", variant=(3,))
    grown = desk.backlog.grow(staged, desk.clock.ns)
    assert (grown.batch_key, grown.tickets) == (2, [a1, a2])
    assert desk.next() == ("m", 1, [b])
