"""Routing within a placement: every worked example, and counters that always return to zero."""

import itertools
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.gateway.scheduling.costs import Costs
from rsrv.gateway.scheduling.fill import FillPlan, quantum
from rsrv.gateway.scheduling.load import work
from rsrv.gateway.scheduling.replicas import ReplicaRouting

BASES = ("compute", "items", "requests")


class Fleet:
    """A routing, and the way in which the mode uses it: one plan for all models, charges by basis and costs."""

    def __init__(self, mode="run", *, q=8, policy="fill_least", basis="compute", costs=None, **placement):
        self.routing = ReplicaRouting()
        self.mode, self.quantum, self.policy, self.basis = mode, q, policy, basis
        self.costs = costs or Costs()
        self.install(**(placement or {"m": 2}))

    def install(self, **placement):
        """model → how many of w0, w1, …, or which."""
        urls = {m: [f"w{i}" for i in range(on)] if isinstance(on, int) else list(on) for m, on in placement.items()}
        self.routing.install({m: tuple((url, 1 / len(found)) for url in found) for m, found in urls.items()})

    def choose(self, units=1, model="m", **options):
        charge = work(
            self.basis, units, item_cost=self.costs.item_cost(model), request_cost=self.costs.request_cost(model)
        )
        plan = FillPlan(self.mode, self.quantum)
        return self.routing.route(
            model, units, plan=plan, policy=self.policy, basis=self.basis, charge=charge, **options
        )

    def send(self, units=1, model="m", **options):
        """(worker, reservation) of a request that stays in flight."""
        choice = self.choose(units, model, **options)
        return choice.urls[0], choice.reservation

    def urls(self, *units):
        return [self.send(each)[0] for each in units]

    @property
    def outstanding(self):
        return [replica.outstanding for replica in self.routing.replicas("m")]

    @property
    def loads(self):
        return self.routing.loads(self.basis)

    def closed_loop(self, inflight, requests=400):
        """Worker → requests that it got while `inflight` were always under way; and the mean of replicas busy."""
        under_way, got, busy = deque(), Counter(), 0
        for _ in range(requests):
            if len(under_way) == inflight:
                self.routing.release(under_way.popleft())
            url, reservation = self.send()
            under_way.append(reservation)
            got[url] += 1
            busy += sum(count > 0 for count in self.outstanding)
        for reservation in under_way:
            self.routing.release(reservation)
        return got, busy / requests


# --- the worked examples, by their numbers (spec gateway-node 2.6.8) -----------------------------------------------


def test_01_a_run_fills_one_replica_and_then_the_other():
    fleet = Fleet()
    assert fleet.urls(*[1] * 8) == ["w0"] * 8
    assert fleet.choose().urls == ("w1", "w0")


def test_02_the_factor_makes_the_run_longer():
    fleet = Fleet(q=quantum(1.5, 8))
    assert fleet.urls(*[1] * 13) == ["w0"] * 12 + ["w1"]


def test_03_one_after_the_other_takes_turns():
    fleet, got = Fleet(policy="fill_rr"), []
    for _ in range(4):
        url, reservation = fleet.send()
        fleet.routing.release(reservation)
        got.append(url)
    assert got == ["w0", "w1", "w0", "w1"]


def test_04_an_unknown_batch_size_means_strict_rotation():
    fleet = Fleet(q=quantum(1, 0), policy="fill_rr")
    assert fleet.urls(1, 1, 1, 1) == ["w0", "w1", "w0", "w1"]


def test_05_a_request_as_large_as_a_batch_is_a_run_of_its_own():
    fleet = Fleet(q=32)
    assert fleet.urls(32, 32) == ["w0", "w1"]
    assert fleet.outstanding == [32, 32]


def test_06_a_run_ends_when_its_items_fill_a_batch():
    assert Fleet(q=32).urls(16, 8, 8, 1) == ["w0", "w0", "w0", "w1"]


def test_07_a_replica_that_is_a_quantum_ahead_waits():
    fleet = Fleet()
    first = [fleet.send() for _ in range(8)]
    second = [fleet.send() for _ in range(8)]
    assert [url for url, _ in first + second] == ["w0"] * 8 + ["w1"] * 8
    for _, reservation in second:
        fleet.routing.release(reservation)
    assert fleet.send()[0] == "w1"


def test_08_spread_goes_to_whoever_has_fewer_items():
    fleet = Fleet("spread", q=32)
    assert fleet.urls(32, 1, 1) == ["w0", "w1", "w1"]
    assert fleet.outstanding == [32, 2]


