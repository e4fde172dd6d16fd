"""The books of residency: budget, LRU, pins, oversize, explicit mode, floors, compaction, on paper."""

import itertools

import pytest

from rsrv.core.errors import DeviceOutOfMemory, NotResident
from rsrv.serve.residency import Floor, Ledger, State, resolve_floor
from rsrv.serve.residency.floors import FloorChange


class Books:
    """A ledger, with loads that end at once, and a clock that goes on by a second with each of them."""

    def __init__(self, arena=1000, *, models=None, scratch=0, **options):
        self.ledger = Ledger(arena=arena, **{"wiggle": 0.1, "unified": True, **options})
        self.seconds = itertools.count(1)
        self.in_use, self.protected = set(), set()
        for name, nbytes in (models or {}).items():
            self.add(name, nbytes, scratch=scratch)

    def add(self, name, nbytes, floor=Floor.UNPINNED, scratch=0):
        self.ledger.add(name, nbytes, floor=floor, scratch_bytes=scratch)

    @property
    def now_ns(self):
        return next(self.seconds) * 10**9

    def plan(self, name, **options):
        return self.ledger.plan_load(
            name, in_use=self.in_use.__contains__, protected=self.protected.__contains__, **options
        )

    def load(self, *names, seconds=0.5, **options):
        for name in names:
            plan = self.plan(name, **options)
            self.ledger.begin(name, plan)
            self.ledger.commit(name, seconds, self.now_ns)
        return plan

    def use(self, *names):
        for name in names:
            if not self.ledger.is_resident(name):
                self.load(name)
            self.ledger.touch(name, self.now_ns)

    def shrink(self):
        names = self.ledger.plan_shrink(in_use=self.in_use.__contains__, protected=self.protected.__contains__)
        return self.ledger.evict(names, "budget")

    def seen(self):
        return self.ledger.snapshot(self.now_ns)

    def state(self, name):
        return self.seen().models[name].state

    @property
    def lru(self):
        return [model.name for model in self.seen().lru]

    @property
    def evicts(self):
        return {reason: count for reason, count in self.seen().evicts.items() if count}


# --- budget -----------------------------------------------------------------------------------------------------------


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
def test_the_budget_is_that_of_the_spec(fraction, scratch, pinned, pool, on_demand, over):
    books = Books(1000, fraction=fraction, unified=False)
    books.add("P", pinned, Floor.DEVICE)
    books.add("Q", 0, scratch=scratch)
    plan = books.load("P")
    budget = books.ledger.budget()
    assert (budget.weight_pool, budget.on_demand, budget.over_commit) == (pool, on_demand, over)
    assert plan.exceeds is over


def test_an_arena_of_nothing_has_no_budget():
    budget = Books(0).ledger.budget()
    assert (budget.weight_pool, budget.on_demand) == (0, 0)


def test_a_unified_device_has_no_slack():
    assert Books(1000, unified=True).ledger.budget().on_demand == 1000
    assert Books(1000, unified=True).ledger.wiggle_bytes == 0
    assert Books(1000, unified=False).ledger.wiggle_bytes == 100


def test_the_budget_follows_every_load_floor_and_scratch():
    books = Books(1000)
    books.add("P", 200, Floor.DEVICE, scratch=50)
    assert books.ledger.budget().on_demand == 950
    books.load("P")
    assert books.ledger.budget().on_demand == 750
    books.add("big", 10, scratch=150)
    assert books.ledger.budget().on_demand == 650
    books.ledger.note_scratch(250)
    assert books.ledger.budget().on_demand == 550
    books.ledger.remove("big")
    assert books.ledger.budget().on_demand == 550, "what the probe measured stays"
    books.ledger.set_floor("P", Floor.UNPINNED)
    assert (books.ledger.budget().on_demand, books.seen().resident_bytes) == (750, 200)
    books.ledger.remove("P")
    assert books.ledger.budget().pinned == books.seen().resident_bytes == 0


