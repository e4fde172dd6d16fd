"""Load counters: equal loads compare as equal, and what was charged is given back exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.core.errors import ConfigError
from rsrv.gateway.scheduling.load import Load, Loads, work


def load_of(charge):
    load = Load()
    load.add(charge)
    return load


def test_loads_are_compared_in_whole_billionths():
    assert load_of(4.44e-16).key == Load().key == 0
    assert load_of(0.5).key == 500_000_000
    assert load_of(0.5).key < load_of(0.5 + 1e-6).key


def test_a_request_is_charged_by_the_basis():
    costs = {"item_cost": 0.5, "request_cost": 7.0}
    assert work("compute", 4, **costs) == 2.0
    assert work("items", 4, **costs) == 4.0
    assert work("requests", 4, **costs) == 7.0
    with pytest.raises(ConfigError, match="work_basis is 'rows'; wanted one of compute, items, requests"):
        work("rows", 4, **costs)


def test_charges_that_mean_the_same_tie():
    one, other = Load(), load_of(0.3)
    for _ in range(3):
        one.add(0.1)
    assert 0.1 + 0.1 + 0.1 != 0.3
    assert one.key == other.key == 300_000_000
    assert one.value == pytest.approx(0.3)


def test_a_huge_request_does_not_swallow_the_small_ones_beside_it():
    load = Load()
    load.add(0.01)
    load.add(2.0**63)
    load.add(1e300)
    load.subtract(2.0**63)
    load.subtract(1e300)
    assert load.value == 0.01
    load.subtract(0.01)
    assert load.value == 0


def test_every_unit_has_its_own_counters():
    loads = Loads()
    loads.of("seconds", "a").add(0.5)
    loads.of("items", "a").add(32)
    assert loads.snapshot("seconds") == {"a": 0.5}
    assert loads.snapshot("items") == {"a": 32.0}
    assert loads.snapshot("requests") == {}
    assert loads.key("seconds", "a") == 500_000_000
    assert loads.key("seconds", "b") == loads.key("requests", "a") == 0


def test_reading_makes_no_counter():
    loads = Loads()
    loads.key("seconds", "a")
    assert loads.snapshot("seconds") == {}


def test_a_worker_that_comes_back_under_its_old_name_starts_at_zero():
    loads = Loads()
    before = loads.of("seconds", "a")
    before.add(1.0)
    loads.drop("a")
    loads.drop("never seen")
    after = loads.of("seconds", "a")
    before.subtract(1.0)
    assert after.value == 0
    assert loads.snapshot("seconds") == {"a": 0.0}


def test_idle_counters_of_other_workers_are_dropped():
    loads = Loads()
    for url in "abc":
        loads.of("seconds", url).add(1.0)
    loads.of("seconds", "b").subtract(1.0)
    loads.of("seconds", "c").subtract(1.0)
    loads.retain({"c"})
    assert loads.snapshot("seconds") == {"a": 1.0, "c": 0.0}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e12), max_size=40), st.randoms(use_true_random=False))
def test_a_counter_returns_to_exactly_zero_in_any_order(charges, random):
    load = Load()
    for charge in charges:
        load.add(charge)
    assert load.value == pytest.approx(sum(charges), rel=1e-12, abs=1e-9)
    random.shuffle(charges)
    for charge in charges:
        load.subtract(charge)
    assert load.value == 0
    assert load.key == 0
