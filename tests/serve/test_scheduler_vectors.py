"""The scheduling rows of the specification's acceptance vectors (worker §14), one test each, in the table's order.

Rows about executions are tests of the scheduler with its threads, in `test_scheduler_dispatch`: *queue limit 2*
(`test_a_full_queue_refuses_…`), *stop* (`test_stop_…`), *coalesced run* (`test_four_requests_of_one_row_…`), *padding*
(`test_a_row_that_is_padded_…`), *variants* (`test_variants_never_share_…`); *uncompiled shape* is in
`test_scheduler_backlog` (`test_an_uncompiled_variant_…`), *hooks* and *hooks overlap* are in `test_serve_inference`.
"""

import pytest
from sched_support import Desk, paper_model

from benchmarks.simulation import simulate
from rsrv.core.errors import QueueFull
from rsrv.serve.scheduler.account import Account
from rsrv.serve.scheduler.costs import Costs
from rsrv.serve.scheduler.policy import ModelPolicy, Policy
from rsrv.serve.scheduler.shares import Shares, priority

# The rows "priority" and "fair select" run under the older rule.
SHARE, CAP, DISCOUNT = 1 / 3, 0.25, 0.1
RECENT = {"a": 0.7, "b": 0.2, "c": 0.1}


def older(recent, cost, cap=CAP, discount=DISCOUNT):
    return priority(SHARE, recent, cost * (1 - discount), cap, always_divide=True)


def test_priority():
    priorities = [older(RECENT[m], cost) for m, cost in zip("abc", (10, 30, 100), strict=True)]
    assert priorities == pytest.approx([-0.0278, 0.00493, 0.00259], abs=1e-4)
    assert max(priorities) == priorities[1]


def test_priority_with_clamped_deficits():
    assert priority(1 / 3, 0.7, 1.0, 0.25, always_divide=True) == -0.25
    assert priority(0.6, 0.1, 1.0, 0.25, always_divide=True) == 0.25


@pytest.mark.parametrize("look_ahead", [False, True], ids=["at_once", "one_batch_ahead"])
@pytest.mark.parametrize(
    ("population", "costs", "expected"),
    [
        ("active", (1, 1), 0.75),
        ("active", (1, 3), 0.75),
        ("active", (3, 1), 0.75),
        ("prepared", (1, 1), 0.50),
        ("prepared", (1, 3), 0.14),
        ("prepared", (3, 1), 0.90),
    ],
)
def test_fair_active_two_saturated_models_with_48_idle_ones(population, costs, expected, look_ahead):
    programs = {"a": {1: 0.01 * costs[0]}, "b": {1: 0.01 * costs[1]}, **{f"idle{i}": {1: 0.01} for i in range(48)}}
    policy = Policy(fair_population=population, models={"a": ModelPolicy(weight=3.0)})
    outcome = simulate(policy, programs, [], until=20, saturated=["a", "b"], look_ahead=look_ahead)
    assert outcome.share("a") == pytest.approx(expected, abs=0.005)


def test_fair_active_a_negative_deficit_is_multiplied_by_the_cost():
    assert priority(0.25, 0.5, 10.0, 0.25) == -2.5
    assert priority(0.25, 0.5, 10.0, 0.25, always_divide=True) == -0.025


@pytest.mark.parametrize(("used", "entered"), [(0.0, 2.0), (1.0, 2.0), (5.0, 5.0)])
def test_fair_active_an_idle_model_that_gets_work_starts_with_its_share_or_what_it_used(used, entered):
    accounts = [Account(name, 1.0) for name in "ab"]
    shares = Shares(30.0, credit_idle=False)
    accounts[0].used, accounts[1].used = 6.0, used
    accounts[0].weight = 3.0
    for account in accounts:
        shares.open(account)
        shares.enter(account)
    assert accounts[0].used == 6.0
    assert accounts[1].used == entered
    share, recent = 1 / 4, accounts[1].used / shares.used
    assert recent == pytest.approx(max(share, used / (6 + used)))


