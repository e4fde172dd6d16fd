"""The arithmetic of the fair discipline: inflated sums that never overflow, and a choice that is the formula's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_support import Desk, paper_model

from rsrv.serve.scheduler.account import Account
from rsrv.serve.scheduler.select import most_owed, oldest
from rsrv.serve.scheduler.shares import Shares, priority


def members(n):
    return [Account(f"m{i}", 1.0) for i in range(n)]


def opened(n, **options):
    shares = Shares(30.0, credit_idle=options.pop("credit_idle", False), **options)
    found = members(n)
    for member in found:
        shares.open(member)
    return shares, found


def test_ratios_survive_the_move_of_the_epoch_and_nothing_overflows():
    shares, (a, b) = opened(2)
    for member in (a, b):
        shares.enter(member)
    shares.charge(a, 3.0, 0)
    shares.charge(b, 1.0, 0)
    day = 24 * 3600 * 10**9
    shares.charge(a, 1.0, 30 * 200 * 10**9 + 10**9)
    assert a.used / shares.used == pytest.approx(1.0)
    shares.charge(b, 1.0, 30 * 200 * 10**9 + 10**9)
    assert a.used / shares.used == pytest.approx(0.5)
    shares.charge(a, 2.0, 400 * day)
    assert shares.recent_seconds(a, 400 * day) == pytest.approx(2.0)
    assert shares.recent_seconds(b, 400 * day) == 0.0


def test_idle_models_move_with_the_epoch_too():
    shares, (idle, busy) = opened(2)
    shares.charge(idle, 4.0, 0)
    shares.enter(busy)
    later = int(30e9) * 201
    shares.charge(busy, 1.0, later)
    assert shares.recent_seconds(idle, later) == pytest.approx(4.0 * 2.0**-201)


def test_a_failed_subtraction_does_not_leave_rounding_errors_behind():
    shares, (large, small) = opened(2)
    small.used, large.used = 1e-9, 1e12
    shares.enter(small)
    shares.enter(large)
    shares.leave(large)
    assert shares.used == small.used
    shares.leave(small)
    assert (shares.used, shares.weight) == (0.0, 0.0)


def test_a_model_keeps_its_credit_for_idling_only_under_the_older_rule():
    for credit_idle, entered in ((True, 0.0), (False, 5.0)):
        shares, (busy, idle) = opened(2, credit_idle=credit_idle)
        shares.enter(busy)
        shares.charge(busy, 5.0, 0)
        shares.enter(idle)
        assert idle.used == pytest.approx(entered)
        shares.enter(idle)
        assert shares.weight == 2.0


def test_a_new_weight_counts_at_once():
    shares, (a, b) = opened(2)
    shares.enter(a)
    shares.reweigh(a, 3.0)
    shares.reweigh(b, 5.0)
    assert shares.weight == 3.0
    shares.enter(b)
    assert shares.weight == 8.0


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.floats(0, 100), st.floats(1e-4, 10), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
)
def test_the_choice_is_the_model_with_the_highest_priority_and_ties_go_to_the_oldest(rows, always_divide):
    desk = Desk(*[paper_model(f"m{i:02}") for i in range(len(rows))])
    shares = desk.backlog.shares
    for i, (weight, used, price, tick, _) in enumerate(rows):
        name = f"m{i:02}"
        shares.reweigh(desk.queue(name).account, weight)
        desk.accept(name, tick=tick)
        desk.queue(name).account.used, desk.queue(name).price = used, price
    shares._sum()
    queues = [*desk.backlog.queues.values()]
    per_weight, per_used = 1.0 / shares.weight, 1.0 / shares.used if shares.used else 0.0

    def owed(queue):
        share, recent = queue.account.weight * per_weight, queue.account.used * per_used
        return priority(share, recent, queue.price, 0.25, always_divide=always_divide)

    chosen = most_owed(queues, shares, 0.25, always_divide=always_divide)
    highest = max(map(owed, queues))
    assert chosen is oldest([queue for queue in queues if owed(queue) == highest])


def test_a_model_counts_while_it_has_queued_or_executing_work_and_no_longer():
    desk = Desk(paper_model("a"), paper_model("b"))
    shares = desk.backlog.shares
    assert shares.weight == 0
    desk.accept("a")
    desk.accept("b")
    assert shares.weight == 2
    batch = desk.backlog.next(desk.clock.ns)
    assert shares.weight == 2, "it is executing"
    desk.backlog.settled(batch.queue)
    assert shares.weight == 1
    desk.backlog.remove("b")
    assert shares.weight == 0


def test_a_merged_batch_counts_cheaper_and_a_single_request_does_not():
    desk = Desk(paper_model("pair", keys=(1, 2)), paper_model("single", keys=(1, 2)))
    for name in ("pair", "single"):
        desk.seed(name, {1: 0.01, 2: 0.01})
    desk.accept("single")
    desk.accept("pair")
    desk.accept("pair")
    assert desk.next()[0] == "pair"
    assert desk.queue("single").price == 0.01
    assert desk.queue("pair").price == pytest.approx(0.009)
