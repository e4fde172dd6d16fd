"""`LptPacking`: each model's requests go to few workers, so that batches fill and weights stay resident."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rsrv.gateway.scheduling.compaction import after_repack
from rsrv.gateway.scheduling.costs import CostCache, Costs, mean
from rsrv.gateway.scheduling.demand import Demand
from rsrv.gateway.scheduling.fill import UNPLANNED, FillPlan, fill_plans
from rsrv.gateway.scheduling.knobs import Knobs, ModelOverride
from rsrv.gateway.scheduling.load import work
from rsrv.gateway.scheduling.members import Members
from rsrv.gateway.scheduling.modes import Choice, Note
from rsrv.gateway.scheduling.repack import Plan, drift_warnings, plan, preconditions, retired_labels
from rsrv.gateway.scheduling.replicas import ReplicaRouting, Reservation
from rsrv.gateway.scheduling.reports import PackingStatus, RepackReport, TickReport, Trigger
from rsrv.gateway.scheduling.simple import avoided_last
from rsrv.gateway.scheduling.snapshot import Facts, snapshot
from rsrv.gateway.scheduling.triggers import Triggers
from rsrv.gateway.workers.poll import Poll

MAX_NOTES = 1000
"""Notes that are kept for whoever logs them."""


class LptPacking:
    """The mode ``lpt_packing`` (spec gateway-node 2.6). Like every mode it runs under the router's lock; so do all of
    the methods that are its own: the caller holds the lock.

    Attributes:
        knobs: what operators may change; read once per tick and request.
        wake: starts a round of the prober at once; called by `request_repack` under the lock, so it must be quick.
        compact: takes worker → models to load again, and has it done on another thread; must be quick.
        requested: how many repacks operators asked for, ever; `completed`: how many of those are done.
    """

    name = "lpt_packing"
    needs_poll = True
    spreads = False

    def __init__(
        self,
        knobs: Knobs,
        *,
        wake: Callable[[], None] = lambda: None,
        compact: Callable[[Mapping[str, list[str]]], None] = lambda work: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives Unix seconds, for reports only."""
        self.knobs = knobs
        self.wake = wake
        self.compact = compact
        self.requested = 0
        self.completed = 0
        self._clock = clock
        self._members = Members()
        self._triggers = Triggers()
        self._demand = Demand()
        self._cache = CostCache()
        self._routing = ReplicaRouting()
        self._plans: Mapping[str, FillPlan] = {}
        self._request_costs = Costs()
        self._since_compaction = 0
        self._repacked_at: float | None = None
        self._repacks: dict[Trigger, int] = {}
        self._retired: frozenset[tuple[str, str]] = frozenset()
        self._tick: TickReport | None = None
        self._repack: RepackReport | None = None
        self._budgets: Mapping[str, int] = {}
        self._listed: Collection[str] = ()
        self._notes: list[Note] = []

    # --- the prober and the control plane -----------------------------------------------------------------------------

    def start(self, ready: Sequence[str], poll: Poll, now: float) -> None:
        """The first placement, of what the workers that answered report (trigger ``startup``). It neither uses up the
        budget of the first repack nor compacts. The notes tell what would make packing work better."""
        for text in [*preconditions(poll), *self.knobs.inflight_warnings()]:
            self._note(logging.WARNING, text)
        self._round(ready, poll, now)

    def tick(self, ready: Sequence[str], poll: Poll, now: float) -> None:
        self._round(ready, poll, now)

    def change(self, /, **values: Any) -> Knobs:
        """`Knobs.changed`, installed: fill plans, the work basis and the half-life hold from now on, the rest from the
        next tick or repack. Returns the new record; raises InvalidRequest and changes nothing."""
        return self._install(self.knobs.changed(**values))

    def set_override(self, model: str, override: ModelOverride) -> Knobs:
        """`Knobs.with_override`, installed: the fill plan holds from now on, replicas from the next repack."""
        return self._install(self.knobs.with_override(model, override))

    def request_repack(self) -> int:
        """Ask for a repack in the next tick, which comes at once; its number, done when `completed` is as high."""
        self.requested += 1
        self.wake()
        return self.requested

    def take_notes(self) -> list[Note]:
        """(level of `logging`, text) of what has happened since the last call, to be logged without the lock."""
        notes, self._notes = self._notes, []
        return notes

    def status(self) -> PackingStatus:
        """Everything at this moment, for the control plane and for metrics."""
        return snapshot(
            Facts(
                knobs=self.knobs,
                tick=self._tick,
                repack=self._repack,
                requested=self.requested,
                completed=self.completed,
                repacks=dict(self._repacks),
                since_compaction=self._since_compaction,
                retired=self._retired,
                routing=self._routing,
                costs=self._cache.costs,
                plans=self._plans,
                budgets=self._budgets,
                listed=self._listed,
            )
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def record_arrival(self, model: str) -> None:
        self._demand.arrived(model)

    def request_units(self, model: str, body: bytes) -> int:
        """Items of the request. Raises InvalidRequest for a malformed body."""
        return self._cache.costs.items(body, model)

    def select(self, model: str, units: int, picked: Sequence[str], avoid: Collection[str]) -> Choice | None:
        homes = self._routing.replicas(model)
        if not homes:
            return Choice(avoided_last(picked, avoid)) if picked else None
        for home in homes:
            if home.url not in picked and picked:
                # The last look found the model gone there: a placement is older than that.
                avoid = {*avoid, home.url}
        knobs = self.knobs
        charge = work(
            knobs.work_basis,
            units,
            item_cost=self._cache.costs.item_cost(model),
            request_cost=self._request_costs.request_cost(model),
        )
        return self._routing.route(
            model,
            units,
            policy=knobs.routing_policy,
            basis=knobs.work_basis,
            charge=charge,
            plan=self._plans.get(model, UNPLANNED),
            avoid=avoid,
            picked=picked,
        )

    def move(self, reservation: Reservation | None, url: str) -> None:
        self._routing.move(reservation, url)

    def release(self, reservation: Reservation | None) -> None:
        self._routing.release(reservation)

    def forget(self, url: str) -> None:
        for part in (self._routing, self._cache, self._demand):
            part.forget(url)
        self._retired = frozenset(label for label in self._retired if label[1] != url)

    def inflight_work(self) -> tuple[str, Mapping[str, float]] | None:
        loads = self._routing.loads(self.knobs.work_basis)
        return (self.knobs.work_basis, loads) if loads else None

    # --- one round ----------------------------------------------------------------------------------------------------

    def _round(self, ready: Sequence[str], poll: Poll, now: float) -> None:
        # The counter before the knobs: a repack that is asked for after a change of knobs is made with them.
        requested, knobs = self.requested, self.knobs
        members = self._members.update(ready, poll)
        if members.workers:
            self._cache.update(members, knobs.ema_halflife_compute_seconds, now)
            self._triggers.accumulated += self._cache.consumed
            self._budgets = {**members.budgets, **poll.budgets}
            self._listed = members.hosts.keys()
        self._publish_plans()
        forced = requested > self.completed
        threshold = self._triggers.threshold(knobs)
        if members.workers and (trigger := self._triggers.due(members, knobs, now, forced=forced)) is not None:
            self._repack_now(trigger, members, knobs, now)
            threshold = self._triggers.threshold(knobs)
            if forced:
                self.completed = requested
        self._tick = TickReport(
            unix_seconds=self._clock(),
            ready=tuple(sorted(ready)),
            accumulated=self._triggers.accumulated,
            threshold=threshold,
            first_done=self._triggers.first_done,
        )

    def _repack_now(self, trigger: Trigger, members: Poll, knobs: Knobs, now: float) -> None:
        compute = self._triggers.accumulated
        wall = 0.0 if self._repacked_at is None else now - self._repacked_at
        self._demand.learn(members, compute, now, knobs.ema_halflife_compute_seconds)
        self._request_costs = Costs(per_request=dict(self._demand.costs), mean_request=mean(self._demand.costs))
        before = self._repack
        previous = self._routing.assignment
        found = plan(members, self._demand.utilization, previous, knobs)
        self._routing.install(found.assignment)
        self._triggers.done(trigger, members, now)
        self._retired = retired_labels(self._retired, previous, found.assignment, members)
        self._repacked_at = now
        self._repacks[trigger] = self._repacks.get(trigger, 0) + 1
        self._repack = report = RepackReport(
            unix_seconds=self._clock(),
            wall=wall,
            compute=compute,
            trigger=trigger,
            assignment=found.assignment,
            moved=found.moved,
            changed=found.changed,
            held=found.held,
            best_improvement=found.best_improvement,
            utilization=found.utilization,
            rates=dict(self._demand.rates),
            costs=dict(self._demand.costs),
            weights=members.weight_nbytes,
            budgets=members.budgets,
            polled=members.polled,
            drifted=found.drifted,
        )
        self._tell(report, before, knobs)
        if trigger != "startup":
            self._compact(found, members, knobs)

    def _compact(self, found: Plan, members: Poll, knobs: Knobs) -> None:
        compaction = after_repack(
            knobs.compaction_mode,
            knobs.compaction_interval,
            self._since_compaction,
            found.changed,
            members.polled,
            found.assignment,
        )
        self._since_compaction = compaction.since
        if compaction.work:
            self.compact(compaction.work)

    def _tell(self, report: RepackReport, before: RepackReport | None, knobs: Knobs) -> None:
        self._note(
            logging.INFO,
            f"models placed trigger={report.trigger} models={len(report.assignment)} moved={len(report.moved)} "
            f"held={report.held} best_improvement={report.best_improvement:.3f} hysteresis={knobs.hysteresis:g} "
            f"compute_seconds={report.compute:.1f} wall_seconds={report.wall:.1f} workers={len(report.polled)}",
        )
        for text in drift_warnings(report.drifted, before.drifted if before is not None else {}):
            self._note(logging.WARNING, text)
        for worker, budget in sorted(report.budgets.items()):
            if 0 < budget < (assigned := report.assigned_bytes(worker)):
                self._note(
                    logging.WARNING,
                    f"worker {worker}: models of {assigned} bytes are placed on it, and it has room for {budget}: it "
                    "will evict and load weights again and again; fewer replicas or another worker would help",
                )

    # --- settings -----------------------------------------------------------------------------------------------------

    def _install(self, knobs: Knobs) -> Knobs:
        self.knobs = knobs
        self._publish_plans()
        return knobs

    def _publish_plans(self) -> None:
        # The locators of batches come from the snapshot of costs, so that a change between two polls keeps them.
        costs, knobs = self._cache.costs, self.knobs
        self._plans = fill_plans(
            costs.max_batch,
            costs.batch_at,
            mode=knobs.routing_fill_mode,
            factor=knobs.routing_fill_factor,
            overrides=knobs.models,
        )

    def _note(self, level: int, text: str) -> None:
        self._notes.append((level, text))
        # The prober takes them each round; without one they must not pile up.
        del self._notes[:-MAX_NOTES]
