"""The placement: every worked example, and what holds for all of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.gateway.scheduling.names import ALL
from rsrv.gateway.scheduling.placement import PlacementResult, place

W2 = ("w0", "w1")
W3 = ("w0", "w1", "w2")


def on(**homes):
    """A placement: model → one worker or several, equal shares."""
    urls = {model: (home,) if isinstance(home, str) else home for model, home in homes.items()}
    return {model: tuple((url, 1 / len(found)) for url in found) for model, found in urls.items()}


def packed(u, workers=W2, previous=None, mem=None, budget=0, **options):
    options = {"hysteresis": 0.1, "forbid": False} | options
    return place(u, workers, previous or {}, mem or {}, dict.fromkeys(workers, budget), **options)


def homes(result):
    return {model: ",".join(url for url, _ in shares) for model, shares in result.assignment.items()}


# --- the worked examples, by their numbers (spec gateway-node 2.6.6) -----------------------------------------------


def test_01_the_last_model_goes_to_the_emptier_worker():
    assert homes(packed({"a": 0.5, "b": 0.4, "c": 0.1})) == {"a": "w0", "b": "w1", "c": "w1"}


def test_02_compute_decides_without_memory():
    assert homes(packed({"a": 0.6, "b": 0.5, "c": 0.1})) == {"a": "w0", "b": "w1", "c": "w1"}


def test_03_memory_decides_where_it_presses_more():
    result = packed({"a": 0.6, "b": 0.5, "c": 0.1}, mem={"a": 1, "b": 9, "c": 9}, budget=10)
    assert homes(result) == {"a": "w0", "b": "w1", "c": "w0"}


@pytest.mark.parametrize("budget", [0, 1000])
def test_04_memory_without_a_budget_or_with_a_large_one_changes_nothing(budget):
    result = packed({"a": 0.6, "b": 0.5, "c": 0.1}, mem={"a": 1, "b": 9, "c": 9}, budget=budget)
    assert homes(result) == {"a": "w0", "b": "w1", "c": "w1"}


def test_05_cold_models_are_packed_by_memory():
    result = packed({"c1": 0.0, "c2": 0.0}, mem={"c1": 6, "c2": 6}, budget=10)
    assert homes(result) == {"c1": "w0", "c2": "w1"}


def test_06_a_tie_keeps_the_home():
    result = packed({"a": 0.5}, previous=on(a="w1"))
    assert result == PlacementResult(on(a="w1"), 1, 0.0)


def test_07_hysteresis_does_not_hold_what_is_much_worse():
    result = packed({"hot": 0.7, "a": 0.3}, previous=on(hot="w1", a="w1"))
    assert homes(result) == {"hot": "w1", "a": "w0"}
    assert result.best_improvement == pytest.approx(1 / 0.3 - 1) == pytest.approx(2.33, abs=0.01)
    assert result.held == 1


def test_08_a_home_that_is_gone_is_ignored():
    result = packed({"a": 0.5}, previous=on(a="w9"))
    assert homes(result) == {"a": "w0"}
    assert result.best_improvement == 0


NINE = {
    "u": {"cpu1": 1.0, "occ0": 0.0, "m": 0.0},
    "mem": {"cpu1": 1, "occ0": 7, "m": 3.5},
    "previous": on(cpu1="w1", occ0="w0", m="w0"),
    "budget": 10,
}


def test_09_hysteresis_may_hold_a_model_where_it_does_not_fit():
    assert homes(packed(**NINE)) == {"cpu1": "w1", "occ0": "w0", "m": "w0"}


def test_10_unless_oversubscription_is_forbidden():
    assert homes(packed(**NINE, forbid=True)) == {"cpu1": "w1", "occ0": "w0", "m": "w1"}


def test_11_a_model_that_fits_nowhere_is_placed_all_the_same():
    assert homes(packed({"x": 0.0}, mem={"x": 20}, budget=10, forbid=True)) == {"x": "w0"}


def test_12_load_adds_no_replicas():
    assert homes(packed({"hot": 1.5}, W3)) == {"hot": "w0"}


def test_13_replicas_share_evenly_and_are_held_to_the_number_of_workers():
    assert packed({"m": 0.9}, W3, replicas={"m": 2}).assignment == {"m": (("w0", 0.5), ("w1", 0.5))}
    assert packed({"m": 0.9}, W3, replicas={"m": 9}).assignment == on(m=W3)
    assert homes(packed({"m": 0.9}, W3, default_replicas=2)) == {"m": "w0,w1"}
    assert homes(packed({"m": 0.9, "n": 0.0}, W3, default_replicas=ALL)) == {"m": "w0,w1,w2", "n": "w0,w1,w2"}


# --- more of the rules --------------------------------------------------------------------------------------------


def test_a_number_of_its_own_goes_before_the_default():
    result = packed({"one": 0.1, "all": 0.1, "rest": 0.1}, W3, default_replicas=2, replicas={"one": 1, "all": ALL})
    assert {model: len(shares) for model, shares in result.assignment.items()} == {"one": 1, "all": 3, "rest": 2}
    assert len(packed({"m": 0.1}, W3, default_replicas=2, replicas={"m": 0}).assignment["m"]) == 2


def test_without_workers_nothing_is_placed():
    assert place({"a": 1.0}, (), on(a="w0"), {}, {}) == PlacementResult({})


def test_replicas_stay_where_they_were_when_that_is_as_good():
    assert homes(packed({"m": 0.9}, W3, previous=on(m=("w1", "w2")), replicas={"m": 2})) == {"m": "w1,w2"}


def test_each_replica_takes_its_share_of_compute_and_the_whole_of_memory():
    result = packed({"m": 0.8, "n": 0.5}, W3, mem={"m": 4, "n": 5}, budget=10, replicas={"m": 2})
    assert homes(result) == {"m": "w0,w1", "n": "w2"}
    # 0.4 on w0 and w1 each, so that the fourth model is better off there than beside n.
    assert homes(packed({"m": 0.8, "n": 0.5, "o": 0.01}, W3, replicas={"m": 2}))["o"] == "w0"


def test_replicas_avoid_workers_on_which_they_do_not_fit():
    cap = {"w0": 3, "w1": 10, "w2": 10}
    for forbid, wanted in ((True, "w1,w2"), (False, "w0,w1")):
        result = place({"m": 0.9}, W3, {}, {"m": 4}, cap, replicas={"m": 2}, forbid=forbid, charged={"w2": (5.0, 0)})
        assert homes(result)["m"] == wanted


def test_a_home_is_left_when_it_does_not_fit_and_that_is_forbidden():
    result = packed({"a": 0.5, "b": 0.1}, mem={"a": 8, "b": 4}, budget=10, previous=on(a="w0", b="w0"), forbid=True)
    assert homes(result) == {"a": "w0", "b": "w1"}


def test_without_hysteresis_only_a_tie_keeps_the_home():
    assert homes(packed({"a": 0.5, "b": 0.4}, previous=on(a="w1", b="w1"), hysteresis=0.0)) == {"a": "w1", "b": "w0"}


def test_a_model_that_had_several_homes_is_not_held():
    assert homes(packed({"a": 0.5}, previous=on(a=W2), hysteresis=0.9)) == {"a": "w0"}


def test_what_drifted_models_take_counts_before_anything_is_placed():
    assert homes(packed({"a": 0.5}, charged={"w0": (0.1, 0)})) == {"a": "w1"}
    result = packed({"a": 0.0}, mem={"a": 5}, budget=10, charged={"w0": (0.0, 6), "gone": (9.0, 9)}, forbid=True)
    assert homes(result) == {"a": "w1"}


def test_garbage_from_a_worker_does_no_harm():
    assert homes(place({"a": -1.0}, W2, {}, {"a": -5}, {"w0": -1, "w1": 0})) == {"a": "w0"}


# --- memory first, where the greedy pass is too short-sighted -------------------------------------------------------


def bytes_on(result, mem):
    found = {}
    for model, shares in result.assignment.items():
        for url, _ in shares:
            found[url] = found.get(url, 0) + mem[model]
    return found


# By load the small ones come first and spread, and the large one finds no room.
SHORT_SIGHTED = {"a": 0.9, "b": 0.8, "big": 0.1}
SIZES = {"a": 3, "b": 3, "big": 9}


def test_a_packing_that_exists_is_found():
    result = packed(SHORT_SIGHTED, mem=SIZES, budget=10, forbid=True)
    assert bytes_on(result, SIZES) == {"w0": 9, "w1": 6} or bytes_on(result, SIZES) == {"w0": 6, "w1": 9}


def test_a_greedy_packing_stays_when_oversubscription_is_allowed():
    assert homes(packed(SHORT_SIGHTED, mem=SIZES, budget=10)) == {"a": "w0", "b": "w1", "big": "w0"}


def test_first_fit_is_the_last_resort():
    """Least pressure spreads the four and has no room for the pair that must share a worker with nothing else."""
    mem = {"p": 6, "q": 5, "r": 5, "s": 4}
    result = packed({"p": 0.1, "q": 0.2, "r": 0.3, "s": 0.4}, mem=mem, budget=10, forbid=True)
    assert bytes_on(result, mem) == {"w0": 10, "w1": 10}


def test_the_search_evens_out_what_first_fit_piles_up():
    """Only {7, 3} and {6, 4} fit; which small ones go together is free, and the two busy ones must not."""
    u = {"x7": 0.0, "y6": 0.0, "z4": 0.0, "t3": 0.0} | {"hot1": 0.9, "hot2": 0.9}
    mem = {"x7": 70, "y6": 60, "z4": 39, "t3": 29, "hot1": 1, "hot2": 1}
    result = packed(u, mem=mem, budget=100, forbid=True)
    assert max(bytes_on(result, mem).values()) <= 100
    assert homes(result)["hot1"] != homes(result)["hot2"]


def test_a_tight_placement_is_kept_from_repack_to_repack():
    mem = {"p": 6, "q": 5, "r": 5, "s": 4}
    u = {"p": 0.1, "q": 0.2, "r": 0.3, "s": 0.4}
    first = packed(u, mem=mem, budget=10, forbid=True)
    again = packed({"p": 0.11, "q": 0.19, "r": 0.31, "s": 0.4}, mem=mem, budget=10, forbid=True, previous=first[0])
    assert again.assignment == first.assignment


def test_the_search_ends_on_a_large_fleet():
    workers = [f"w{i}" for i in range(8)]
    u = {f"m{i}": (i % 7) / 10 for i in range(300)}
    mem = {model: 1 + index % 13 for index, model in enumerate(u)}
    budget = sum(mem.values()) // 8 + 1
    result = packed(u, workers, mem=mem, budget=budget, forbid=True)
    assert len(result.assignment) == 300
    assert max(bytes_on(result, mem).values()) <= budget


# --- what always holds --------------------------------------------------------------------------------------------


@st.composite
def fleets(draw):
    workers = [f"w{index}" for index in range(draw(st.integers(1, 5)))]
    models = [f"m{index}" for index in range(draw(st.integers(0, 9)))]
    urls = st.lists(st.sampled_from([*workers, "gone"]), min_size=1, max_size=3, unique=True)
    return {
        "u": {model: draw(st.sampled_from([0.0, 0.1, 0.25, 0.7]) | st.floats(0, 2)) for model in models},
        "workers": workers,
        "previous": on(**{model: tuple(sorted(draw(urls))) for model in models if draw(st.booleans())}),
        "mem": {model: draw(st.integers(0, 10)) for model in models},
        "cap": {url: draw(st.sampled_from([0, 10, 20])) for url in workers},
        "replicas": {model: draw(st.sampled_from([ALL, 1, 2, 9])) for model in models if draw(st.booleans())},
        "default_replicas": draw(st.sampled_from([1, 1, 2, ALL])),
        "hysteresis": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "forbid": draw(st.booleans()),
    }


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_shares_sum_to_one_over_distinct_workers_and_the_same_input_gives_the_same_placement(fleet):
    result = place(**fleet)
    count = len(fleet["workers"])
    assert result.assignment.keys() == fleet["u"].keys()
    for model, shares in result.assignment.items():
        urls = [url for url, _ in shares]
        wanted = fleet["replicas"].get(model, fleet["default_replicas"])
        assert urls == sorted(set(urls))
        assert set(urls) <= set(fleet["workers"])
        assert len(urls) == (count if wanted == ALL else min(wanted, count))
        assert sum(share for _, share in shares) == pytest.approx(1)
    shuffled = {
        key: dict(reversed(value.items())) if isinstance(value, dict) else value for key, value in fleet.items()
    }
    assert place(**(shuffled | {"workers": fleet["workers"][::-1]})) == result


def first_fit_decreasing(mem, cap, charged):
    """Whether every model finds room, largest first, each on the first worker where it fits."""
    used = dict.fromkeys(cap, 0) | charged
    for size in sorted(mem.values(), reverse=True):
        url = next((url for url in sorted(cap) if not cap[url] or used[url] + size <= cap[url]), None)
        if url is None:
            return False
        used[url] += size
    return True


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdefghij"), st.tuples(st.floats(0, 1), st.integers(1, 10)), max_size=10),
    st.dictionaries(st.sampled_from(["w0", "w1", "w2", "w3"]), st.integers(8, 16), min_size=1),
    st.dictionaries(st.sampled_from("abcdefghij"), st.sampled_from(["w0", "w1", "w2", "w3"])),
    st.sampled_from([0.0, 0.3]),
    st.dictionaries(st.sampled_from(["w0", "w1"]), st.integers(0, 8)),
)
def test_nothing_is_oversubscribed_where_first_fit_decreasing_finds_a_way(models, cap, before, hysteresis, taken):
    mem = {model: size for model, (_, size) in models.items()}
    taken = {url: size for url, size in taken.items() if url in cap}
    result = place(
        {model: load for model, (load, _) in models.items()},
        cap,
        on(**before),
        mem,
        cap,
        hysteresis=hysteresis,
        charged={url: (0.0, size) for url, size in taken.items()},
    )
    if first_fit_decreasing(mem, cap, taken):
        for url, size in bytes_on(result, mem).items():
            assert size + taken.get(url, 0) <= cap[url]


def test_models_of_which_nothing_is_known_are_shared_out_by_their_number() -> None:
    found = place(dict.fromkeys("abcdefg", 0.0), ("w0", "w1", "w2"), {}, {}, {}).assignment
    homes = [urls[0][0] for urls in found.values()]
    assert sorted(homes.count(url) for url in ("w0", "w1", "w2")) == [2, 2, 3]
    assert place(dict.fromkeys("abcdefg", 0.0), ("w0", "w1", "w2"), found, {}, {}).assignment == found
