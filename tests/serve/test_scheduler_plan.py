"""Planning as pure functions: the worked numbers of the specification, and properties that hold for every queue."""

from itertools import takewhile
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.serve.scheduler.costs import Costs
from rsrv.serve.scheduler.plan import Plan, Variant, fitting_key, plan, plan_single_rows


class Row(NamedTuple):
    rows: int
    variant: Variant = ()
    overtaken: int = 0


def planned(rows, sizes, cap=None, coalescable=True):
    return plan([Row(n) for n in rows], {(): tuple(sizes)}, coalescable=coalescable, cap=cap)


@pytest.mark.parametrize(
    ("rows", "sizes", "cap", "batch_key", "take"),
    [
        pytest.param([2, 2, 2], [1, 4, 8], None, 4, 2, id="two_pairs_fill_four"),
        pytest.param([1], [4, 8], None, 4, 1, id="a_single_row_is_padded"),
        pytest.param([6, 1], [1, 4, 8], None, 8, 2, id="a_large_head_lifts_the_key_and_others_ride_along"),
        pytest.param([2, 2, 2, 2], [1, 4, 8], 4, 4, 2, id="the_cap_limits_merged_rows"),
        pytest.param([1, 1, 1], [4, 8], 2, 4, 2, id="the_cap_limits_rows_not_the_compiled_size"),
        pytest.param([6, 1], [1, 4, 8], 2, 8, 1, id="a_request_above_the_cap_runs_alone"),
        pytest.param([1] * 5, [1, 4, 8], None, 4, 4, id="rows_beyond_the_filled_key_wait"),
        pytest.param([1] * 100, [1, 8, 32], None, 32, 32, id="the_largest_key_bounds_the_batch"),
        pytest.param([3, 3], [4], None, 4, 1, id="a_misfit_ends_the_batch"),
        pytest.param([3, 3, 1], [4], None, 4, 1, id="nothing_overtakes_a_misfit"),
        pytest.param([3], [1, 4, 8], 1, 4, 1, id="a_request_above_the_cap_gets_the_key_that_holds_it"),
        pytest.param([8, 8], [1, 4, 8], None, 8, 1, id="an_exact_fit_fills_the_largest_key"),
    ],
)
def test_worked_numbers(rows, sizes, cap, batch_key, take):
    assert planned(rows, sizes, cap)[:2] == (batch_key, take)


def test_an_empty_queue_has_no_plan():
    assert planned([], [1, 4]) is None


def test_a_model_that_is_not_coalescable_runs_one_request_at_the_key_that_holds_it():
    assert planned([1, 1], [1, 4], coalescable=False) == Plan(1, 1, True)
    assert planned([3, 1], [1, 4], coalescable=False) == Plan(4, 1, True)


def test_a_single_program_without_a_size_runs_one_request():
    assert planned([5, 5], [0]) == Plan(0, 1, True)


def test_a_variant_without_programs_is_dispatched_alone_with_its_own_rows():
    assert plan([Row(3, (5,)), Row(1, (5,))], {(9,): (4,)}, coalescable=True) == Plan(3, 1, True)


def test_variants_do_not_mix_even_when_both_would_fit():
    queue = [Row(1, (8,)), Row(1, (8,)), Row(1, (16,)), Row(1, (8,))]
    assert plan(queue, {(8,): (1, 2, 4), (16,): (1,)}, coalescable=True)[:2] == (2, 2)
    assert plan(queue[2:], {(8,): (1, 2, 4), (16,): (1,)}, coalescable=True)[:2] == (1, 1)


@pytest.mark.parametrize(
    ("rows", "sizes", "cap", "full"),
    [
        ([1], [1], None, True),
        ([1], [1, 4], None, False),
        ([4], [1, 4], None, True),
        ([1, 1], [4, 8], 2, True),
        ([1, 1, 1], [1, 4, 8], None, False),
        ([6], [1, 8], 2, True),
    ],
)
def test_full_says_whether_later_arrivals_could_join(rows, sizes, cap, full):
    assert planned(rows, sizes, cap).full is full