def test_the_scratch_of_a_removed_model_is_free_again():
    books = Books(1000, scratch_floor=10)
    books.add("a", 10, scratch=400)
    books.add("b", 10, scratch=100)
    books.ledger.remove("a")
    assert books.ledger.budget().max_scratch == 100
    books.ledger.remove("b")
    assert books.ledger.budget().max_scratch == 10


def test_a_budget_that_shrank_evicts_the_oldest_until_it_is_kept():
    books = Books(1000, models={"a": 300, "b": 300, "c": 300})
    books.use("a", "b", "c")
    books.add("d", 10, scratch=500)
    assert books.shrink() == ("a", "b")
    assert books.shrink() == ()
    assert books.evicts == {"budget": 2}


def test_a_budget_that_shrank_leaves_protected_models_alone():
    books = Books(1000, models={"a": 300, "b": 300})
    books.use("a", "b")
    books.protected = {"a"}
    books.ledger.note_scratch(900)
    assert books.shrink() == ("b",)
    assert books.lru == ["a"]


def test_the_only_model_stays_when_the_budget_shrinks_below_it():
    books = Books(1000, models={"a": 300, "b": 300})
    books.use("a", "b")
    books.ledger.note_scratch(900)
    assert books.shrink() == ("a",)
    assert books.shrink() == ()


# --- LRU --------------------------------------------------------------------------------------------------------------


def test_with_room_for_one_model_the_next_evicts_it():
    books = Books(100, models={"A": 60, "B": 60})
    books.use("A")
    plan = books.plan("B")
    assert (plan.victims, plan.waits_for, plan.blocked, plan.need, plan.exceeds) == (("A",), (), (), 60, False)
    books.use("B")
    seen = books.seen()
    assert (seen.loads, seen.evictions, seen.evicts["room"], seen.resident_bytes) == (2, 1, 1, 60)
    assert seen.resident_bytes <= seen.max_bytes
    assert (books.state("A"), books.state("B")) == (State.COLD, State.RESIDENT)


def test_a_second_use_loads_nothing():
    books = Books(100, models={"A": 60})
    books.use("A", "A", "A")
    seen = books.seen()
    assert (seen.uses, seen.loads, seen.load_seconds) == (3, 1, 0.5)


def test_the_least_recently_used_go_first():
    books = Books(400, models=dict.fromkeys("abcde", 100))
    books.use("a", "b", "c", "d", "a", "c")
    assert books.lru == ["b", "d", "a", "c"]
    assert books.plan("e").victims == ("b",)
    books.use("a", "a")
    assert books.lru == ["b", "d", "c", "a"]


def test_victims_are_not_resident_as_soon_as_the_load_begins():
    books = Books(100, models={"a": 60, "b": 60})
    books.use("a")
    books.ledger.begin("b", books.plan("b"))
    seen = books.seen()
    assert (seen.models["a"].state, seen.models["b"].state) == (State.COLD, State.LOADING)
    assert (seen.resident_bytes, seen.pending_bytes, seen.evictable_bytes, seen.loads) == (60, 60, 0, 1)


def test_a_load_that_fails_gives_its_place_back():
    books = Books(100, models={"a": 60, "b": 60})
    books.use("a")
    books.ledger.begin("b", books.plan("b"))
    books.ledger.fail("b")
    seen = books.seen()
    assert (seen.resident_bytes, seen.loads, seen.evictions) == (0, 1, 1)
    books.use("b", "a")
    assert books.lru == ["a"]


def test_a_model_is_loaded_once_at_a_time():
    books = Books(100, models={"a": 60})
    plan = books.plan("a")
    books.ledger.begin("a", plan)
    for again in (lambda: books.plan("a"), lambda: books.ledger.begin("a", plan)):
        with pytest.raises(ValueError, match="'a' is already loading"):
            again()
    books.ledger.commit("a", 0.1, 0)
    with pytest.raises(ValueError, match="'a' is not being loaded, but resident"):
        books.ledger.commit("a", 0.1, 0)
    with pytest.raises(ValueError, match="'a' is already resident"):
        books.plan("a")


