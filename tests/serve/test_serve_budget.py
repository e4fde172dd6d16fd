import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.serve.budget import place, resolve_budget


@pytest.mark.parametrize(
    ("fraction", "scratch", "pinned", "pool", "on_demand", "over"),
    [
        (1.0, 0, 0, 900, 900, False),
        (0.5, 0, 0, 500, 500, False),
        (1.0, 300, 0, 600, 600, False),
        (1.0, 300, 200, 600, 400, False),
        (1.0, 300, 700, 600, 0, True),
        (1.0, 950, 0, 0, 0, False),
    ],
)
def test_the_budget_is_the_arena_less_slack_scratch_and_what_is_pinned(
    fraction, scratch, pinned, pool, on_demand, over
):
    budget = resolve_budget(1000, pinned=pinned, max_scratch=scratch, fraction=fraction, wiggle=0.1)
    assert (budget.weight_pool, budget.on_demand, budget.over_commit) == (pool, on_demand, over)


def test_no_arena_has_no_budget():
    budget = resolve_budget(0)
    assert (budget.weight_pool, budget.on_demand) == (0, 0)


def test_everything_is_pinned_when_everything_fits():
    assert place({"a": 40, "b": 60}, 100) == {"a": "pinned", "b": "pinned"}


def test_the_smallest_are_pinned_as_long_as_the_largest_of_the_others_fits_beside_them():
    assert place({"a": 10, "b": 20, "c": 30, "d": 60}, 100) == {
        "a": "pinned",
        "b": "pinned",
        "c": "on demand",
        "d": "on demand",
    }


def test_a_model_that_is_larger_than_the_pool_does_not_keep_the_others_from_being_pinned():
    assert place({"a": 10, "b": 500}, 100) == {"a": "pinned", "b": "too large"}
    assert place({"a": 1}, 0) == {"a": "too large"}
    assert place({}, 100) == {}


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 100), max_size=8), st.integers(0, 300))
def test_every_model_has_a_place_and_the_largest_on_demand_fits_beside_the_pinned(weights, pool):
    placed = place(weights, pool)
    assert placed.keys() == weights.keys()
    pinned = sum(weights[name] for name, placement in placed.items() if placement == "pinned")
    waiting = [weights[name] for name, placement in placed.items() if placement == "on demand"]
    assert pinned + max(waiting, default=0) <= pool
    assert all(weights[name] > pool for name, placement in placed.items() if placement == "too large")
