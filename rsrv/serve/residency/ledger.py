"""The books of weight residency: what is on the device, what may be there, who has to leave for whom, and counters.

No threads, no device, no bytes: the caller moves them, passes the time in, and locks. A load is `plan_load`, `begin`,
then `commit` or `fail`. What leaves is not resident from that moment on, and its bytes count as free; the caller frees
them before it loads, once nothing uses them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from rsrv.serve.budget import Budget, resolve_budget
from rsrv.serve.residency import refusals
from rsrv.serve.residency.entry import Entry
from rsrv.serve.residency.eviction import Occupants, Plan, Rates, choose, succeeded, worth
from rsrv.serve.residency.floors import Floor, FloorChange, is_reserved
from rsrv.serve.residency.ghosts import Ghosts
from rsrv.serve.residency.holdings import Footprint, Holdings, Trial
from rsrv.serve.residency.snapshot import EVICT_REASONS, EvictReason, IdleModel, LedgerSnapshot, Policy, State

__all__ = ["Ledger", "LedgerSnapshot", "Plan"]


class Ledger:
    """The books of one device.

    A name that is not registered is a KeyError, a move that a model's state does not allow a ValueError.

    Args:
        arena: bytes of the device that may be used at all.
        fraction: of the arena, at most, for weights.
        wiggle: of the arena, slack; not where device memory is host memory.
        unified: device memory is host memory, so a `system` floor is in the arena, too.
        externally_managed: nothing is loaded unless it is forced.
        policy: who leaves first: the least recently used, or whose return costs least.
        scratch_floor: bytes to keep free for an execution, whatever the models say.
    """

    def __init__(
        self,
        *,
        arena: int,
        fraction: float = 1.0,
        wiggle: float = 0.1,
        unified: bool,
        externally_managed: bool = False,
        policy: Policy = "lru",
        scratch_floor: int = 0,
    ) -> None:
        self._arena = arena
        self._fraction = fraction
        self._wiggle = 0.0 if unified else wiggle
        self._unified = unified
        self._externally_managed = externally_managed
        self._policy = policy
        self._scratch_floor = scratch_floor
        self._entries: dict[str, Entry] = {}
        # On-demand models on the device, the least recently used first.
        self._lru: OrderedDict[Entry, None] = OrderedDict()
        self._loading: dict[Entry, None] = {}
        self._holdings = Holdings()
        self._rates = Rates()
        self._ghosts = Ghosts()
        # The last of the LRU, when its last use is the last that the ghosts saw: to use it again changes no order.
        self._recent: Entry | None = None
        self._uses = 0
        self._loads = 0
        self._load_seconds = 0.0
        self._evicts: dict[EvictReason, int] = dict.fromkeys(EVICT_REASONS, 0)
        self._compactions = 0
        self._idle_reclaims = 0
        self._scratch = scratch_floor
        self._rebudget()

    # --- models and the budget ----------------------------------------------------------------------------------------

    def add(self, name: str, nbytes: int, *, floor: Floor, scratch_bytes: int = 0) -> None:
        """Register a model; it is not on the device. Its scratch may shrink the budget: see `plan_shrink`.

        `nbytes` is what its weights take there, `scratch_bytes` what the largest of its programs takes beside them.
        """
        if name in self._entries:
            raise ValueError(f"model {name!r} is already in the ledger; remove it first")
        reserved = is_reserved(floor, unified=self._unified)
        self._entries[name] = Entry(name, Footprint(nbytes), floor, reserved, scratch_bytes)
        self._scratch = max(self._scratch, scratch_bytes)
        self._rebudget()

    def remove(self, name: str) -> None:
        """Forget a model. When it is on the device, its bytes are free from now on, and a running load is off."""
        entry = self._find(name)
        self._leave(entry, "unload")
        self._ghosts.forget(entry)
        del self._entries[name]
        self._scratch = max([each.scratch_bytes for each in self._entries.values()], default=0)
        self._scratch = max(self._scratch, self._scratch_floor)
        self._rebudget()

    def rename(self, old: str, new: str) -> None:
        """Everything that is known about `old` is known about `new`; the floor stays, `set_floor` sets the new one."""
        if new in self._entries:
            raise ValueError(f"model {new!r} is already in the ledger")
        entry = self._find(old)
        del self._entries[old]
        entry.name = new
        self._entries[new] = entry

    def exchange(self, old: str, new: str, aside: str) -> None:
        """The model `new` is the next version of `old`: it is known as `old` from now on, and that one as `aside`.

        Pin flag, use and place in the order of eviction go to the next version; the other is the first to leave.
        Floors, bytes and what is on the device stay what they are. Raises ValueError when `aside` is taken.
        """
        if aside in self._entries:
            raise ValueError(f"model {aside!r} is already in the ledger")
        before, after = self._find(old), self._find(new)
        del self._entries[old], self._entries[new]
        before.name, after.name = aside, old
        self._entries[aside], self._entries[old] = before, after
        after.succeed(before)
        if after.reserved:
            self._ghosts.forget(before)
        else:
            self._ghosts.succeed(after, before)
        if before in self._lru:
            self._lru = OrderedDict.fromkeys(succeeded(self._lru, before, after))
        self._recent = None

    def share(self, name: str, shared: Mapping[str, int]) -> None:
        """These tensors of `name`, digest -> bytes, are held once for all models that have the digest.

        It replaces what was said before. Two equal tensors in one model stay two. Raises ValueError when more bytes
        are shared than the model has, or another model's tensor of that digest has another size.
        """
        entry = self._find(name)
        footprint = Footprint(entry.footprint.nbytes, dict(shared))
        self._holdings.require_consistent(footprint.shared)
        if entry.held:
            self._holdings.release(entry.footprint, reserved=entry.reserved)
            self._holdings.hold(footprint, reserved=entry.reserved)
        entry.footprint = footprint
        self._recent = None
        self._rebudget()

    def note_scratch(self, nbytes: int) -> None:
        """A probe found that an execution takes that much. The budget may shrink: see `plan_shrink`."""
        self._scratch_floor = max(self._scratch_floor, nbytes)
        self._scratch = max(self._scratch, nbytes)
        self._rebudget()

    def flag(self, name: str, pinned: bool) -> None:
        """Pin by flag: once it is on the device, the model is never a victim, but stays in the budget."""
        self._find(name).flagged = pinned

    def budget(self) -> Budget:
        """The budget as it is now. The pinned reserve is what is on the device or on its way there."""
        return self._budget

    @property
    def wiggle_bytes(self) -> int:
        """The slack of the arena."""
        return self._arena - self._ceiling

    def state(self, name: str) -> State:
        return self._find(name).state

    def is_resident(self, name: str) -> bool:
        return self._find(name).state is State.RESIDENT

    # --- use ----------------------------------------------------------------------------------------------------------

    def touch(self, name: str, now_ns: int) -> None:
        """A dispatch uses the model. Cheap for the one that was used last."""
        entry = self._recent
        if entry is not None and entry.name == name:
            self._uses += 1
            self._ghosts.repeats += 1
        else:
            entry = self._find(name)
            if not entry.reserved:
                self._uses += 1
                footprint = entry.footprint
                shared = footprint.nbytes - footprint.private
                self._ghosts.use(entry, footprint.private, footprint.backbone, shared)
                self._recent = None
                if entry.state is State.RESIDENT:
                    self._lru.move_to_end(entry)
                    self._recent = entry
        entry.last_used_ns = now_ns
        self._rates.note(entry, self._entries.values(), now_ns)

    # --- loads --------------------------------------------------------------------------------------------------------

    def plan_load(
        self,
        name: str,
        *,
        in_use: Callable[[str], bool],
        protected: Callable[[str], bool],
        everything: bool = False,
        forced: bool = False,
    ) -> Plan:
        """Who leaves for `name`. Changes nothing.

        Args:
            in_use: whether staged or running work uses a model; such a victim is waited for.
            protected: whether a model was loaded for requests that had no turn yet; it is not a victim.
            everything: all that may leave does, to try again after the device ran out of memory.
            forced: although the ledger is externally managed.

        Raises NotResident when it is externally managed, and DeviceOutOfMemory when pinned models leave no room.
        """
        entry = self._require_cold(name)
        if self._externally_managed and not forced:
            raise refusals.not_by_itself(name)
        trial = Trial(self._holdings, entry.footprint, reserved=entry.reserved)
        if entry.reserved and trial.reserved > self._arena:
            raise refusals.no_room_to_stay(name, entry.footprint.nbytes, reserved=trial.reserved, arena=self._arena)
        occupants = self._occupants(in_use, protected)
        chosen = choose(trial, self._limit(trial.reserved), occupants, everything=everything)
        exceeds = entry.reserved and trial.reserved > self._budget.weight_pool
        if not chosen.fits:
            self._require_alone(entry, trial, occupants)
            exceeds = True
        if chosen.blocked:
            return Plan(blocked=_names(chosen.blocked), need=chosen.missing, exceeds=exceeds)
        return Plan(_names(chosen.victims), _names(chosen.waits_for), need=chosen.missing, exceeds=exceeds)

    def begin(self, name: str, plan: Plan, *, reason: EvictReason = "room") -> None:
        """Carry out a plan of this moment: its victims are not resident any more, the place of `name` is taken."""
        entry = self._require_cold(name)
        if plan.blocked:
            raise ValueError(f"the load of model {name!r} is blocked by {', '.join(plan.blocked)}")
        victims = [self._find(victim) for victim in plan.victims]
        for victim in victims:
            if victim not in self._lru or victim.flagged:
                raise ValueError(f"the plan to load model {name!r} is outdated: {victim.name!r} cannot be evicted")
        for victim in victims:
            self._leave(victim, reason)
        entry.state = State.LOADING
        self._loading[entry] = None
        self._holdings.hold(entry.footprint, reserved=entry.reserved)
        self._rebudget()

    def commit(self, name: str, load_seconds: float, now_ns: int) -> None:
        """The load ended: the model is resident, and the last to be evicted by LRU."""
        entry = self._require_loading(name)
        del self._loading[entry]
        entry.loaded(load_seconds, now_ns)
        self._loads += 1
        self._load_seconds += load_seconds
        if not entry.reserved:
            self._lru[entry] = None
            self._recent = None

    def fail(self, name: str) -> None:
        """The load failed: the place is free again. Its victims stay evicted."""
        self._leave(self._require_loading(name), "unload")
        self._rebudget()

    # --- eviction -----------------------------------------------------------------------------------------------------

    def evict(self, names: Iterable[str], reason: EvictReason) -> tuple[str, ...]:
        """Those of `names` that are resident and may go are not any more; they are returned, for the caller to free.

        Pinned models, by floor or flag, go only for `unload` and `floor`.
        """
        ordered = reason in ("unload", "floor")
        leaving = []
        for entry in map(self._find, dict.fromkeys(names)):
            evictable = entry in self._lru and not entry.flagged
            if entry.state is State.RESIDENT and (evictable or ordered):
                self._leave(entry, reason)
                leaving.append(entry)
        if reason == "compaction":
            self._compactions += 1
        elif reason == "idle":
            self._idle_reclaims += len(leaving)
        self._rebudget()
        return _names(leaving)

    def plan_shrink(self, *, in_use: Callable[[str], bool], protected: Callable[[str], bool]) -> tuple[str, ...]:
        """Who has to leave, in order, because the budget shrank: after `add`, `note_scratch`, `set_floor`.

        Protected models stay, and so does one that is larger than the budget and alone. Changes nothing.
        """
        occupants = self._occupants(in_use, protected)
        movable = [*occupants.idle, *occupants.busy]
        alone = None if occupants.held or occupants.flagged or not movable else movable[-1]
        trial, victims = Trial(self._holdings), []
        for entry in movable:
            fits = trial.on_demand <= self._budget.on_demand
            if fits or (entry is alone and self._may_exceed(trial.on_demand)):
                break
            trial.without(entry.footprint)
            victims.append(entry)
        return _names(victims)

    def plan_trim(
        self, target: int, *, in_use: Callable[[str], bool], protected: Callable[[str], bool]
    ) -> tuple[str, ...]:
        """Who leaves, the least recently used first, so that at most `target` bytes are taken, pinned ones included.

        What is in use, protected or pinned stays, so that it may remain more. Changes nothing.
        """
        trial, victims = Trial(self._holdings), []
        for entry in self._lru:
            if trial.reserved + trial.on_demand <= target:
                break
            if not (entry.flagged or protected(entry.name) or in_use(entry.name)):
                trial.without(entry.footprint)
                victims.append(entry)
        return _names(victims)

    def compactable(self) -> tuple[str, ...]:
        """What a compaction frees: all that may be evicted, the least recently used first."""
        return _names(entry for entry in self._lru if not entry.flagged)

    def compacted(self) -> tuple[str, ...]:
        """All that is `compactable` leaves, which counts as one compaction and as no eviction."""
        return self.evict(self.compactable(), "compaction")

    # --- floors -------------------------------------------------------------------------------------------------------

    def require_pinnable(self, name: str, floor: Floor) -> None:
        """Raises DeviceOutOfMemory when pinned weights, scratch and slack would not fit into the arena with `name` at
        that floor, or would leave no room for what is pinned by flag (4.3)."""
        entry = self._find(name)
        if entry.reserved or not is_reserved(floor, unified=self._unified):
            return
        if entry.held:
            self._holdings.release(entry.footprint, reserved=False)
        trial = Trial(self._holdings, entry.footprint, reserved=True)
        for each in (*self._lru, *self._loading):
            if each is not entry and not each.reserved and not each.flagged:
                trial.without(each.footprint)
        if entry.held:
            self._holdings.hold(entry.footprint, reserved=False)
        if trial.reserved + self._scratch > self._ceiling or trial.on_demand > self._limit(trial.reserved):
            raise refusals.no_room_to_pin(
                name, trial, scratch=self._scratch, slack=self.wiggle_bytes, arena=self._arena
            )

    def set_floor(self, name: str, floor: Floor) -> FloorChange:
        """Change the floor of a model, and say what has to move; `plan_shrink` afterwards.

        What comes out of the reserve and is resident can be evicted last; when the ledger is externally managed, it
        leaves the device. Raises DeviceOutOfMemory as `require_pinnable`, and then nothing changed.
        """
        entry = self._find(name)
        old = entry.floor
        if floor is old:
            return FloorChange(old, floor)
        self.require_pinnable(name, floor)
        reserved = is_reserved(floor, unified=self._unified)
        free = self._externally_managed and not reserved and entry.held
        if free and entry.state is State.LOADING:
            raise ValueError(
                f"model {name!r} is being loaded; its floor cannot become {floor.value!r} before that ends"
            )
        if free:
            self._leave(entry, "floor")
        elif entry.held and reserved is not entry.reserved:
            self._holdings.release(entry.footprint, reserved=entry.reserved)
            self._holdings.hold(entry.footprint, reserved=reserved)
        entry.floor, entry.reserved = floor, reserved
        self._recent = None
        if reserved:
            self._lru.pop(entry, None)
            self._ghosts.forget(entry)
        elif entry.state is State.RESIDENT:
            self._lru[entry] = None
            self._lru.move_to_end(entry)
        self._rebudget()
        load = reserved and entry.state is State.COLD
        if self._unified or floor is Floor.DEVICE:
            return FloorChange(old, floor, load=load, free=free)
        return FloorChange(old, floor, load=load, free=free, host="materialise" if floor is Floor.SYSTEM else "drop")

    # --- what is known ------------------------------------------------------------------------------------------------

    def snapshot(self, now_ns: int) -> LedgerSnapshot:
        """All counters and states at `now_ns`."""
        per_second = self._rates.per_second(now_ns)
        loading = [entry for entry in self._loading if not entry.reserved]
        fixed = [*loading, *(entry for entry in self._lru if entry.flagged)]
        return LedgerSnapshot(
            externally_managed=self._externally_managed,
            policy=self._policy,
            budget=self._budget,
            resident_bytes=self._holdings.on_demand,
            pending_bytes=sum(self._holdings.freed(entry.footprint) for entry in loading),
            evictable_bytes=self._holdings.on_demand - self._holdings.kept(entry.footprint for entry in fixed),
            uses=self._uses,
            loads=self._loads,
            load_seconds=self._load_seconds,
            evicts=dict(self._evicts),
            compactions=self._compactions,
            lru=tuple(IdleModel(entry.name, entry.idle_seconds(now_ns) or 0.0) for entry in self._lru),
            models={name: entry.at(now_ns, per_second) for name, entry in self._entries.items()},
            bytes_for_99_percent_hits=self._ghosts.bytes_for(0.99),
            idle_reclaims=self._idle_reclaims,
        )

    # --- small parts --------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"model {name!r} is not in the ledger") from None

    def _require_cold(self, name: str) -> Entry:
        entry = self._find(name)
        if entry.held:
            raise ValueError(f"model {name!r} is already {entry.state.value}")
        return entry

    def _require_loading(self, name: str) -> Entry:
        entry = self._find(name)
        if entry.state is not State.LOADING:
            raise ValueError(f"model {name!r} is not being loaded, but {entry.state.value}")
        return entry

    def _rebudget(self) -> None:
        self._budget = resolve_budget(
            self._arena,
            pinned=self._holdings.reserved,
            max_scratch=self._scratch,
            fraction=self._fraction,
            wiggle=self._wiggle,
        )

    @property
    def _ceiling(self) -> int:
        return math.floor((1 - self._wiggle) * self._arena)

    def _limit(self, reserved: int) -> int:
        """The budget of on-demand weights with that many bytes in the reserve."""
        return max(self._budget.weight_pool - reserved, 0)

    def _may_exceed(self, nbytes: int) -> bool:
        """Whether a model that is alone may be larger than the budget: not when it is the pinned ones that leave it no
        room in the arena."""
        return nbytes > self._budget.weight_pool or self._budget.pinned + nbytes <= self._arena

    def _require_alone(self, entry: Entry, trial: Trial, occupants: Occupants) -> None:
        """Raises DeviceOutOfMemory unless a model that exceeds the budget, with all gone that can go, may go on."""
        limit, nbytes = self._limit(trial.reserved), entry.footprint.nbytes
        if occupants.flagged:
            raise refusals.no_room_beside_flagged(entry.name, nbytes, limit, _names(occupants.flagged))
        if not self._may_exceed(trial.on_demand):
            raise refusals.no_room_beside_pinned(entry.name, nbytes, reserved=trial.reserved, arena=self._arena)

    def _leave(self, entry: Entry, reason: EvictReason) -> None:
        """Its bytes are free. What was resident on demand counts as evicted, and what a change of its floor frees."""
        if not entry.held:
            return
        self._holdings.release(entry.footprint, reserved=entry.reserved)
        self._loading.pop(entry, None)
        evicted = reason == "floor" or (entry in self._lru and reason in EVICT_REASONS)
        self._lru.pop(entry, None)
        if evicted and entry.state is State.RESIDENT:
            self._evicts[reason] += 1
            entry.evicts += 1
        entry.state = State.COLD
        if self._recent is entry:
            self._recent = None

    def _occupants(self, in_use: Callable[[str], bool], protected: Callable[[str], bool]) -> Occupants:
        idle, busy, flagged = [], [], []
        held = [entry for entry in self._loading if not entry.reserved]
        for entry in self._by_policy():
            if entry.flagged:
                flagged.append(entry)
            elif protected(entry.name):
                held.append(entry)
            elif in_use(entry.name):
                busy.append(entry)
            else:
                idle.append(entry)
        return Occupants(idle, busy, held, flagged)

    def _by_policy(self) -> list[Entry]:
        if self._policy == "lru":
            return [*self._lru]
        return sorted(self._lru, key=lambda entry: worth(entry, self._holdings.freed(entry.footprint)))


def _names(entries: Iterable[Entry]) -> tuple[str, ...]:
    return tuple(entry.name for entry in entries)