def test_a_plan_of_yesterday_is_refused():
    books = Books(100, models={"a": 60, "b": 60})
    books.use("a")
    plan = books.plan("b")
    books.ledger.evict(["a"], "unload")
    with pytest.raises(ValueError, match="outdated: 'a'"):
        books.ledger.begin("b", plan)


def test_what_is_in_use_goes_last_and_is_waited_for():
    books = Books(300, models={"a": 100, "b": 100, "c": 100, "d": 100, "e": 300})
    books.use("a", "b", "c")
    books.in_use = {"a"}
    plan = books.plan("d")
    assert (plan.victims, plan.waits_for) == (("b",), ())
    plan = books.plan("e")
    assert (plan.victims, plan.waits_for) == (("b", "c", "a"), ("a",))


def test_what_was_loaded_and_not_used_yet_blocks():
    books = Books(300, models={"a": 100, "b": 100, "c": 100, "d": 200, "e": 300})
    books.use("a", "b", "c")
    books.protected = {"a", "b"}
    assert books.plan("d").blocked == ("a",)
    assert books.plan("e").blocked == ("a", "b")
    assert books.plan("d").victims == ()
    with pytest.raises(ValueError, match="blocked by a"):
        books.ledger.begin("d", books.plan("d"))
    books.protected = {"a"}
    assert books.plan("d").victims == ("b", "c")


def test_a_running_load_blocks_what_does_not_fit_beside_it():
    books = Books(200, models={"a": 150, "b": 100, "c": 50})
    books.ledger.begin("a", books.plan("a"))
    assert books.plan("b").blocked == ("a",)
    assert not books.plan("c").blocked


def test_after_an_out_of_memory_all_that_may_go_goes():
    books = Books(400, models=dict.fromkeys("abcd", 100))
    books.use("a", "b", "c")
    books.ledger.flag("a", True)
    books.in_use = {"b"}
    books.ledger.begin("d", books.plan("d"))
    books.ledger.fail("d")
    plan = books.plan("d", everything=True)
    assert (plan.victims, plan.waits_for) == (("c", "b"), ("b",))
    books.ledger.begin("d", plan, reason="oom")
    assert books.evicts == {"oom": 2}


# --- pinned -----------------------------------------------------------------------------------------------------------


def test_a_model_with_a_device_floor_is_not_evicted_and_only_its_load_is_counted():
    books = Books(1000, unified=False)
    books.add("P", 500, Floor.DEVICE)
    books.add("Q", 300)
    books.add("R", 300)
    books.load("P")
    books.use("Q", "R", "P", "Q")
    seen = books.seen()
    assert (seen.uses, seen.loads, seen.evicts["room"], books.lru) == (3, 4, 2, ["Q"])
    assert (seen.pinned_bytes, seen.resident_bytes, seen.max_bytes) == (500, 300, 400)
    assert seen.models["P"].resident
    assert seen.models["P"].reserved


def test_a_system_floor_is_pinned_only_where_device_memory_is_host_memory():
    for unified, lru in ((True, []), (False, ["a"])):
        books = Books(1000, unified=unified)
        books.add("a", 10, Floor.SYSTEM)
        books.load("a")
        assert books.lru == lru


def test_a_pinned_model_makes_room_for_itself():
    books = Books(1000, models={"a": 400, "b": 400})
    books.use("a", "b")
    books.add("P", 500, Floor.DEVICE)
    assert books.load("P").victims == ("a",)
    assert books.ledger.budget().on_demand == 500


def test_more_pinned_than_the_arena_holds_is_refused():
    books = Books(1000)
    books.add("P", 600, Floor.DEVICE)
    books.add("R", 600, Floor.DEVICE)
    books.load("P")
    with pytest.raises(DeviceOutOfMemory, match=r"'R' is to stay on the device with 600 .* 1200 of 1000 bytes"):
        books.plan("R")


