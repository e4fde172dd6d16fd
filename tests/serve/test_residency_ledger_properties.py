"""Whatever floors, loads, evictions, pins, shares and failures happen, in whatever order: the books are those of a
naive reference, and what is on demand is within its budget."""

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rsrv.core.errors import DeviceOutOfMemory, NotResident
from rsrv.serve.residency import Floor, Ledger, State
from rsrv.serve.residency.eviction import HALFLIFE_SECONDS
from rsrv.serve.residency.snapshot import EVICT_REASONS

DIGESTS = {"x": 40, "y": 25, "z": 10}
NAMES = ("a", "b", "c", "d", "e", "f", "g")
MODEL = st.tuples(
    st.sampled_from([50, 30, 80, 1, 120]),
    st.sets(st.sampled_from(sorted(DIGESTS))),
    st.sampled_from([*Floor, Floor.UNPINNED, Floor.UNPINNED, Floor.UNPINNED]),
    st.sampled_from([0, 0, 0, 5, 30]),
)


class Model:
    def __init__(self, private, digests, floor, scratch):
        self.private, self.digests, self.floor, self.scratch = private, digests, floor, scratch
        self.state, self.flagged = "cold", False
        self.used, self.inherited, self.reload = [], 0.0, None


class Reference:
    """Sets and sums, made anew for every question."""

    def __init__(self, arena, fraction, wiggle, unified, external, policy):
        self.arena, self.fraction, self.unified, self.external = arena, fraction, unified, external
        self.wiggle = 0 if unified else wiggle
        self.policy = policy
        self.models, self.lru, self.begun = {}, [], []
        self.probed = self.loads = self.uses = self.compactions = 0
        self.evicts = dict.fromkeys(EVICT_REASONS, 0)
        self.reclaims = 0
        self.epoch = None

    def reserved(self, name):
        return self.models[name].floor is Floor.DEVICE or (self.unified and self.models[name].floor is Floor.SYSTEM)

    def held(self):
        return {name for name, model in self.models.items() if model.state != "cold"}

    def union(self, names):
        digests = set().union(*(self.models[name].digests for name in names))
        return sum(self.models[name].private for name in names) + sum(DIGESTS[digest] for digest in digests)

    def sums(self, names):
        """Reserved and on-demand bytes with exactly `names` on the device."""
        reserved = self.union([name for name in names if self.reserved(name)])
        return reserved, self.union(names) - reserved

    @property
    def scratch(self):
        return max([self.probed, *(model.scratch for model in self.models.values())])

    @property
    def pool(self):
        ceiling = math.floor((1 - self.wiggle) * self.arena) - self.scratch
        return max(0, min(math.floor(self.fraction * self.arena), ceiling))

    def limit(self, names):
        return max(self.pool - self.sums(names)[0], 0)

    def worth(self, name):
        model = self.models[name]
        freed = self.union(self.held()) - self.union(self.held() - {name})
        uses = self.uses_of(model)
        return uses * (model.reload or 0.0) / freed if freed else math.inf

    def uses_of(self, model):
        uses = model.inherited
        for now in model.used:
            uses += 2.0 ** ((now - self.epoch) * (1e-9 / HALFLIFE_SECONDS))
        return uses

    def order(self):
        return list(self.lru) if self.policy == "lru" else sorted(self.lru, key=self.worth)

    def groups(self, in_use, protected):
        order = [name for name in self.order() if not self.models[name].flagged]
        held = [name for name in self.begun if self.models[name].state == "loading" and not self.reserved(name)]
        held += [name for name in order if name in protected]
        rest = [name for name in order if name not in protected]
        idle = [name for name in rest if name not in in_use]
        return idle, [name for name in rest if name in in_use], held

    def may_exceed(self, nbytes, reserved):
        return nbytes > self.pool or reserved + nbytes <= self.arena

    def plan(self, name, in_use, protected, everything):
        """Victims, those waited for, those that block, exceeds; or an error."""
        with_it = self.held() | {name}
        reserved = self.sums(with_it)[0]
        if self.reserved(name) and reserved > self.arena:
            return DeviceOutOfMemory
        idle, busy, held = self.groups(in_use, protected)
        leaving = idle + busy + held
        exceeds = self.reserved(name) and reserved > self.pool
        for count in range(len(idle + busy) if everything else 0, len(leaving) + 1):
            rest = with_it - set(leaving[:count])
            if self.sums(rest)[1] <= self.limit(rest):
                break
        else:
            if any(self.models[each].flagged for each in self.lru):
                return DeviceOutOfMemory
            if not self.may_exceed(self.sums(rest)[1], reserved):
                return DeviceOutOfMemory
            count, exceeds = len(leaving), True
        gone = leaving[:count]
        blocked = [each for each in gone if each in held]
        victims = [] if blocked else gone
        return victims, [each for each in victims if each in busy], blocked, exceeds

    def shrink(self, in_use, protected):
        idle, busy, held = self.groups(in_use, protected)
        leaving, stay = idle + busy, held + [name for name in self.lru if self.models[name].flagged]
        for count in range(len(leaving) + 1):
            rest = self.held() - set(leaving[:count])
            alone = not stay and len(leaving) - count == 1
            reserved, on_demand = self.sums(rest)
            if on_demand <= self.limit(rest) or (alone and self.may_exceed(on_demand, reserved)):
                break
        return leaving[:count]

    def pinnable(self, name):
        names = {each for each in self.held() if self.reserved(each) or (self.models[each].flagged and each != name)}
        before, self.models[name].floor = self.models[name].floor, Floor.DEVICE
        reserved, on_demand = self.sums(names | {name})
        self.models[name].floor = before
        ceiling = math.floor((1 - self.wiggle) * self.arena)
        return reserved + self.scratch <= ceiling and on_demand <= max(self.pool - reserved, 0)

    def trim(self, target, in_use, protected):
        names = []
        for name in self.lru:
            if self.union(self.held() - set(names)) <= target:
                break
            if not self.models[name].flagged and name not in in_use | protected:
                names.append(name)
        return names

    def exchange(self, old, new, aside):
        before, after = self.models.pop(old), self.models.pop(new)
        self.models[aside], self.models[old] = before, after
        after.flagged, before.flagged = before.flagged, False
        after.inherited, after.used = self.uses_of(after) + self.uses_of(before), []
        before.inherited, before.used = 0.0, []
        after.reload = before.reload if after.reload is None else after.reload
        if old in self.lru:
            place = [name for name in self.lru if name != new].index(old)
            rest = [name for name in self.lru if name not in (old, new)]
            if new in self.lru:
                rest.insert(place, old)
            self.lru = [aside, *rest]
        else:
            self.lru = [old if name == new else name for name in self.lru]
        names = {old: aside, new: old}
        self.begun = [names.get(name, name) for name in self.begun]

    def leave(self, name, reason):
        self.models[name].state = "cold"
        quiet = ("compaction", "idle", "deactivate")
        evicted = reason == "floor" or (name in self.lru and reason not in quiet)
        if name in self.lru:
            self.lru.remove(name)
        if evicted:
            self.evicts[reason] += 1


