"""What programs cost, and which batch size is the cheapest way to go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_support import Desk, paper_model

from rsrv.serve.scheduler.costs import Costs
from rsrv.serve.scheduler.plan import filled_key


def seeded(seconds, variant=(), runs=8):
    """Costs that a warm-up and `runs` runs of each size agree on."""
    costs = Costs(0.2)
    for key, cost in seconds.items():
        costs.seed(variant, key, round(cost * 1e9), 0)
        for _ in range(runs):
            costs.measured(variant, key, round(cost * 1e9), 0)
    return costs


@pytest.mark.parametrize(
    ("seconds", "rows", "expected"),
    [
        pytest.param({4: 0.04, 8: 0.08}, 5, 4, id="a_second_batch_of_four_costs_as_much_as_one_of_eight"),
        pytest.param({1: 0.01, 4: 0.04, 8: 0.07}, 5, 4, id="four_and_one_cost_less_than_eight"),
        pytest.param({1: 0.03, 4: 0.04, 8: 0.05}, 5, 8, id="eight_padded_costs_less_than_four_and_one"),
        pytest.param({1: 0.01, 8: 0.2}, 8, 1, id="a_large_size_that_does_not_pay_is_not_used"),
        pytest.param({1: 0.01, 2: 0.011, 4: 0.012}, 3, 4, id="padding_one_row_beats_two_dispatches"),
        pytest.param({1: 0.01, 8: 0.079}, 8, 8, id="the_largest_that_fills"),
        pytest.param({1: 0.01, 8: 0.081}, 8, 8, id="a_saving_of_a_percent_is_not_worth_another_dispatch"),
    ],
)
def test_the_size_that_makes_all_queued_rows_cheapest_goes_first(seconds, rows, expected):
    assert seeded(seconds).first((), tuple(seconds), rows, None) == expected


def test_a_size_that_was_never_measured_is_taken_when_its_turn_comes():
    costs = seeded({1: 0.01, 4: 0.011})
    assert costs.first((), (1, 4, 8), 8, None) == 8
    assert costs.first((), (1, 4, 8), 3, None) == 4


@given(
    st.dictionaries(st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 1000), min_size=1),
    st.integers(1, 16),
)
def test_no_sequence_of_batches_is_cheaper_than_the_chosen_one_by_more_than_a_dispatch_is_worth(prices, rows):
    keys = tuple(sorted(prices))
    rows = min(rows, keys[-1])
    costs = seeded({key: price / 1000 for key, price in prices.items()})

    def cheapest(left):
        return 0 if left <= 0 else min(prices[key] + cheapest_of(left - key) for key in keys)

    known = {}

    def cheapest_of(left):
        if left not in known:
            known[left] = cheapest(left)
        return known[left]

    chosen = costs.first((), keys, rows, None)
    worth = 0.5 if rows in keys else 0.9
    assert prices[chosen] + cheapest_of(rows - chosen) <= cheapest_of(rows) / worth + 1e-6


def test_rows_that_fill_a_size_exactly_take_it_whatever_the_noise():
    assert seeded({1: 0.01, 4: 0.013, 8: 0.008}).first((), (1, 4, 8), 4, None) == 4
    assert seeded({1: 10e-6, 4: 100e-6, 8: 30e-6}).first((), (1, 4, 8), 4, None) == 4
    assert seeded({1: 0.01, 4: 0.013, 8: 0.008}).first((), (1, 4, 8), 3, None) == 8


def test_a_size_that_rows_fill_exactly_is_left_only_when_requests_proved_it_slow():
    """The one run of a warm-up on a busy machine took ten times what a run takes."""
    costs = seeded({1: 0.002, 4: 0.03, 8: 0.003}, runs=0)
    assert costs.first((), (1, 4, 8), 4, None) == 4
    assert costs.first((), (1, 4, 8), 3, None) == 8
    for _ in range(7):
        costs.measured((), 4, 30_000_000, 0)
        assert costs.first((), (1, 4, 8), 4, None) == 4
    assert costs.measured((), 4, 30_000_000, 0)
    assert costs.first((), (1, 4, 8), 4, None) == 8


def test_one_long_wait_does_not_change_what_is_chosen():
    costs = seeded({1: 0.01, 4: 0.012})
    costs.measured((), 4, 10**9, 0)
    assert costs.seconds((), 4) > 0.2
    assert costs.first((), (1, 4), 4, None) == 4


def test_a_size_that_was_measured_wrongly_is_tried_again():
    costs = seeded({1: 0.01, 4: 1.0})
    assert costs.first((), (1, 4), 4, None) == 1
    changed = [costs.measured((), 1, 10_000_000, 0) for _ in range(600)]
    assert any(changed)
    assert costs.first((), (1, 4), 4, None) == 4
    costs.measured((), 4, 20_000_000, 0)
    assert costs.first((), (1, 4), 4, None) == 4
    assert costs.fastest_ns((), 4) == 20_000_000


def test_the_cap_limits_what_a_size_is_worth():
    costs = seeded({1: 0.01, 8: 0.03})
    assert costs.first((), (1, 8), 8, None) == 8
    assert costs.first((), (1, 8), 2, 2) == 1


def test_variants_have_costs_of_their_own():
    costs = seeded({1: 0.01, 4: 0.02}, (3,))
    costs.seed((5,), 1, 10**9, 0)
    assert costs.seconds((3,), 1) == 0.01
    assert costs.seconds((5,), 1) == 1.0
    assert costs.seconds((5,), 4) is None
    assert costs.first((3,), (1, 4), 4, None) == 4


def test_an_unmeasured_program_needs_no_margin_and_an_old_measurement_is_not_believed():
    costs = seeded({1: 0.01})
    assert costs.margin_ns((), 1, 0) == 10_000_000
    assert costs.margin_ns((), 4, 0) == 0
    assert costs.margin_ns((), 1, 2 * 10**9) == 0
    costs.measured((), 1, 10_000_000, 2 * 10**9)
    assert costs.margin_ns((), 1, 2 * 10**9) == 10_000_000


def test_the_least_time_for_a_queue_uses_the_best_size_and_says_nothing_before_the_largest_was_measured():
    costs = seeded({1: 0.01, 4: 0.02})
    assert costs.at_least_ns((), (1, 4), 8, 1) == pytest.approx(9 * 0.005e9)
    assert costs.at_least_ns((), (1, 4), 0, 1) == pytest.approx(0.01e9)
    assert costs.at_least_ns((), (1, 4, 8), 8, 1) == 0


def test_a_batch_whose_rows_do_not_fill_the_size_runs_on_the_smaller_one_that_is_cheaper():
    desk = Desk(paper_model(keys=(1, 4, 8)))
    desk.seed("m", {1: 0.01, 4: 0.04, 8: 0.08})
    small, _ = desk.accept("m", 1), desk.accept("m", 4)
    assert desk.next() == ("m", 1, [small])


def test_without_measurements_the_rule_is_the_plain_one():
    assert [Costs(0.2).first((), (1, 4, 8), rows, None) for rows in range(1, 9)] == [
        filled_key((1, 4, 8), rows) for rows in range(1, 9)
    ]
