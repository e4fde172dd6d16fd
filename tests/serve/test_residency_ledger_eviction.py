"""What is evicted by cost, how often models are wanted, and how large a budget one would need."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.serve.residency import Floor, Ledger
from rsrv.serve.residency.entry import Entry
from rsrv.serve.residency.eviction import HALFLIFE_SECONDS, Rates, worth
from rsrv.serve.residency.ghosts import Ghosts
from rsrv.serve.residency.holdings import Footprint, Holdings, Trial

SECOND = 10**9


def never(name):
    return False


def ledger_of(sizes, arena, policy):
    ledger = Ledger(arena=arena, unified=True, policy=policy)
    for name, nbytes in sizes.items():
        ledger.add(name, nbytes, floor=Floor.UNPINNED)
    return ledger


def serve(ledger, names, seconds_of, *, every_ns=SECOND // 100):
    """Requests one after the other; what is cold is loaded first, in `seconds_of[name]`."""
    for index, name in enumerate(names):
        now_ns = index * every_ns
        if not ledger.is_resident(name):
            ledger.begin(name, ledger.plan_load(name, in_use=never, protected=never))
            ledger.commit(name, seconds_of[name], now_ns)
        ledger.touch(name, now_ns)
    return ledger.snapshot(len(names) * every_ns)


def zipf(models, requests, seed=1):
    weights = [1 / (rank + 1) for rank in range(models)]
    return random.Random(seed).choices([f"m{rank}" for rank in range(models)], weights, k=requests)


# --- cost -------------------------------------------------------------------------------------------------------------


def entry(**changes):
    return Entry(
        **{
            "name": "a",
            "footprint": Footprint(10),
            "floor": Floor.UNPINNED,
            "reserved": False,
            "scratch_bytes": 0,
            **changes,
        }
    )


def test_the_worth_of_a_byte_is_reload_time_times_rate_over_bytes():
    assert worth(entry(uses=8.0, reload_seconds=0.5), 100) == pytest.approx(0.04)
    assert worth(entry(uses=8.0), 100) == 0.0
    assert worth(entry(uses=8.0, reload_seconds=0.5), 0) == float("inf")


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ({"a": {"uses": 1}, "b": {"uses": 9}}, "a"),
        ({"a": {"seconds": 2.0}, "b": {"seconds": 0.1}}, "b"),
        ({"a": {"nbytes": 90}, "b": {"nbytes": 60}}, "a"),
        ({"a": {}, "b": {}}, "a"),
    ],
)
def test_by_cost_goes_first_what_is_rare_or_quick_to_have_again_or_large_or_else_the_oldest(kind, first):
    what = {name: {"uses": 3, "seconds": 1.0, "nbytes": 60, **kind[name]} for name in kind}
    ledger = ledger_of({"new": 60, **{name: each["nbytes"] for name, each in what.items()}}, 160, "cost")
    for name, each in what.items():
        ledger.begin(name, ledger.plan_load(name, in_use=never, protected=never))
        ledger.commit(name, each["seconds"], 0)
        for _ in range(each["uses"]):
            ledger.touch(name, 0)
    assert ledger.plan_load("new", in_use=never, protected=never).victims == (first,)


def test_load_times_are_averaged():
    model = entry()
    model.loaded(1.0, 0)
    model.loaded(2.0, 0)
    assert (model.reload_seconds, model.loads) == (pytest.approx(1.3), 2)


def test_by_cost_fewer_seconds_are_spent_on_loads_than_by_lru():
    random_ = random.Random(5)
    sizes = {f"m{index}": random_.choice([5, 20, 100]) for index in range(100)}
    names = zipf(100, 6000)
    # A load has a fixed part, so that many small ones cost more than few large ones.
    seconds = {name: 0.002 + nbytes / 1e4 for name, nbytes in sizes.items()}
    spent = {policy: serve(ledger_of(sizes, 800, policy), names, seconds).load_seconds for policy in ("lru", "cost")}
    assert spent["cost"] < 0.8 * spent["lru"]


def test_the_hit_rate_of_lru_is_that_of_a_simulation():
    names, cache, hits = zipf(100, 5000), OrderedDict(), 0
    for name in names:
        hits += name in cache
        cache[name] = None
        cache.move_to_end(name)
        if len(cache) > 20:
            cache.popitem(last=False)
    sizes = dict.fromkeys(sorted(set(names)), 10)
    seen = serve(ledger_of(sizes, 200, "lru"), names, dict.fromkeys(sizes, 0.01))
    assert seen.uses - seen.loads == hits


# --- rates ------------------------------------------------------------------------------------------------------------


def test_a_steady_rate_is_what_the_decayed_count_says():
    rates, model = Rates(), entry()
    for index in range(20 * int(HALFLIFE_SECONDS)):
        rates.note(model, [model], index * SECOND // 2)
    now_ns = 10 * int(HALFLIFE_SECONDS) * SECOND
    assert model.uses * rates.per_second(now_ns) == pytest.approx(2.0, rel=0.01)
    later_ns = now_ns + int(HALFLIFE_SECONDS * SECOND)
    assert model.uses * rates.per_second(later_ns) == pytest.approx(1.0, rel=0.01)


def test_rates_compare_the_same_after_years():
    rates, often, rare = Rates(), entry(), entry()
    day_ns = 24 * 3600 * SECOND
    for day in range(400):
        for model, times in ((often, 3), (rare, 1)):
            for _ in range(times):
                rates.note(model, [often, rare], day * day_ns)
    assert often.uses == pytest.approx(3 * rare.uses)
    assert often.uses < 2.0**1000


def test_nothing_was_used_before_the_first_use():
    assert Rates().per_second(5) == 0.0


# --- ghosts -----------------------------------------------------------------------------------------------------------


class Distances(Ghosts):
    """Ghosts that tell every distance."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _count(self, distance, times):
        self.seen += [distance] * times
        super()._count(distance, times)