def test_fair_select():
    desk = Desk(
        *[paper_model(name, keys=(1,)) for name in "abc"],
        policy=Policy(fair_population="prepared", coalescing_discount=DISCOUNT),
    )
    for name, cost in (("a", 0.01), ("b", 0.03), ("c", 0.1)):
        queue = desk.queue(name)
        queue.costs.seed((), 1, round(cost * 1e9), 0)
        desk.backlog.shares.charge(queue.account, RECENT[name], 0)
    tickets = {name: desk.accept(name) for name in "abc"}
    assert desk.next() == ("b", 1, [tickets["b"]])
    assert [desk.queue(name).depth for name in "abc"] == [1, 0, 1]


def test_ema():
    account = Account("m", 1.0)
    shares = Shares(30.0, credit_idle=False)
    shares.open(account)
    shares.charge(account, 1.0, 0)
    for seconds, expected in ((0, 1.0), (30, 0.5), (60, 0.25)):
        assert shares.recent_seconds(account, seconds * 10**9) == pytest.approx(expected)


def test_cost():
    costs = Costs(0.2)
    assert costs.seconds((), 1) is None
    costs.measured((), 1, 40_000_000, 0)
    assert costs.seconds((), 1) == 0.04
    for _ in range(50):
        costs.measured((), 1, 10_000_000, 0)
    assert costs.seconds((), 1) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("rows", "sizes", "cap", "batch_key", "take"),
    [
        pytest.param([2, 2, 2], [1, 4, 8], None, 4, 2, id="plan-2_2_2"),
        pytest.param([1], [4, 8], None, 4, 1, id="plan-1_is_padded"),
        pytest.param([6, 1], [1, 4, 8], None, 8, 2, id="plan-6_1"),
        pytest.param([2, 2, 2, 2], [1, 4, 8], 4, 4, 2, id="cap_4-2_2_2_2"),
        pytest.param([1, 1, 1], [4, 8], 2, 4, 2, id="cap_2-1_1_1"),
        pytest.param([6, 1], [1, 4, 8], 2, 8, 1, id="cap_2-6_1"),
    ],
)
def test_plan(rows, sizes, cap, batch_key, take):
    desk = Desk(paper_model(keys=tuple(sizes), cap=cap))
    tickets = [desk.accept("m", n) for n in rows]
    assert desk.next() == ("m", batch_key, tickets[:take])


def test_plan_not_coalescable():
    desk = Desk(paper_model(keys=(0,)))
    tickets = [desk.accept("m"), desk.accept("m")]
    assert desk.next() == ("m", 0, tickets[:1])


def test_fifo():
    desk = Desk(paper_model("busy"), paper_model("fresh"), policy=Policy(discipline="fifo"))
    desk.backlog.shares.charge(desk.queue("busy").account, 1000.0, 0)
    desk.queue("busy").costs.seed((), 4, 10**10, 0)
    older = [desk.accept("busy", 2), desk.accept("busy", 2)]
    desk.accept("fresh")
    assert desk.next() == ("busy", 4, older)


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        pytest.param(10**9, 10**8, "second", id="a_sooner_deadline_wins_over_an_older_request"),
        pytest.param(10**9, 10**9, "first", id="of_equal_deadlines_the_older_request_wins"),
        pytest.param(0, 10**9, "second", id="some_deadline_wins_over_none"),
        pytest.param(0, 0, "first", id="without_deadlines_it_is_fifo"),
    ],
)
def test_edf(first, second, winner):
    desk = Desk(paper_model("first"), paper_model("second"), policy=Policy(discipline="edf"))
    now = desk.clock.ns
    desk.accept("first", deadline_ns=first and now + first)
    desk.accept("second", deadline_ns=second and now + second)
    assert desk.next()[0] == winner


def test_queue_limit_2():
    desk = Desk(paper_model("a"), paper_model("b"), policy=Policy(max_queue_depth=2))
    desk.accept("a")
    desk.accept("a")
    with pytest.raises(QueueFull, match="full"):
        desk.accept("a")
    desk.accept("b")
