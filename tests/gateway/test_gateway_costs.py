"""Averages over device time, and the costs that are learnt from the workers' cumulative counters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.core.errors import InvalidRequest, InvalidResponse
from rsrv.gateway.scheduling.costs import Baselines, CostCache, Costs, Used, average, mean
from rsrv.gateway.scheduling.ewma import ewma
from rsrv.gateway.workers.poll import ModelReport, Poll, WorkerReport
from rsrv.protos import control, inference


def poll(incarnation="", **workers):
    """worker → model → (compute, requests, rows[, max batch, batch input, axis])."""
    return Poll(
        {
            url: WorkerReport(
                url,
                {model: ModelReport(row[0], row[1], row[2], 0, *row[3:]) for model, row in models.items()},
                incarnation=incarnation,
            )
            for url, models in workers.items()
        }
    )


# --- averages -----------------------------------------------------------------------------------------------------


def test_an_average_moves_half_way_in_one_half_life():
    assert ewma(0, 1, 300, 300) == 0.5
    assert ewma(2, 2, 300, 300) == 2
    assert ewma(0, 1, 60, 300) == pytest.approx(0.12944943670387588)
    assert ewma(0.7, 5, 0, 300) == 0.7


def test_the_first_sample_is_taken_as_it_is():
    assert ewma(None, 3.0, 0, 300) == 3.0


@settings(deadline=None)
@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0.001, 1e6))
def test_an_average_stays_between_old_and_new(old, x, dt, h):
    low, high = sorted((old, x))
    assert low * (1 - 1e-12) <= ewma(old, x, dt, h) <= high * (1 + 1e-12)


# --- the worked example -------------------------------------------------------------------------------------------


def test_costs_follow_the_worked_example():
    cache = CostCache()
    costs = cache.update(poll(w={"m": (10.0, 5, 40, 8, "x", 0)}), 30, 0.0)
    assert costs.request_cost("m") == 2.0
    assert costs.item_cost("m") == 0.25
    assert costs.mean_item == 0.25
    assert costs.item_cost("unpolled") == 0.25

    costs = cache.update(poll(w={"m": (18.0, 7, 48)}), 30, 0.0)
    assert costs.item_cost("m") == pytest.approx(0.3766, abs=1e-4)
    assert costs.item_cost("m") == pytest.approx(0.25 + 0.75 * (1 - 2 ** (-8 / 30)))
    assert costs.request_cost("m") == pytest.approx(2 + 2 * (1 - 2 ** (-8 / 30)))
    assert costs.batch_at == {"m": ("x", 0)}, "a poll without a batch axis keeps the old one"
    assert costs.max_batch == {"m": 8}

    before = costs
    costs = cache.update(poll(w={"m": (0.5, 1, 4)}), 30, 0.0)
    assert costs == before, "counters that fell say nothing"


def test_a_request_of_four_rows_costs_four_times_an_item():
    costs = CostCache().update(poll(w={"m": (0.5, 10, 40)}), 30, 0.0)
    assert costs.request_cost("m") == pytest.approx(0.05)
    assert costs.item_cost("m") == pytest.approx(0.0125)


def test_nothing_measured_costs_one():
    assert Costs().item_cost("m") == 1.0
    assert Costs().request_cost("m") == 1.0
    idle = CostCache().update(poll(w={"m": (0.0, 0, 0)}), 30, 0.0)
    assert idle.item_cost("m") == 1.0
    assert idle.per_item == {}


def test_a_model_that_is_unmeasured_costs_the_mean_of_those_that_are():
    costs = CostCache().update(poll(w={"a": (1.0, 1, 10), "b": (3.0, 1, 10), "c": (0.0, 0, 0)}), 30, 0.0)
    assert costs.mean_item == pytest.approx(0.2)
    assert costs.item_cost("c") == pytest.approx(0.2)
    assert costs.request_cost("c") == pytest.approx(2.0)


def test_a_half_life_that_changes_holds_from_the_next_poll():
    slow, fast = CostCache(), CostCache()
    for cache in (slow, fast):
        cache.update(poll(w={"m": (10.0, 10, 10)}), 1000, 0.0)
    slow.update(poll(w={"m": (30.0, 20, 20)}), 1000, 0.0)
    fast.update(poll(w={"m": (30.0, 20, 20)}), 20, 0.0)
    assert slow.costs.item_cost("m") == pytest.approx(1 + (1 - 2 ** (-20 / 1000)))
    assert fast.costs.item_cost("m") == pytest.approx(1.5)


# --- one worker's counters are not another's -----------------------------------------------------------------------


def test_counters_are_summed_over_workers():
    costs = CostCache().update(poll(a={"m": (1.0, 1, 2)}, b={"m": (5.0, 2, 10)}), 30, 0.0)
    assert costs.request_cost("m") == 2.0
    assert costs.item_cost("m") == 0.5


def test_a_worker_that_misses_a_poll_neither_restarts_nor_brings_its_history_back():
    cache = CostCache()
    cache.update(poll(a={"m": (100.0, 100, 100)}, b={"m": (100.0, 100, 100)}), 30, 0.0)
    cache.update(poll(a={"m": (100.0, 100, 100)}), 30, 0.0)
    assert cache.costs.item_cost("m") == 1.0
    baselines = Baselines()
    baselines.advance(poll(a={"m": (100.0, 100, 100)}, b={"m": (100.0, 100, 100)}), 0.0)
    assert baselines.advance(poll(a={"m": (101.0, 101, 101)}), 0.0) == {"m": Used(1.0, 1, 1)}
    assert baselines.consumed == 1.0
    assert baselines.advance(poll(a={"m": (101.0, 101, 101)}, b={"m": (103.0, 102, 102)}), 0.0) == {
        "m": Used(3.0, 2, 2)
    }
    assert baselines.consumed == 3.0


def test_a_worker_that_joins_brings_its_average_but_no_device_time():
    baselines = Baselines()
    assert baselines.advance(poll(a={"m": (8.0, 4, 4)}), 0.0) == {"m": Used(8.0, 4, 4)}
    assert baselines.consumed == 0
    assert baselines.advance(poll(a={"m": (8.0, 4, 4)}, b={"m": (6.0, 2, 2)}), 0.0) == {"m": Used(6.0, 2, 2)}
    assert baselines.consumed == 0


def test_a_restart_on_one_worker_leaves_the_others_counters_alone():
    baselines = Baselines()
    baselines.advance(poll(a={"m": (50.0, 50, 50)}, b={"m": (50.0, 50, 50)}), 0.0)
    assert baselines.advance(poll(a={"m": (1.0, 1, 1)}, b={"m": (52.0, 51, 51)}), 0.0) == {"m": Used(2.0, 1, 1)}
    assert baselines.consumed == 2.0


def test_a_new_incarnation_started_from_zero():
    baselines = Baselines()
    baselines.advance(poll("one", a={"m": (50.0, 50, 50)}), 0.0)
    assert baselines.advance(poll("two", a={"m": (60.0, 20, 20)}), 0.0) == {"m": Used(60.0, 20, 20)}
    assert baselines.consumed == 60.0


def test_a_worker_that_is_forgotten_is_new_when_it_comes_back():
    baselines = Baselines()
    baselines.advance(poll(a={"m": (5.0, 5, 5)}), 0.0)
    baselines.forget("a")
    baselines.forget("never seen")
    assert baselines.advance(poll(a={"m": (2.0, 1, 1)}), 0.0) == {"m": Used(2.0, 1, 1)}
    cache = CostCache()
    cache.update(poll(a={"m": (5.0, 5, 5)}), 30, 0.0)
    cache.forget("a")
    assert cache.costs.item_cost("m") == 1.0, "what was learnt from it stays"


@pytest.mark.parametrize("row", [(float("nan"), 1, 1), (float("inf"), 1, 1), (-1.0, 1, 1), (1.0, -1, 1), (1.0, 1, -1)])
def test_garbage_from_a_worker_is_passed_over(row):
    cache = CostCache()
    cache.update(poll(a={"m": (2.0, 2, 2)}), 30, 0.0)
    cache.update(poll(a={"m": row}, b={"m": row}), 30, 0.0)
    assert cache.costs.item_cost("m") == 1.0
    assert cache.update(poll(a={"m": (4.0, 3, 3)}), 30, 0.0).item_cost("m") > 1.0


def test_a_report_that_is_garbage_once_does_not_bring_the_history_in_as_news():
    def told(compute):
        answer = control.ModelControlStatusResponse(incarnation="one")
        answer.models.add(name="m", total_compute_seconds=compute, requests_served=9, rows_served=9)
        return Poll({"a": WorkerReport.read("a", answer.SerializeToString())})

    baselines = Baselines()
    baselines.advance(told(5000.0), 0.0)
    for garbage in (float("nan"), float("inf"), -1.0, 1e300):
        assert baselines.advance(told(garbage), 0.0) == {}
    assert baselines.advance(told(5001.0), 0.0) == {"m": Used(1.0, 0, 0)}
    assert baselines.consumed == 1.0


def test_bytes_that_are_no_report_are_refused():
    with pytest.raises(InvalidResponse, match="3 bytes that are none"):
        WorkerReport.read("a", b"\xff\xff\xff")


def test_what_a_poll_does_not_say_stays():
    cache = CostCache()
    cache.update(poll(w={"m": (1.0, 1, 1, 16, "x", 1)}), 30, 0.0)
    costs = cache.update(poll(w={"other": (1.0, 1, 1)}), 30, 0.0)
    assert costs.max_batch == {"m": 16, "other": 0}
    assert costs.batch_at == {"m": ("x", 1)}
    assert costs.item_cost("m") == 1.0
    assert cache.update(poll(w={"m": (1.0, 1, 1, 4, "y", 0)}), 30, 0.0).batch_at["m"] == ("y", 0)
    assert cache.costs.max_batch["m"] == 4


def test_models_that_nobody_lists_any_more_are_forgotten_after_an_hour_wherever_they_are_kept():
    cache = CostCache()
    names = [f"m{number}" for number in range(50)]
    for number, name in enumerate(names):  # renamed every five minutes; one stays, and one is away for a while
        report = {name: (1.0, 1, 1, 8, "x", 0), "stays": (2.0, 1, 1, 4)}
        away = {} if 10 <= number < 20 else {"away": (6.0 + number, 3, 3)}
        costs = cache.update(poll(w=report | away), 30, 300.0 * number)
    kept = {*names[-12:], "stays", "away"}
    assert costs.per_item.keys() == costs.per_request.keys() == costs.max_batch.keys() == kept
    assert costs.batch_at.keys() == kept - {"stays", "away"}
    (worker,) = cache._baselines._seen.values()
    assert worker.used.keys() == kept
    assert costs.mean_item == pytest.approx(mean(costs.per_item))


def test_a_worker_that_was_away_for_hours_does_not_bring_its_history_back():
    baselines = Baselines()
    baselines.advance(poll("one", a={"m": (5000.0, 9, 9)}), 0.0)
    assert baselines.advance(poll("one", a={"m": (5001.0, 10, 10)}), 9e4) == {"m": Used(1.0, 1, 1)}
    assert baselines.consumed == 1.0


def test_a_snapshot_does_not_change_under_its_reader():
    cache = CostCache()
    before = cache.update(poll(w={"m": (1.0, 1, 1)}), 30, 0.0)
    cache.update(poll(w={"m": (9.0, 2, 2)}), 30, 0.0)
    assert before.item_cost("m") == 1.0


def test_means_and_averages_pass_over_what_was_not_measured():
    assert mean({}) == mean({"a": 0.0}) == 0.0
    assert mean({"a": 0.0, "b": 2.0, "c": 4.0}) == 3.0
    costs = {"a": 1.0}
    average(costs, [("a", 5.0, 0), ("b", 4.0, 2)], 30, 30)
    assert costs == {"a": 1.0, "b": 2.0}


# --- items --------------------------------------------------------------------------------------------------------


def test_items_are_the_extent_of_the_axis_that_the_worker_named():
    message = inference.ModelInferRequest(model_name="m")
    message.inputs.add(name="query", shape=[37])
    message.inputs.add(name="image", shape=[12, 3, 224, 224])
    body = message.SerializeToString()
    costs = CostCache().update(poll(w={"m": (0.0, 0, 0, 8, "image", 0), "axisless": (0.0, 0, 0, 8)}), 30, 0.0)
    assert costs.items(body, "m") == 12
    assert costs.items(body, "axisless") == 1
    assert costs.items(body, "unknown") == 1
    assert Costs(batch_at={"m": ("image", 9)}).items(body, "m") == 1, "an extent of nothing is one item"
    with pytest.raises(InvalidRequest):
        costs.items(b"\x2a\x02\x0a\x05", "m")


# --- properties ---------------------------------------------------------------------------------------------------

steps = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=3), max_size=12
)


@settings(max_examples=50, deadline=None)
@given(steps)
def test_what_was_consumed_is_what_known_workers_used_however_they_miss_polls(rounds):
    """Each round some workers answer, after having used some device seconds for some requests."""
    total = dict.fromkeys("abc", (0, 0))
    seen, baselines, learnt, requests = {}, Baselines(), 0.0, 0
    for answers in rounds:
        for url, (compute, count) in answers.items():
            total[url] = (total[url][0] + compute, total[url][1] + count)
        used = baselines.advance(poll(**{url: {"m": (float(total[url][0]), total[url][1], 0)} for url in answers}), 0.0)
        assert baselines.consumed == sum(total[url][0] - seen[url] for url in answers if url in seen)
        seen |= {url: total[url][0] for url in answers}
        learnt += used.get("m", Used()).compute
        requests += used.get("m", Used()).requests
    assert learnt == sum(seen.values())
    assert requests == sum(total[url][1] for url in seen)