def test_planning_reads_no_further_than_the_largest_key_can_hold():
    read = 0

    def queue():
        nonlocal read
        while True:
            read += 1
            yield Row(1)

    assert plan(queue(), {(): (1, 8)}, coalescable=True) == Plan(8, 8, True)
    assert read == 8


def test_the_fitting_key_is_the_smallest_that_holds_the_rows_or_the_largest():
    assert [fitting_key((1, 4, 8), rows) for rows in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, 8]


sizes = st.sets(st.integers(1, 40), min_size=1, max_size=5).map(lambda keys: tuple(sorted(keys)))
variants = st.sampled_from([(), (7,), (9,)])
queues = st.lists(st.builds(Row, st.integers(1, 40), variants, st.just(0)), min_size=1, max_size=30)
caps = st.one_of(st.none(), st.integers(1, 50))


@st.composite
def situations(draw):
    compiled = {variant: draw(sizes) for variant in [(), (7,), (9,)]}
    fits = [row for row in draw(queues) if row.rows <= compiled[row.variant][-1]]
    return fits or [Row(1)], compiled, draw(caps)


@given(situations())
def test_a_plan_takes_whole_requests_of_one_variant_from_the_front(situation):
    queue, compiled, cap = situation
    result = plan(queue, compiled, coalescable=True, cap=cap)
    taken = queue[: result.take]
    assert 1 <= result.take <= len(queue)
    assert {row.variant for row in taken} == {queue[0].variant}
    assert result.batch_key in compiled[queue[0].variant]
    assert sum(row.rows for row in taken) <= result.batch_key
    if result.take > 1:
        assert cap is None or sum(row.rows for row in taken) <= cap


@given(situations())
def test_a_plan_stops_only_where_the_next_request_does_not_fit(situation):
    queue, compiled, cap = situation
    result = plan(queue, compiled, coalescable=True, cap=cap)
    taken = sum(row.rows for row in queue[: result.take])
    room = min(result.batch_key, result.batch_key if cap is None else cap)
    if result.take < len(queue):
        following = queue[result.take]
        assert following.variant != queue[0].variant or taken + following.rows > room


@given(situations())
def test_planning_again_and_again_serves_every_request_once_and_in_order(situation):
    queue, compiled, cap = situation
    served = []
    rest = list(queue)
    for _ in range(len(queue)):
        if not rest:
            break
        result = plan(rest, compiled, coalescable=True, cap=cap)
        served += rest[: result.take]
        rest = rest[result.take :]
    assert served == queue


@given(situations(), st.lists(st.builds(Row, st.integers(1, 40), variants, st.just(0)), max_size=10))
def test_later_arrivals_never_shrink_a_batch_and_never_enlarge_a_full_one(situation, arrivals):
    queue, compiled, cap = situation
    arrivals = [row for row in arrivals if row.rows <= compiled[row.variant][-1]]
    before = plan(queue, compiled, coalescable=True, cap=cap)
    after = plan(queue + arrivals, compiled, coalescable=True, cap=cap)
    assert after.take >= before.take
    if before.full:
        assert after == before


@given(situations())
def test_a_key_is_either_filled_by_queued_rows_or_the_smallest_that_holds_the_first_request(situation):
    queue, compiled, cap = situation
    result = plan(queue, compiled, coalescable=True, cap=cap)
    leading = sum(row.rows for row in takewhile(lambda row: row.variant == queue[0].variant, queue))
    mergeable = leading if cap is None else min(leading, cap)
    assert result.batch_key <= mergeable or result.batch_key == fitting_key(compiled[queue[0].variant], queue[0].rows)


# --- passing requests of another shape ----------------------------------------------------------------------------

A, B = (8,), (16,)
SHAPES = {A: (1, 2, 4), B: (1, 2)}


def passing(queue, overtakes, compiled=SHAPES):
    return plan(queue, compiled, coalescable=True, overtakes=overtakes)