def test_09_a_run_shares_evenly_with_two_in_flight():
    assert Fleet().closed_loop(2)[0] == {"w0": 200, "w1": 200}


def test_10_inflight_pins_with_two_in_flight():
    assert Fleet("inflight").closed_loop(2)[0] == {"w0": 400}


def test_11_spread_keeps_both_replicas_busy_and_a_run_one():
    assert Fleet("spread").closed_loop(4)[1] == 1.9975
    assert Fleet("run").closed_loop(4)[1] == 1.3675


def test_12_inflight_pins_with_four_in_flight_and_a_large_batch():
    assert Fleet("inflight", q=32).closed_loop(4)[0] == {"w0": 400}


@pytest.mark.parametrize("mode", ["run", "spread"])
@pytest.mark.parametrize("policy", ["fill_least", "fill_rr"])
def test_13_shares_are_even_to_within_a_quantum_whatever_is_in_flight(mode, policy):
    cases = list(itertools.product((2, 3, 4), (1, 2, 4, 7, 8, 9, 16, 24)))
    assert len(cases) * 4 == 96
    for count, inflight in cases:
        got, _ = Fleet(mode, policy=policy, m=count).closed_loop(inflight)
        assert len(got) == count, (count, inflight)
        for url, requests in got.items():
            assert abs(requests - 400 / count) <= 8, (count, inflight, url)


def test_14_bursts_fill_four_replicas_alike_and_leave_nothing_behind():
    fleet = Fleet(q=32, costs=Costs(per_item={"m": 0.00326}), m=4)
    got = Counter()
    for _ in range(16):
        burst = [fleet.send(31) for _ in range(8)]
        got.update(url for url, _ in burst)
        for _, reservation in burst:
            fleet.routing.release(reservation)
        assert fleet.loads == dict.fromkeys(fleet.loads, 0.0)
        assert fleet.outstanding == [0] * 4
    assert got == dict.fromkeys(("w0", "w1", "w2", "w3"), 32)


def test_15_by_requests_a_model_opens_where_the_dear_request_is_not():
    costs = Costs(per_request={"hot": 10.0, "m": 1.0})
    fleet = Fleet(q=32, basis="requests", costs=costs, hot=["w0"], m=["w0", "w1"])
    assert fleet.send(model="hot")[0] == "w0"
    assert fleet.loads == {"w0": 10.0}
    assert fleet.send()[0] == "w1"
    assert fleet.loads == {"w0": 10.0, "w1": 1.0}
    assert fleet.send(32)[0] == "w1"
    assert fleet.loads == {"w0": 10.0, "w1": 2.0}


@pytest.mark.parametrize(("basis", "loads"), [("compute", (8.0, 0.32)), ("items", (8.0, 32.0))])
def test_16_by_compute_and_by_items_a_request_weighs_its_items(basis, loads):
    fleet = Fleet(q=32, basis=basis, costs=Costs(per_item={"dear": 1.0, "m": 0.01}), dear=["w0"], m=["w0", "w1"])
    assert fleet.send(8, "dear")[0] == "w0"
    assert fleet.send(32)[0] == "w1"
    assert fleet.loads == {"w0": loads[0], "w1": pytest.approx(loads[1])}


def test_17_a_cold_model_weighs_the_mean_of_the_fleet():
    fleet = Fleet(costs=Costs(mean_item=2.0), m=1)
    fleet.send(3)
    assert fleet.loads == {"w0": 6.0}


def test_18_the_basis_may_change_while_requests_are_in_flight():
    fleet = Fleet(costs=Costs(per_item={"m": 0.5}, per_request={"m": 4.0}), m=1)
    _, first = fleet.send(6)
    assert fleet.loads == {"w0": 3.0}
    fleet.basis = "requests"
    _, second = fleet.send()
    assert fleet.loads == {"w0": 7.0}, "both bases measure device seconds"
    fleet.basis = "items"
    _, third = fleet.send(5)
    assert fleet.loads == {"w0": 5.0}, "items are never added to device seconds"
    for reservation in (first, second, third):
        fleet.routing.release(reservation)
    for basis in BASES:
        assert fleet.routing.loads(basis) == {"w0": 0.0}


def test_19_a_repack_in_the_middle_of_a_run_uses_the_new_replicas_only():
    fleet = Fleet(m=["w0", "w1"])
    assert set(fleet.urls(*[1] * 12)) == {"w0", "w1"}
    fleet.install(m=["w1", "w2"])
    assert set(fleet.urls(*[1] * 32)) == {"w1", "w2"}