def test_a_model_for_which_the_pinned_ones_leave_no_room_is_refused():
    books = Books(1000, models={"a": 500})
    books.add("P", 600, Floor.DEVICE)
    books.load("P")
    with pytest.raises(DeviceOutOfMemory, match=r"500 bytes of model 'a': .* pinned to the device take 600 of 1000"):
        books.plan("a")


def test_a_model_that_takes_the_slack_beside_the_pinned_ones_goes_on_with_a_warning():
    books = Books(1000, models={"a": 350}, unified=False)
    books.add("P", 600, Floor.DEVICE)
    books.load("P")
    assert books.plan("a").exceeds


def test_a_model_that_is_pinned_by_flag_is_no_victim_and_stays_in_the_budget():
    books = Books(300, models={"a": 100, "b": 100, "c": 200})
    books.use("a", "b")
    books.ledger.flag("a", True)
    assert books.load("c").victims == ("b",)
    assert books.ledger.compactable() == ("c",)
    assert books.ledger.evict(["a", "c"], "compaction") == ("c",)
    assert books.seen().resident_bytes == 100
    books.ledger.flag("a", False)
    assert books.ledger.compactable() == ("a",)


def test_when_all_is_pinned_by_flag_nothing_more_is_loaded():
    books = Books(300, models={"a": 100, "b": 300, "c": 1000})
    books.ledger.flag("a", True)
    books.use("a")
    for name in "bc":
        with pytest.raises(DeviceOutOfMemory, match=r"pinned by flag do not leave enough \(a\)"):
            books.plan(name)


# --- oversize ---------------------------------------------------------------------------------------------------------


def test_a_model_of_a_hundred_budgets_is_loaded_alone_and_reported():
    books = Books(10, models={"small": 5, "huge": 1000})
    books.use("small")
    plan = books.load("huge")
    assert (plan.exceeds, plan.victims) == (True, ("small",))
    assert books.shrink() == (), "it could never run otherwise"
    assert not books.load("small").exceeds
    assert books.lru == ["small"]


def test_an_oversize_model_waits_until_protected_ones_were_used():
    books = Books(10, models={"small": 5, "huge": 1000})
    books.use("small")
    books.protected = {"small"}
    plan = books.plan("huge")
    assert (plan.blocked, plan.exceeds) == (("small",), True)


# --- explicit mode ----------------------------------------------------------------------------------------------------


def test_explicit_mode_loads_and_frees_by_floor_alone():
    books = Books(1000, unified=False, externally_managed=True)
    books.add("m", 100, Floor.SYSTEM)
    with pytest.raises(NotResident, match="'m'"):
        books.plan("m")
    change = books.ledger.set_floor("m", Floor.DEVICE)
    assert change == FloorChange(Floor.SYSTEM, Floor.DEVICE, load=True)
    books.load("m", forced=True)
    assert (books.state("m"), books.lru) == (State.RESIDENT, [])
    change = books.ledger.set_floor("m", Floor.SYSTEM)
    assert change == FloorChange(Floor.DEVICE, Floor.SYSTEM, free=True, host="materialise")
    assert (books.state("m"), books.ledger.budget().pinned) == (State.COLD, 0)
    change = books.ledger.set_floor("m", Floor.UNPINNED)
    assert change == FloorChange(Floor.SYSTEM, Floor.UNPINNED, host="drop")
    seen = books.seen()
    assert (seen.loads, seen.load_seconds, seen.models["m"].loads) == (1, 0.5, 1)
    assert (seen.evicts["floor"], seen.evictions, seen.models["m"].evicts) == (1, 1, 1)
    assert (seen.uses, seen.resident_bytes) == (0, 0)
    assert seen.externally_managed