class Books(RuleBasedStateMachine):
    @initialize(
        arena=st.sampled_from([400, 300, 600, 250, 800, 150, 0]),
        fraction=st.sampled_from([1.0, 1.0, 0.5]),
        unified=st.booleans(),
        external=st.sampled_from([False] * 5 + [True]),
        policy=st.sampled_from(["lru", "cost"]),
        models=st.lists(MODEL, min_size=4, max_size=6),
    )
    def open(self, arena, fraction, unified, external, policy, models):
        self.ledger = Ledger(
            arena=arena, fraction=fraction, wiggle=0.1, unified=unified, externally_managed=external, policy=policy
        )
        self.reference = Reference(arena, fraction, 0.1, unified, external, policy)
        self.now = 0
        self.in_use, self.protected = set(), set()
        self.overdue = False
        for name, model in zip(NAMES, models, strict=False):
            self.add(name, model)

    # --- what a rule needs ---

    def some(self, data, names):
        return data.draw(st.sampled_from(sorted(names)))

    def at(self, *states):
        models = self.reference.models
        return {name for name in models if models[name].state in states}

    def left(self, names, reason):
        for name in names:
            self.reference.leave(name, reason)
        self.in_use -= set(names)
        self.protected -= set(names)

    def shrink(self):
        """As the worker does after everything that may make the budget smaller."""
        expected = self.reference.shrink(self.in_use, self.protected)
        names = self.ledger.plan_shrink(in_use=self.in_use.__contains__, protected=self.protected.__contains__)
        assert list(names) == expected
        assert self.ledger.evict(names, "budget") == names
        self.left(names, "budget")
        # What is left is protected, loading or pinned by flag, so that the budget may be kept only after the next load.
        idle, busy, _ = self.reference.groups(self.in_use, self.protected)
        self.overdue = not idle + busy

    # --- models ---

    @rule(data=st.data(), model=MODEL)
    @precondition(lambda self: len(self.reference.models) < len(NAMES))
    def register(self, data, model):
        self.add(self.some(data, set(NAMES) - set(self.reference.models)), model)

    def add(self, name, model):
        private, digests, floor, scratch = model
        self.reference.models[name] = Model(private, digests, floor, scratch)
        nbytes = private + sum(DIGESTS[digest] for digest in digests)
        self.ledger.add(name, nbytes, floor=floor, scratch_bytes=scratch)
        self.ledger.share(name, {digest: DIGESTS[digest] for digest in digests})
        self.shrink()

    @rule(data=st.data())
    @precondition(lambda self: len(self.reference.models) > 3)
    def remove(self, data):
        name = self.some(data, self.reference.models)
        self.ledger.remove(name)
        self.left([name], "unload")
        del self.reference.models[name]
        self.reference.begun = [each for each in self.reference.begun if each != name]
        self.shrink()

    @rule(data=st.data(), new=st.sampled_from(NAMES))
    def rename(self, data, new):
        if new in self.reference.models:
            return
        old = self.some(data, self.reference.models)
        self.ledger.rename(old, new)
        models = self.reference.models
        models[new] = models.pop(old)
        for names in (self.in_use, self.protected):
            if old in names:
                names.remove(old)
                names.add(new)
        for order in (self.reference.lru, self.reference.begun):
            order[:] = [new if each == old else each for each in order]

    @rule(data=st.data(), aside=st.sampled_from([*NAMES, "h", "i"]))
    def reload(self, data, aside):
        """A model that was registered under a name of its own is the next version of another one from now on."""
        old = self.some(data, self.reference.models)
        new = self.some(data, set(self.reference.models) - {old})
        if aside in self.reference.models:
            return
        self.ledger.exchange(old, new, aside)
        self.reference.exchange(old, new, aside)
        names = {old: aside, new: old}
        self.in_use = {names.get(name, name) for name in self.in_use}
        self.protected = {names.get(name, name) for name in self.protected}

    @rule(data=st.data(), digests=st.sets(st.sampled_from(sorted(DIGESTS))))
    def share(self, data, digests):
        name = self.some(data, self.reference.models)
        model = self.reference.models[name]
        nbytes = model.private + sum(DIGESTS[digest] for digest in model.digests)
        private = nbytes - sum(DIGESTS[digest] for digest in digests)
        if private < 0:
            return
        self.ledger.share(name, {digest: DIGESTS[digest] for digest in digests})
        model.private, model.digests = private, digests
        self.shrink()

    @rule(data=st.data(), pinned=st.sampled_from([False, False, True]))
    def flag(self, data, pinned):
        name = self.some(data, self.reference.models)
        self.ledger.flag(name, pinned)
        self.reference.models[name].flagged = pinned

    @rule(nbytes=st.integers(0, 30))
    def probe(self, nbytes):
        self.ledger.note_scratch(nbytes)
        self.reference.probed = max(self.reference.probed, nbytes)
        self.shrink()

    @rule(data=st.data(), floor=st.sampled_from(list(Floor)))
    def move_floor(self, data, floor):
        name = self.some(data, self.reference.models)
        reference, model = self.reference, self.reference.models[name]
        was_reserved, old = reference.reserved(name), model.floor
        model.floor = floor
        now_reserved = reference.reserved(name)
        model.floor = old
        if now_reserved and not was_reserved and not reference.pinnable(name):
            try:
                self.ledger.set_floor(name, floor)
            except DeviceOutOfMemory:
                return
            raise AssertionError(f"{name} was pinned")
        if reference.external and not now_reserved and model.state == "loading" and floor is not old:
            return
        change = self.ledger.set_floor(name, floor)
        assert (change.old, change.new) == (old, floor)
        if floor is old:
            return
        frees = reference.external and not now_reserved and model.state == "resident"
        assert change.free == frees
        if frees:
            self.left([name], "floor")
        model.floor = floor
        assert change.load == (now_reserved and model.state == "cold")
        if name in reference.lru:
            reference.lru.remove(name)
        if not now_reserved and model.state == "resident":
            reference.lru.append(name)
        self.shrink()

    # --- loads ---

    @rule(data=st.data(), everything=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.at("cold"))
    def begin_some(self, data, everything):
        self.begin(self.some(data, self.at("cold")), everything)

    def begin(self, name, everything=False):
        hooks = {"in_use": self.in_use.__contains__, "protected": self.protected.__contains__}
        if self.reference.external:
            try:
                self.ledger.plan_load(name, **hooks)
            except NotResident:
                pass
            else:
                raise AssertionError("an externally managed ledger planned a load by itself")
        expected = self.reference.plan(name, self.in_use, self.protected, everything)
        try:
            plan = self.ledger.plan_load(name, **hooks, everything=everything, forced=True)
        except DeviceOutOfMemory:
            assert expected is DeviceOutOfMemory
            return
        assert [[*plan.victims], [*plan.waits_for], [*plan.blocked], plan.exceeds] == [*expected]
        for victim in plan.victims:
            model = self.reference.models[victim]
            assert model.state == "resident"
            assert not any([model.flagged, self.reference.reserved(victim), victim in self.protected])
            assert victim not in self.in_use or victim in plan.waits_for
        if plan.blocked:
            return
        reference = self.reference
        rest = reference.held() - set(plan.victims)
        assert plan.need == reference.union(rest | {name}) - reference.union(rest)
        self.ledger.begin(name, plan, reason="oom" if everything else "room")
        self.left(plan.victims, "oom" if everything else "room")
        reference.models[name].state = "loading"
        reference.begun = [*(each for each in reference.begun if each != name), name]
        self.overdue = False

    @rule(data=st.data(), seconds=st.sampled_from([0.1, 0.5, 3.0]), wanted=st.booleans())
    @precondition(lambda self: self.at("loading"))
    def commit(self, data, seconds, wanted):
        self.arrive(self.some(data, self.at("loading")), seconds, wanted)

    def arrive(self, name, seconds, wanted):
        self.ledger.commit(name, seconds, self.now)
        model = self.reference.models[name]
        model.state = "resident"
        model.reload = seconds if model.reload is None else model.reload + 0.3 * (seconds - model.reload)
        if not self.reference.reserved(name):
            self.reference.lru.append(name)
        self.reference.loads += 1
        if wanted:
            self.protected.add(name)

    @rule(data=st.data(), again=st.booleans())
    @precondition(lambda self: self.at("loading"))
    def fail(self, data, again):
        """The file is gone, or the device out of memory: then all goes that may, and it is tried again."""
        name = self.some(data, self.at("loading"))
        self.ledger.fail(name)
        self.reference.models[name].state = "cold"
        if again:
            self.begin(name, everything=True)

    # --- use and eviction ---

    @rule(data=st.data(), seconds=st.integers(0, 300), times=st.integers(1, 3))
    @precondition(lambda self: self.at("resident"))
    def use_some(self, data, seconds, times):
        self.use(self.some(data, self.at("resident")), seconds, times)

    @rule(data=st.data(), seconds=st.integers(0, 300), still=st.booleans())
    def serve(self, data, seconds, still):
        """A request from beginning to end, and perhaps its batch is still running."""
        name = self.some(data, self.reference.models)
        self.answer(name, seconds)
        if not still:
            self.in_use.discard(name)

    def answer(self, name, seconds):
        if self.reference.models[name].state == "cold":
            self.begin(name)
        if self.reference.models[name].state == "loading":
            self.arrive(name, 0.5, wanted=False)
        if self.reference.models[name].state == "resident":
            self.use(name, seconds)

    @rule(seconds=st.integers(0, 300), order=st.permutations(NAMES))
    def serve_everybody(self, seconds, order):
        for name in order:
            if name in self.reference.models:
                self.answer(name, seconds)
                self.in_use.discard(name)

    def use(self, name, seconds, times=1):
        reference = self.reference
        for _ in range(times):
            self.now += seconds * 10**9
            self.ledger.touch(name, self.now)
            reference.epoch = self.now if reference.epoch is None else reference.epoch
            reference.models[name].used.append(self.now)
            reference.uses += not reference.reserved(name)
        self.protected.discard(name)
        self.in_use.add(name)
        if name in reference.lru:
            reference.lru.remove(name)
            reference.lru.append(name)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def end_use(self, data):
        self.in_use.discard(self.some(data, self.in_use))

    @rule(data=st.data(), reason=st.sampled_from(["oom", "unload", "budget", "idle", "deactivate"]))
    def evict(self, data, reason):
        names = data.draw(st.lists(st.sampled_from(sorted(self.reference.models)), max_size=2))
        reference = self.reference
        expected = []
        for name in dict.fromkeys(names):
            model = reference.models[name]
            fixed = model.flagged or reference.reserved(name)
            if model.state == "resident" and (reason == "unload" or not fixed):
                expected.append(name)
        assert [*self.ledger.evict(names, reason)] == expected
        self.left(expected, reason)
        reference.reclaims += len(expected) * (reason == "idle")

    @rule(most=st.integers(0, 400))
    def trim(self, most):
        """What an operator leaves, which is never what is pinned, in use, or was loaded for those who wait."""
        expected = self.reference.trim(most, self.in_use, self.protected)
        hooks = {"in_use": self.in_use.__contains__, "protected": self.protected.__contains__}
        names = self.ledger.plan_trim(most, **hooks)
        assert [*names] == expected
        assert self.ledger.evict(names, "trim") == names
        self.left(names, "trim")
        seen = self.ledger.snapshot(self.now)
        stay = {
            name
            for name in self.reference.lru
            if not (self.reference.models[name].flagged or name in self.in_use | self.protected)
        }
        assert seen.pinned_bytes + seen.resident_bytes <= most or not stay

    @rule()
    def compact(self):
        expected = [name for name in self.reference.lru if not self.reference.models[name].flagged]
        assert [*self.ledger.compacted()] == expected
        self.left(expected, "compaction")
        self.reference.compactions += 1

    # --- always ---

    @invariant(check_during_init=False)
    def the_books_agree(self):
        reference, seen = self.reference, self.ledger.snapshot(self.now)
        reserved, on_demand = reference.sums(reference.held())
        assert (seen.pinned_bytes, seen.resident_bytes) == (reserved, on_demand)
        assert (seen.budget.weight_pool, seen.budget.max_scratch) == (reference.pool, reference.scratch)
        assert seen.max_bytes == reference.limit(reference.held())
        assert [model.name for model in seen.lru] == reference.lru
        assert {name: model.state for name, model in seen.models.items()} == {
            name: State(model.state) for name, model in reference.models.items()
        }
        assert all(model.reserved == reference.reserved(name) for name, model in seen.models.items())
        movable = {name for name in reference.lru if not reference.models[name].flagged}
        assert seen.evictable_bytes == on_demand - reference.sums(reference.held() - movable)[1]
        assert seen.evicts == reference.evicts
        assert (seen.loads, seen.uses, seen.compactions) == (reference.loads, reference.uses, reference.compactions)
        assert seen.idle_reclaims == reference.reclaims
        assert {name for name, model in seen.models.items() if model.pinned} == {
            name for name, model in reference.models.items() if model.flagged
        }

    @invariant(check_during_init=False)
    def the_budget_is_kept(self):
        reference = self.reference
        on_demand = [name for name in reference.held() if not reference.reserved(name)]
        if reference.sums(reference.held())[1] <= reference.limit(reference.held()) or len(on_demand) == 1:
            return
        assert self.overdue


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestTheBooks = Books.TestCase