# --- more of the rules --------------------------------------------------------------------------------------------


def test_a_model_without_a_place_has_no_choice():
    assert Fleet().choose(model="other", picked=("w0",)) is None


def test_one_replica_is_charged_and_counted():
    fleet = Fleet(costs=Costs(per_item={"m": 0.5}), m=1)
    assert fleet.urls(3, 2) == ["w0", "w0"]
    (replica,) = fleet.routing.replicas("m")
    assert (replica.url, replica.outstanding, replica.routed) == ("w0", 5, 2)
    assert fleet.loads == {"w0": 2.5}


def test_failover_goes_to_the_emptiest_first_and_to_unplaced_replicas_last():
    fleet = Fleet("spread", q=8, m=4)
    fleet.urls(9, 20, 3)
    assert fleet.outstanding == [9, 20, 3, 0]
    assert fleet.choose(picked=("x", "w1", "y")).urls == ("w3", "w2", "w0", "w1", "x", "y")


def test_ties_go_to_the_worker_with_the_least_work_and_then_in_turn():
    fleet = Fleet(other=["w0"], m=["w0", "w1", "w2"])
    fleet.send(5, "other")
    assert fleet.send()[0] == "w1"
    turns = Fleet(policy="fill_rr", other=["w0"], m=["w0", "w1", "w2"])
    turns.send(5, "other")
    assert turns.send()[0] == "w0"


def test_inflight_moves_on_when_a_quantum_is_full_and_the_turn_passes_only_at_a_tie():
    fleet = Fleet("inflight", q=2, policy="fill_rr")
    assert fleet.urls(*[1] * 8) == ["w0", "w0", "w1", "w1", "w1", "w1", "w0", "w0"]


def test_a_choice_counts_as_the_run_when_the_mode_changes():
    fleet = Fleet("spread")
    assert fleet.urls(1, 1, 1) == ["w0", "w1", "w0"]
    fleet.mode = "run"
    assert fleet.urls(*[1] * 3) == ["w0"] * 3


def test_a_run_stays_with_its_target_while_requests_come_and_go():
    fleet = Fleet()
    _, first = fleet.send()
    for _ in range(6):
        url, second = fleet.send()
        assert url == "w0"
        fleet.routing.release(first)
        first = second


# --- replicas to avoid --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["run", "spread", "inflight"])
def test_a_replica_to_avoid_is_left_out_and_comes_at_the_very_end(mode):
    fleet = Fleet(mode, m=3)
    for _ in range(30):
        choice = fleet.choose(avoid={"w1"}, picked=("x", "w0"))
        assert choice.urls[0] in ("w0", "w2")
        assert choice.urls[-2:] == ("x", "w1")
    assert fleet.outstanding[1] == 0


def test_a_run_leaves_a_replica_that_goes_down():
    fleet = Fleet()
    assert fleet.urls(1, 1) == ["w0", "w0"]
    assert fleet.send(avoid={"w0"})[0] == "w1"
    assert fleet.send()[0] == "w1", "the run goes on where it is now"


def test_when_all_are_to_be_avoided_the_choice_is_as_if_none_were():
    fleet = Fleet()
    assert fleet.choose(avoid={"w0", "w1"}).urls == ("w0", "w1")
    assert fleet.choose(avoid={"w0", "w1", "x"}, picked=("x",)).urls == ("w0", "w1", "x")


def test_an_unplaced_replica_serves_while_all_placed_ones_are_down():
    fleet = Fleet(costs=Costs(per_item={"m": 0.5}), m=1)
    choice = fleet.choose(2, avoid={"w0"}, picked=("w0", "x", "y"))
    assert choice.urls == ("x", "y", "w0")
    assert fleet.outstanding == [0]
    assert fleet.loads == {"x": 1.0}
    fleet.routing.release(choice.reservation)
    assert fleet.loads == {"x": 0.0}


# --- failover, release, repack ------------------------------------------------------------------------------------


def test_failover_moves_items_and_charge():
    fleet = Fleet(costs=Costs(per_item={"m": 0.5}))
    _, reservation = fleet.send(4)
    fleet.routing.move(reservation, "w1")
    assert fleet.outstanding == [0, 4]
    assert fleet.loads == {"w0": 0.0, "w1": 2.0}
    assert [replica.routed for replica in fleet.routing.replicas("m")] == [1, 1]
    fleet.routing.move(reservation, "elsewhere")
    assert fleet.outstanding == [0, 0]
    assert fleet.loads == {"w0": 0.0, "w1": 0.0, "elsewhere": 2.0}
    fleet.routing.release(reservation)
    assert fleet.loads == {"w0": 0.0, "w1": 0.0, "elsewhere": 0.0}