def test_a_floor_cannot_be_taken_from_under_a_load():
    books = Books(1000, unified=False, externally_managed=True)
    books.add("m", 100, Floor.DEVICE)
    books.ledger.begin("m", books.plan("m", forced=True))
    with pytest.raises(ValueError, match="'m' is being loaded"):
        books.ledger.set_floor("m", Floor.SYSTEM)


# --- floors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("explicit", "on_demand", "unified", "floor"),
    [
        (None, True, False, Floor.SYSTEM),
        (None, True, True, Floor.UNPINNED),
        (None, False, False, Floor.UNPINNED),
        (None, False, True, Floor.UNPINNED),
        (Floor.DEVICE, False, True, Floor.DEVICE),
        (Floor.UNPINNED, True, False, Floor.UNPINNED),
    ],
)
def test_the_floor_that_is_configured_wins(explicit, on_demand, unified, floor):
    assert resolve_floor(explicit, on_demand=on_demand, unified=unified) is floor


def test_floors_are_the_words_of_the_configuration():
    assert [floor.value for floor in Floor] == ["unpinned", "system", "device"]


def test_pinning_a_resident_model_moves_it_from_the_budget_to_the_reserve():
    books = Books(1000, models={"a": 300, "b": 300})
    books.use("a", "b")
    assert books.ledger.set_floor("a", Floor.DEVICE) == FloorChange(Floor.UNPINNED, Floor.DEVICE)
    seen = books.seen()
    assert (seen.pinned_bytes, seen.resident_bytes, seen.max_bytes, books.lru) == (300, 300, 700, ["b"])
    assert books.ledger.set_floor("a", Floor.UNPINNED) == FloorChange(Floor.DEVICE, Floor.UNPINNED)
    assert books.lru == ["b", "a"], "it comes back as the most recently used"
    assert books.seen().resident_bytes == 600


def test_where_device_memory_is_host_memory_system_and_device_are_one():
    books = Books(1000, models={"a": 300})
    assert books.ledger.set_floor("a", Floor.SYSTEM).load
    books.load("a")
    assert books.ledger.set_floor("a", Floor.DEVICE) == FloorChange(Floor.SYSTEM, Floor.DEVICE)
    assert books.ledger.budget().pinned == 300


def test_the_floor_it_has_moves_nothing():
    books = Books(1000, models={"a": 300})
    assert books.ledger.set_floor("a", Floor.UNPINNED) == FloorChange(Floor.UNPINNED, Floor.UNPINNED)


def test_a_card_keeps_the_weights_of_a_floor_that_was_lowered_and_moves_the_host_copy():
    books = Books(1000, unified=False)
    books.add("a", 100, Floor.DEVICE)
    books.load("a")
    assert books.ledger.set_floor("a", Floor.SYSTEM).host == "materialise"
    assert (books.state("a"), books.lru) == (State.RESIDENT, ["a"])
    assert books.ledger.set_floor("a", Floor.DEVICE).host == "keep"
    assert books.ledger.set_floor("a", Floor.UNPINNED).host == "drop"


def test_a_resident_model_whose_floor_changes_is_evicted_last():
    books = Books(1000, models={"a": 100, "b": 100}, unified=False)
    books.use("a", "b")
    books.ledger.set_floor("a", Floor.SYSTEM)
    assert books.lru == ["b", "a"]


@pytest.mark.parametrize(("nbytes", "fits"), [(500, True), (501, False)])
def test_pinning_must_leave_scratch_and_slack(nbytes, fits):
    books = Books(1000, unified=False)
    books.add("P", 300, Floor.DEVICE, scratch=100)
    books.add("a", nbytes)
    books.load("P")
    if fits:
        assert books.ledger.set_floor("a", Floor.DEVICE).load
        return
    before = books.seen()
    with pytest.raises(DeviceOutOfMemory, match=r"801 bytes .* beside 100 of scratch and 100 of slack in 1000 bytes"):
        books.ledger.set_floor("a", Floor.DEVICE)
    after = books.seen()
    assert (after.models["a"].floor, after.budget, after.lru) == (Floor.UNPINNED, before.budget, before.lru)