def test_requests_of_the_same_shape_pass_others_as_often_as_these_may_be_passed():
    queue = [Row(1, A), Row(1, B), Row(1, A), Row(1, A), Row(1, A)]
    assert passing(queue, 0) == Plan(1, 1, False)
    assert passing(queue, 1) == Plan(2, 2, False, (0, 2))
    assert passing(queue, 3) == Plan(4, 4, True, (0, 2, 3, 4))


def test_a_request_that_was_passed_often_enough_is_not_passed_again():
    queue = [Row(1, A), Row(1, B, overtaken=2), Row(1, A), Row(1, A)]
    assert passing(queue, 2) == Plan(1, 1, False)
    assert passing(queue, 3) == Plan(2, 2, False, (0, 2))


def test_every_request_that_is_passed_counts():
    queue = [Row(1, A), Row(1, B), Row(1, A), Row(1, B, overtaken=1), Row(1, A), Row(1, A)]
    assert passing(queue, 2).picks == (0, 2)
    assert passing(queue, 3).picks == (0, 2, 4, 5)


def test_nothing_passes_a_request_of_its_own_shape_that_does_not_fit():
    queue = [Row(2, A), Row(1, B), Row(3, A), Row(1, A)]
    assert passing(queue, 9).picks == ()


@given(situations(), st.integers(0, 5))
def test_no_request_is_passed_more_often_than_allowed_and_the_rest_keeps_its_order(situation, overtakes):
    queue, compiled, cap = situation
    result = plan(queue, compiled, coalescable=True, cap=cap, overtakes=overtakes)
    picks = result.picks or tuple(range(result.take))
    assert len(picks) == result.take
    assert list(picks) == sorted(picks)
    assert picks[0] == 0
    for position in range(picks[-1]):
        if position not in picks:
            assert sum(pick > position for pick in picks) <= overtakes
    taken = [queue[pick] for pick in picks]
    assert {row.variant for row in taken} == {queue[0].variant}
    same = [position for position, row in enumerate(queue) if row.variant == queue[0].variant]
    assert list(picks) == same[: len(picks)]


# --- costs and deadlines ------------------------------------------------------------------------------------------


@given(st.integers(1, 50), sizes, caps, st.booleans())
def test_the_plan_of_single_rows_is_the_plan(n, sizes, cap, with_costs):
    costs = None
    if with_costs:
        costs = Costs(0.2)
        for key in sizes:
            costs.seed((), key, 1000 + key * key, 0)
    expected = plan([Row(1)] * n, {(): sizes}, coalescable=True, cap=cap, costs=costs)
    assert plan_single_rows(n, (), sizes, cap=cap, costs=costs) == expected


class Urgent(NamedTuple):
    within: float
    rows: int = 1
    variant: Variant = ()
    overtaken: int = 0


def in_time(seconds):
    return lambda key, items: sum(seconds[key] < item.within for item in items)


@pytest.mark.parametrize(
    ("within", "seconds", "batch_key", "take"),
    [
        pytest.param([9, 9, 9, 9], {1: 1, 4: 2}, 4, 4, id="all_in_time"),
        pytest.param([2, 9, 9], {1: 1, 2: 3, 4: 5}, 1, 1, id="a_smaller_batch_meets_the_tightest_deadline"),
        pytest.param([2, 9, 9, 9], {1: 1, 4: 2}, 4, 4, id="three_in_a_full_batch_are_more_per_second_than_one_alone"),
        pytest.param([0.5, 0.5], {1: 1, 4: 2}, 1, 1, id="none_in_time"),
    ],
)
def test_the_batch_with_most_requests_in_time_per_second_is_taken(within, seconds, batch_key, take):
    costs = Costs(0.2)
    for key, cost in seconds.items():
        costs.seed((), key, cost * 10**9, 0)
    result = plan(
        [Urgent(w) for w in within],
        {(): tuple(seconds)},
        coalescable=True,
        costs=costs,
        in_time=in_time(seconds),
    )
    assert result[:2] == (batch_key, take)