def test_a_reservation_that_was_given_back_changes_nothing_more():
    fleet = Fleet()
    _, reservation = fleet.send(4)
    fleet.routing.release(reservation)
    fleet.routing.release(reservation)
    fleet.routing.move(reservation, "w1")
    fleet.routing.release(None)
    fleet.routing.move(None, "w1")
    assert fleet.outstanding == [0, 0]
    assert fleet.loads == {"w0": 0.0}


def test_a_repack_keeps_the_counters_of_what_stays():
    fleet = Fleet(m=["w0", "w1"], gone=["w0"])
    held = [fleet.send(8)[1], fleet.send(8)[1], fleet.send(model="gone")[1]]
    fleet.install(m=["w1", "w2"])
    assert fleet.outstanding == [8, 0]
    assert [replica.routed for replica in fleet.routing.replicas("m")] == [1, 0]
    assert fleet.routing.replicas("gone") == ()
    assert fleet.loads["w0"] > 0, "what is in flight on a worker without models is still in flight"
    for reservation in held:
        fleet.routing.release(reservation)
    assert fleet.outstanding == [0, 0]
    assert set(fleet.loads.values()) == {0.0}


def test_a_repack_closes_the_run_and_keeps_whose_turn_is_next():
    fleet = Fleet(policy="fill_rr", m=3)
    assert fleet.urls(1, 1) == ["w0", "w0"]
    fleet.install(m=3)
    assert fleet.send()[0] == "w1"


def test_a_worker_that_left_is_out_of_every_placement_at_once():
    fleet = Fleet(m=["w0", "w1", "w2"], only=["w1"], other=["w0"])
    _, first = fleet.send(8)
    _, second = fleet.send(3)
    assert fleet.outstanding == [8, 3, 0]
    fleet.routing.forget("w1")
    assert fleet.routing.assignment == {"m": (("w0", 0.5), ("w2", 0.5)), "other": (("w0", 1.0),)}
    assert fleet.choose(model="only") is None
    assert fleet.loads == {"w0": 8.0}
    fleet.routing.release(second)
    fleet.routing.release(first)
    assert fleet.loads == {"w0": 0.0}
    assert fleet.outstanding == [0, 0]


@settings(deadline=None)
@given(
    st.sampled_from(["run", "spread", "inflight"]),
    st.sampled_from(["fill_least", "fill_rr"]),
    st.integers(1, 33),
    st.lists(st.tuples(st.sampled_from("sssrrmbif"), st.integers(0, 11), st.integers(1, 40)), max_size=60),
)
def test_counters_return_to_exactly_zero_after_any_interleaving(mode, policy, q, steps):
    """s: a request; r: its end; m: failover; b: another basis; i: a repack; f: a worker leaves."""
    urls = ("w0", "w1", "w2", "w3")
    fleet = Fleet(mode, q=q, policy=policy, costs=Costs(per_item={"m": 0.00326, "n": 0.1}), m=3, n=2)
    inflight = []
    for what, which, units in steps:
        if what == "s":
            choice = fleet.choose(units, "mn"[which % 2], avoid=urls[: which % 4], picked=urls[which % 3 :])
            if choice is not None:
                assert sorted(set(choice.urls)) == sorted(choice.urls)
                inflight.append((choice.reservation, "mn"[which % 2]))
        elif what == "b":
            fleet.basis = BASES[which % 3]
        elif what == "i":
            fleet.install(m=urls[which % 3 :], n=urls[: 1 + which % 4])
        elif what == "f":
            fleet.routing.forget(urls[which % 4])
        elif inflight and what == "m":
            fleet.routing.move(inflight[which % len(inflight)][0], urls[units % 4])
        elif inflight:
            fleet.routing.release(inflight.pop(which % len(inflight))[0])
        assert all(replica.outstanding >= 0 for model in "mn" for replica in fleet.routing.replicas(model))
    for reservation, _ in inflight:
        fleet.routing.release(reservation)
    for model in "mn":
        assert all(replica.outstanding == 0 for replica in fleet.routing.replicas(model))
    for basis in BASES:
        assert set(fleet.routing.loads(basis).values()) <= {0.0}