def test_a_resident_model_that_cannot_be_pinned_stays_as_it_was():
    books = Books(1000, models={"a": 500})
    books.add("P", 200, Floor.DEVICE, scratch=400)
    books.load("P")
    books.load("a")
    with pytest.raises(DeviceOutOfMemory):
        books.ledger.set_floor("a", Floor.SYSTEM)
    assert (books.seen().resident_bytes, books.lru) == (500, ["a"])


def test_pinning_must_leave_room_for_what_is_pinned_by_flag():
    books = Books(1000, models={"a": 600, "b": 600, "c": 300})
    books.use("c", "a")
    books.ledger.flag("c", True)
    books.ledger.set_floor("b", Floor.DEVICE)
    assert books.load("b").victims == ("a",)
    books.ledger.set_floor("b", Floor.UNPINNED)
    books.ledger.evict(["b"], "unload")
    books.ledger.flag("a", True)
    books.use("a")
    with pytest.raises(DeviceOutOfMemory, match="900 pinned by flag"):
        books.ledger.set_floor("b", Floor.DEVICE)


# --- compaction -------------------------------------------------------------------------------------------------------


def test_a_compaction_frees_all_that_is_on_demand_and_is_no_eviction():
    books = Books(1000)
    books.add("P", 100, Floor.DEVICE)
    books.add("A", 100)
    books.add("B", 100)
    books.load("P")
    books.use("A", "B")
    assert books.ledger.compactable() == ("A", "B")
    assert books.ledger.compacted() == ("A", "B")
    seen = books.seen()
    assert (seen.compactions, seen.evictions, seen.resident_bytes, books.lru) == (1, 0, 0, [])
    assert books.state("P") is State.RESIDENT
    books.load("A")
    assert (books.state("A"), books.state("B")) == (State.RESIDENT, State.COLD)
    assert books.seen().loads == 4


def test_a_compaction_of_nothing_counts():
    books = Books(1000)
    assert books.ledger.compacted() == ()
    assert books.seen().compactions == 1


# --- counters of pinned weights ---------------------------------------------------------------------------------------


def test_loads_of_pinned_weights_count_and_their_uses_are_no_hits():
    books = Books(1000, models={"a": 100})
    books.add("P", 100, Floor.DEVICE)
    books.load("P", seconds=0.25)
    before = books.seen()
    books.use("a", "P", "a", "P")
    seen = books.seen()
    assert (before.loads, seen.loads, seen.load_seconds) == (1, 2, 0.75)
    assert sum(model.loads for model in seen.models.values()) == seen.loads
    assert (seen.uses - before.uses) - (seen.loads - before.loads) == 1, "hits since the last pin"


def test_a_floor_that_frees_nothing_evicts_nothing():
    books = Books(1000, externally_managed=True)
    books.add("m", 100)
    books.ledger.set_floor("m", Floor.DEVICE)
    books.ledger.set_floor("m", Floor.UNPINNED)
    assert books.evicts == {}


# --- names and counters -----------------------------------------------------------------------------------------------


def test_a_second_eviction_is_none():
    books = Books(1000, models={"a": 100})
    books.use("a")
    assert books.ledger.evict(["a", "a"], "unload") == ("a",)
    assert books.ledger.evict(["a"], "unload") == ()
    assert books.evicts == {"unload": 1}


def test_a_name_is_registered_once():
    books = Books(1000, models={"a": 100})
    with pytest.raises(ValueError, match="'a' is already"):
        books.add("a", 1)


def test_a_renamed_model_keeps_its_place():
    books = Books(1000, models={"a": 100, "b": 100})
    books.use("a", "b")
    books.ledger.rename("a", "new")
    assert books.lru == ["new", "b"]
    assert books.seen().models["new"].loads == 1
    with pytest.raises(KeyError, match="'a'"):
        books.ledger.touch("a", 0)
    with pytest.raises(ValueError, match="'b' is already"):
        books.ledger.rename("new", "b")
    books.use("new", "b")
    assert books.lru == ["new", "b"]


