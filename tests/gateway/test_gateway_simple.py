"""The modes without a placement."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.core.errors import ConfigError
from rsrv.gateway.routing.table import RoutingTable
from rsrv.gateway.scheduling.simple import LeastOutstanding, RoundRobin, avoided_last
from rsrv.gateway.workers.poll import ModelReport, Poll, WorkerReport
from rsrv.protos import inference

AB = ("a", "b")


def costs(**models):
    """A poll of one worker: model → device seconds an item; the batch is axis 0 of "x"."""
    rows = {model: ModelReport(cost * 100, 100, 100, 0, 32, "x", 0) for model, cost in models.items()}
    return Poll({"a": WorkerReport("a", rows)})


def taught(basis, **models):
    mode = LeastOutstanding(basis)
    mode.tick(AB, costs(**models), 0.0)
    return mode


def body(items):
    message = inference.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", shape=[items, 4])
    return message.SerializeToString()


def test_workers_to_avoid_come_last_in_their_own_order():
    assert avoided_last("abcd", {"a", "c"}) == ("b", "d", "a", "c")
    assert avoided_last("ab", {"a", "b"}) == ("a", "b")
    assert avoided_last("ab", ()) == ("a", "b")


# --- round_robin --------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns():
    mode, table = RoundRobin(), RoutingTable({"m": AB})
    assert [mode.select("m", 1, table.pick("m"), ()).urls for _ in range(3)] == [("a", "b"), ("b", "a"), ("a", "b")]


def test_round_robin_keeps_nothing():
    mode = RoundRobin()
    choice = mode.select("m", 1, AB, {"a"})
    assert choice.urls == ("b", "a")
    assert choice.reservation is None
    mode.record_arrival("m")
    mode.move(None, "b")
    mode.release(None)
    mode.tick(AB, Poll(), 0.0)
    mode.forget("a")
    assert not mode.needs_poll
    assert mode.request_units("m", b"not looked at") == 1
    assert mode.inflight_work() is None


@pytest.mark.parametrize("mode", [RoundRobin(), LeastOutstanding()])
def test_nobody_serves_an_unknown_model(mode):
    assert mode.select("m", 1, (), ()) is None


# --- least_outstanding --------------------------------------------------------------------------------------------


def test_requests_go_to_whoever_has_fewer():
    mode = LeastOutstanding("requests")
    first, second, third = (mode.select("m", 1, AB, ()) for _ in range(3))
    assert [choice.urls[0] for choice in (first, second, third)] == ["a", "b", "a"]
    mode.release(first.reservation)
    mode.release(third.reservation)
    assert mode.select("m", 1, AB, ()).urls == ("a", "b")


def test_items_weigh_as_many_as_they_are():
    mode = taught("items", m=1.0)
    assert mode.select("m", mode.request_units("m", body(32)), AB, ()).urls[0] == "a"
    assert [mode.select("m", mode.request_units("m", body(1)), AB, ()).urls[0] for _ in range(2)] == ["b", "b"]
    assert mode.inflight_work() == ("items", {"a": 32.0, "b": 2.0})


def test_compute_weighs_items_by_what_they_cost():
    mode = taught("compute", dear=1.0, cheap=0.01)
    assert mode.select("dear", mode.request_units("dear", body(8)), AB, ()).urls[0] == "a"
    assert [mode.select("cheap", mode.request_units("cheap", body(32)), AB, ()).urls[0] for _ in range(4)] == ["b"] * 4
    basis, loads = mode.inflight_work()
    assert basis == "compute"
    assert loads == {"a": 8.0, "b": pytest.approx(4 * 0.32)}


def test_one_dear_request_weighs_more_than_many_cheap_ones():
    mode = taught("compute", dear=1.0, cheap=0.01)
    mode.select("dear", 8, AB, ())
    mode.select("cheap", 32, AB, ())
    assert mode.inflight_work()[1] == {"a": 8.0, "b": pytest.approx(0.32)}


def test_requests_need_no_poll_and_no_look_into_the_body():
    mode = LeastOutstanding("requests")
    mode.tick(AB, costs(m=5.0), 0.0)
    assert not mode.needs_poll
    assert mode.request_units("m", b"not looked at") == 1
    mode.select("m", 1, AB, ())
    assert mode.inflight_work() == ("requests", {"a": 1.0})
    assert LeastOutstanding("items").needs_poll
    assert LeastOutstanding("compute").needs_poll


def test_an_unknown_basis_is_refused():
    with pytest.raises(ConfigError, match="work_basis is 'rows'"):
        LeastOutstanding("rows")


def test_the_chosen_worker_comes_first_and_the_others_in_picked_order():
    mode = LeastOutstanding("requests")
    mode.select("m", 1, ("c", "b", "a"), ())
    assert mode.select("m", 1, ("c", "a", "b"), ()).urls == ("b", "c", "a")


def test_a_worker_to_avoid_comes_last_and_is_chosen_only_when_all_are():
    mode = LeastOutstanding("requests")
    assert mode.select("m", 1, ("a", "b", "c"), {"a"}).urls == ("b", "c", "a")
    assert mode.select("m", 1, AB, {"a", "b"}).urls[0] == "a"


def test_failover_moves_the_charge():
    mode = LeastOutstanding("requests")
    choice = mode.select("m", 1, AB, ())
    mode.move(choice.reservation, "b")
    assert mode.inflight_work() == ("requests", {"a": 0.0, "b": 1.0})
    assert mode.select("m", 1, AB, ()).urls[0] == "a"
    mode.release(choice.reservation)
    mode.release(choice.reservation)
    mode.move(choice.reservation, "b")
    assert mode.inflight_work() == ("requests", {"a": 1.0, "b": 0.0})


def test_a_charge_stays_what_it_was_when_costs_change():
    mode = taught("compute", m=1.0)
    choice = mode.select("m", 3, AB, ())
    mode.tick(AB, Poll({"a": WorkerReport("a", {"m": ModelReport(1000.0, 200, 200)})}), 1.0)
    mode.release(choice.reservation)
    assert mode.inflight_work() == ("compute", {"a": 0.0})


def test_counters_of_a_worker_that_left_are_dropped():
    mode = LeastOutstanding("requests")
    choice = mode.select("m", 1, AB, ())
    assert mode.inflight_work() == ("requests", {"a": 1.0})
    mode.forget("a")
    assert mode.inflight_work() is None
    mode.select("m", 1, AB, ())
    mode.release(choice.reservation)
    assert mode.inflight_work() == ("requests", {"a": 1.0}), "what began before belongs to the worker that left"


def test_a_request_that_still_went_to_a_worker_that_left_leaves_no_counter_for_good():
    mode = LeastOutstanding("requests")
    mode.forget("a")
    choice = mode.select("m", 1, ("a",), ())
    mode.tick(("b",), Poll(), 0.0)
    assert mode.inflight_work() == ("requests", {"a": 1.0})
    mode.release(choice.reservation)
    mode.tick(("b",), Poll(), 0.0)
    assert mode.inflight_work() is None


def test_there_is_no_gauge_before_first_use():
    assert LeastOutstanding().inflight_work() is None


@settings(deadline=None)
@given(
    st.sampled_from(["compute", "items", "requests"]),
    st.lists(st.tuples(st.sampled_from("smr"), st.integers(0, 7), st.integers(1, 1000)), max_size=40),
)
def test_loads_return_to_exactly_zero_after_any_interleaving(basis, steps):
    """s: select; m: move one in flight; r: release one in flight."""
    mode = taught(basis, m=0.00326, n=0.1) if basis != "requests" else LeastOutstanding(basis)
    inflight = []
    for what, which, units in steps:
        if what == "s":
            inflight.append(mode.select("mn"[which % 2], units, ("a", "b", "c"), ()).reservation)
        elif inflight and what == "m":
            mode.move(inflight[which % len(inflight)], "abc"[which % 3])
        elif inflight:
            mode.release(inflight.pop(which % len(inflight)))
    for reservation in inflight:
        mode.release(reservation)
    loads = mode.inflight_work()
    assert loads is None or set(loads[1].values()) == {0.0}