class Chance:
    """Stands for hypothesis' data, which seldom gets several models onto the device at once."""

    def __init__(self, random):
        self.random = random


class LongRun(Books):
    def some(self, data, names):
        return data.random.choice(sorted(names))


@pytest.mark.parametrize("seed", range(24))
def test_the_books_agree_over_a_long_run_with_many_models_on_the_device(seed):
    chance = random.Random(seed)
    run, data = LongRun(), Chance(chance)

    def model(floors):
        digests = {digest for digest in DIGESTS if chance.random() < 0.4}
        return chance.randint(1, 80), digests, chance.choice(floors), chance.choice([0, 5])

    policy = chance.choice(["lru", "cost"])
    models = [model([Floor.UNPINNED]) for _ in range(6)]
    run.open(chance.choice([150, 250, 350]), 1.0, chance.random() < 0.5, False, policy, models)
    for _ in range(150):
        move = chance.choice(
            ["serve"] * 14
            + ["begin", "commit", "fail", "end", "flag", "floor", "share", "add", "drop", "reload", "trim", "idle"]
        )
        seconds = chance.randint(0, 60)
        if move == "serve":
            run.serve(data, seconds, chance.random() < 0.3)
        elif move == "begin" and run.at("cold"):
            run.begin_some(data, chance.random() < 0.2)
        elif move == "commit" and run.at("loading"):
            run.commit(data, chance.choice([0.1, 3.0]), chance.random() < 0.5)
        elif move == "fail" and run.at("loading"):
            run.fail(data, chance.random() < 0.5)
        elif move == "end" and run.in_use:
            run.end_use(data)
        elif move == "flag":
            run.flag(data, chance.random() < 0.3)
        elif move == "floor":
            run.move_floor(data, chance.choice([*Floor, Floor.UNPINNED, Floor.UNPINNED]))
        elif move == "reload":
            run.reload(data, chance.choice([*NAMES, "h"]))
        elif move == "trim":
            run.trim(chance.randint(0, 300))
        elif move == "idle":
            names = [name for name in run.reference.lru if not run.reference.models[name].flagged][:2]
            assert [*run.ledger.evict(names, "idle")] == names
            run.left(names, "idle")
            run.reference.reclaims += len(names)
        elif move == "share":
            run.share(data, {digest for digest in DIGESTS if chance.random() < 0.5})
        elif move == "add" and len(run.reference.models) < len(NAMES):
            run.register(data, model([*Floor, Floor.UNPINNED, Floor.UNPINNED]))
        elif move == "drop" and len(run.reference.models) > 4:
            run.remove(data)
        run.the_books_agree()
        run.the_budget_is_kept()