def test_a_model_that_is_removed_while_it_loads_takes_no_place():
    books = Books(1000, models={"a": 100})
    books.ledger.begin("a", books.plan("a"))
    books.ledger.remove("a")
    assert books.seen().resident_bytes == 0
    with pytest.raises(KeyError, match="'a'"):
        books.ledger.commit("a", 0.1, 0)


def test_removing_a_resident_model_is_an_unload():
    books = Books(1000, models={"a": 100})
    books.use("a")
    books.ledger.remove("a")
    seen = books.seen()
    assert (seen.resident_bytes, seen.models, seen.evicts["unload"], books.lru) == (0, {}, 1, [])


def test_a_snapshot_says_how_long_models_were_idle():
    books = Books(1000, models={"a": 100, "b": 100})
    ledger = books.ledger
    assert ledger.snapshot(0).lru_age_seconds is None
    books.load("a", "b")
    ledger.touch("a", 10 * 10**9)
    seen = ledger.snapshot(14 * 10**9)
    assert seen.lru == (("b", 12.0), ("a", 4.0))
    assert seen.lru_age_seconds == 12.0
    assert seen.models["a"].requests_per_second > 0 == seen.models["b"].requests_per_second
    assert (seen.models["b"].reload_seconds, seen.models["b"].loads) == (0.5, 1)


# --- tensors that models share ----------------------------------------------------------------------------------------


def test_fine_tunes_of_one_backbone_count_it_once():
    books = Books(1200, models={f"m{index}": 1010 for index in range(20)})
    for index in range(20):
        books.ledger.share(f"m{index}", {"backbone": 1000})
        books.use(f"m{index}")
    seen = books.seen()
    assert (seen.resident_bytes, len(seen.lru), seen.evictions) == (1200, 20, 0)
    books.add("other", 150)
    plan = books.load("other")
    assert plan.victims == tuple(f"m{index}" for index in range(15))
    assert books.plan("m0").need == 10


def test_tensors_found_equal_later_are_freed_in_the_books_as_well():
    books = Books(1000, models={"a": 300, "b": 300, "c": 300})
    books.use("a", "b")
    books.ledger.share("a", {"x": 200})
    assert books.seen().resident_bytes == 600
    books.ledger.share("b", {"x": 200})
    assert books.seen().resident_bytes == 400
    books.ledger.evict(["a"], "unload")
    assert books.seen().resident_bytes == 300
    books.ledger.share("b", {})
    assert books.seen().resident_bytes == 300


def test_a_tensor_of_a_pinned_model_is_in_the_reserve():
    books = Books(1000, models={"a": 300})
    books.add("P", 300, Floor.DEVICE)
    for name in "aP":
        books.ledger.share(name, {"x": 200})
    books.load("a", "P")
    seen = books.seen()
    assert (seen.pinned_bytes, seen.resident_bytes) == (300, 100)
    books.ledger.set_floor("P", Floor.UNPINNED)
    assert (books.ledger.budget().pinned, books.seen().resident_bytes) == (0, 400)


def test_a_victim_whose_tensors_the_load_needs_frees_only_the_rest():
    books = Books(400, models={"a": 300, "b": 300, "c": 100})
    for name in "ab":
        books.ledger.share(name, {"x": 250})
    books.use("a", "c")
    assert books.plan("b").victims == ("a",)
    assert books.plan("b").need == 300, "x leaves with the only model that has it, and comes back"


def test_a_shared_tensor_has_one_size():
    books = Books(1000, models={"a": 300, "b": 300})
    books.ledger.share("a", {"x": 200})
    books.use("a")
    with pytest.raises(ValueError, match="tensor x has 100 bytes here and 200"):
        books.ledger.share("b", {"x": 100})
    with pytest.raises(ValueError, match="400 bytes in weights of 300"):
        books.ledger.share("b", {"y": 400})