def test_a_reuse_distance_is_all_that_was_used_since():
    ghosts = Distances()
    for key in "abcbaa":
        ghosts.use(key, {"a": 1, "b": 10, "c": 100}[key])
    assert ghosts.seen == [110, 111, 1]


def test_uses_of_the_last_one_may_be_counted_later():
    ghosts = Distances()
    ghosts.use("a", 7)
    ghosts.repeats += 3
    ghosts.use("b", 1)
    ghosts.repeats += 1
    assert ghosts.bytes_for(1.0) == 7
    assert ghosts.seen == [7, 7, 7, 1]


def test_shared_bytes_count_once_and_leave_with_the_last_that_shares_them():
    ghosts = Distances()
    for key in "abc":
        ghosts.use(key, 1, "backbone", 100)
    ghosts.use("a", 1, "backbone", 100)
    assert ghosts.seen == [103]
    ghosts.use("other", 5)
    ghosts.use("a", 101)
    ghosts.forget("b")
    ghosts.use("other", 5)
    assert ghosts.seen[1:] == [106, 106]
    ghosts.forget("c")
    ghosts.forget("nobody")
    assert not ghosts._shared


def test_without_a_repeated_use_nothing_is_known():
    ghosts = Ghosts()
    assert ghosts.bytes_for(0.99) is None
    ghosts.use("a", 1)
    assert ghosts.bytes_for(0.99) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=300))
def test_distances_are_those_of_a_walk_over_the_list(uses):
    """The walk: private and shared bytes of all that was used since, in sets."""
    ghosts, expected, order = Distances(), [], []
    for index, forget in uses:
        if forget and index > 7:
            ghosts.forget(index)
            order = [each for each in order if each != index]
            continue
        if index in order:
            since = {*order[len(order) - 1 - order[::-1].index(index) :]}
            expected.append(sum(each + 1 for each in since) + 1000 * len({each % 2 for each in since if each < 4}))
        order.append(index)
        ghosts.use(index, index + 1, index % 2 if index < 4 else None, 1000 if index < 4 else 0)
    assert ghosts.seen == expected


def test_a_budget_of_that_size_has_99_percent_hits():
    names = zipf(200, 20_000, seed=3)
    ghosts = Ghosts()
    for name in names:
        ghosts.use(name, 10)
    nbytes = ghosts.bytes_for(0.99)
    assert nbytes < 10 * len(set(names))

    def missed(budget):
        cache, seen, missed, again = OrderedDict(), set(), 0, 0
        for name in names:
            again += name in seen
            missed += name in seen and name not in cache
            seen.add(name)
            cache[name] = None
            cache.move_to_end(name)
            if len(cache) > budget // 10:
                cache.popitem(last=False)
        return missed / again

    assert missed(nbytes) <= 0.01 < missed(0.9 * nbytes)


def test_the_curve_follows_the_traffic():
    ghosts = Ghosts()
    for index in range(60_000):
        ghosts.use(index % 50, 10)
    assert ghosts.bytes_for(0.5) == 500
    for index in range(300_000):
        if index % 10:
            ghosts.repeats += 1
        else:
            ghosts.use(index % 20, 10)
    assert ghosts.bytes_for(0.99) == 20


def test_the_ledger_reports_the_bytes_for_99_percent_of_the_hits():
    sizes = dict.fromkeys("abc", 100)
    ledger = ledger_of(sizes, 200, "lru")
    assert ledger.snapshot(0).bytes_for_99_percent_hits is None
    seen = serve(ledger, "abcabcabc", dict.fromkeys(sizes, 0.1))
    assert (seen.loads, seen.bytes_for_99_percent_hits) == (9, 300)
    ledger.remove("c")
    ledger.set_floor("b", Floor.DEVICE)
    for name in "ba" * 10_000:
        ledger.touch(name, SECOND)
    assert ledger.snapshot(SECOND).bytes_for_99_percent_hits == 100, "a pinned model needs nothing of the budget"


# --- holdings ---------------------------------------------------------------------------------------------------------


def test_what_a_model_frees_and_several_keep():
    holdings = Holdings()
    a, b = Footprint(30, {"x": 10, "y": 10}), Footprint(25, {"x": 10})
    holdings.hold(a, reserved=False)
    holdings.hold(b, reserved=False)
    assert holdings.on_demand == 45
    assert (holdings.freed(a), holdings.freed(b)) == (20, 15)
    assert (holdings.kept([a]), holdings.kept([a, b])) == (30, 45)
    pinned = Footprint(10, {"x": 10})
    holdings.hold(pinned, reserved=True)
    assert (holdings.reserved, holdings.on_demand, holdings.freed(b), holdings.kept([a])) == (10, 35, 15, 20)
    for footprint, reserved in ((a, False), (pinned, True), (b, False)):
        holdings.release(footprint, reserved=reserved)
    assert (holdings.reserved, holdings.on_demand, holdings.tensors) == (0, 0, {})


def test_a_trial_changes_nothing():
    holdings = Holdings()
    here, coming = Footprint(30, {"x": 10}), Footprint(40, {"x": 10})
    holdings.hold(here, reserved=False)
    trial = Trial(holdings, coming)
    assert (trial.on_demand, trial.missing()) == (60, 30)
    trial.without(here)
    assert (trial.on_demand, trial.missing()) == (40, 40)
    trial = Trial(holdings, coming, reserved=True)
    assert (trial.reserved, trial.on_demand, trial.missing()) == (40, 20, 30)
    assert (holdings.reserved, holdings.on_demand) == (0, 30)
