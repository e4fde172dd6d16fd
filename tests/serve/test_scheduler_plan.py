"""Planning as pure functions: the worked numbers of the specification, and properties that hold for every queue."""

from itertools import takewhile
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.serve.scheduler.plan import Plan, Variant, fitting_key, plan


class Row(NamedTuple):
    rows: int
    variant: Variant = ()


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
queues = st.lists(st.builds(Row, st.integers(1, 40), variants), min_size=1, max_size=30)
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


@given(situations(), st.lists(st.builds(Row, st.integers(1, 40), variants), max_size=10))
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
