"""What a gateway answers those who control it, as frozen records, and how they are made of its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ALL = -1
"""What stands for "all workers" on the wire, where a number of replicas does; 0 stands for none of its own."""

Replicas = int | Literal["all", "default"]
"""A number of copies of a model: a count, one on each worker, or what the gateway does by default."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """What the scheduling of a gateway goes by; docs/configuration-gateway.md explains each under ``scheduling``.

    Attributes:
        default_replicas: above 0, or "all".
        generation: how often it was changed since the gateway started; 0 = as configured.
    """

    rebalance_compute_seconds: float
    first_rebalance_compute_seconds: float
    hysteresis: float
    ema_halflife_compute_seconds: float
    default_replicas: Replicas
    routing_policy: str
    routing_fill_factor: float
    routing_fill_mode: str
    compaction_mode: str
    compaction_interval: int
    forbid_memory_oversubscription: bool
    work_basis: str
    generation: int


@dataclass(frozen=True, slots=True)
class Repacks:
    """When models were placed anew, and what is missing until they are again.

    Attributes:
        last_unix_seconds: 0 = never.
        last_wall_seconds, last_compute_seconds: wall and device time that the last one looked back on.
        last_trigger: none, startup, compute, operator, membership or models.
        last_placed, last_moved: models.
        count: how many there were.
        accumulated_seconds: device time since the last one; the next one comes at `threshold_seconds`.
        first_done: whether the first one that device time led to has been, so that its own threshold is history.
        last_tick_unix_seconds: when the gateway last looked at its workers; 0 = never.
        since_compaction: repacks since memory was last compacted.
        requested, completed: how many operators asked for, and got.
    """

    last_unix_seconds: float
    last_wall_seconds: float
    last_compute_seconds: float
    last_trigger: str
    last_placed: int
    last_moved: int
    count: int
    accumulated_seconds: float
    threshold_seconds: float
    first_done: bool
    last_tick_unix_seconds: float
    since_compaction: int
    requested: int
    completed: int


@dataclass(frozen=True, slots=True)
class Replica:
    """A model on a worker: `weight` is its share of the model's traffic, `outstanding` counts items in flight there,
    `routed` the requests that ever went there."""

    worker: str
    name: str
    weight: float
    outstanding: int
    routed: int


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model as the scheduling sees it.

    Attributes:
        configured_replicas: "default" = no number of its own.
        effective_replicas: on how many workers it is placed.
        utilization: devices that it keeps busy: `arrival_rate` (requests a second) × `cost_seconds` (of each).
        max_batch: most items that are merged; 0 = unknown.
        fill_mode: run, spread or inflight; unknown before a plan is made.
        fill_quantum: items that go to one replica before the next one's turn.
        weight_nbytes: bytes of its weights.
        drifted: not all workers have it, so that it is on those that do.
    """

    name: str
    configured_replicas: Replicas
    effective_replicas: int
    replicas: tuple[Replica, ...]
    utilization: float
    arrival_rate: float
    cost_seconds: float
    max_batch: int
    fill_mode: str
    fill_quantum: int
    weight_nbytes: int
    placed: bool
    drifted: bool


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """A worker as the scheduling sees it; `inflight_work` is in the unit of the work basis, `budget_bytes` 0 = weights
    are no constraint there."""

    worker: str
    name: str
    ready: bool
    draining: bool
    models_placed: int
    inflight_work: float
    assigned_bytes: int
    budget_bytes: int
    oversubscribed: bool


@dataclass(frozen=True, slots=True)
class SchedulingStatus:
    """How a gateway schedules; of another mode than lpt_packing there is only the mode."""

    mode: str
    policy: SchedulingPolicy | None = None
    repacks: Repacks | None = None
    models: tuple[PlacedModel, ...] = ()
    workers: tuple[PlacedWorker, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """What a change led to: the whole policy, what is to be known about it, whether a restart keeps it."""

    policy: SchedulingPolicy
    warnings: tuple[str, ...]
    persisted: bool


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """What a model is told now: replicas that it has at the next repack, and how they are filled from now on."""

    name: str
    configured_replicas: Replicas
    effective_replicas: int
    fill_mode: str
    fill_quantum: int
    warnings: tuple[str, ...]
    persisted: bool


@dataclass(frozen=True, slots=True)
class RepackDone:
    """A repack that was asked for: `completed` is false when it was not there yet after `waited_seconds`."""

    sequence: int
    completed_sequence: int
    completed: bool
    waited_seconds: float
    repacks: Repacks
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker of the fleet.

    Attributes:
        worker, metrics: host:port of its gRPC port and of its HTTP port; the latter is "" when not known.
        source: where the gateway has it from: config, file, dns or control.
        inflight: requests that it has; `waiting` is how many wait for it in the gateway.
        incarnation: another one each time that it starts; "" = not known yet.
        models: how many are routed there.
    """

    worker: str
    name: str
    metrics: str
    source: str
    ready: bool
    draining: bool
    inflight: int
    waiting: int
    incarnation: str
    discipline: str
    models: int


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A worker after the gateway was told something about it, and whether a restart of the gateway keeps that."""

    worker: FleetWorker
    persisted: bool


def knob_names() -> tuple[str, ...]:
    """The names that `Gateway.set_policy` takes."""
    from rsrv.protos import control

    return tuple(field.name for field in control.SchedulingPolicy.DESCRIPTOR.fields if field.name != "generation")


def replicas_of(number: int) -> Replicas:
    return "all" if number == ALL else number or "default"


def policy_of(policy: Any) -> SchedulingPolicy:
    values = {name: getattr(policy, name) for name in (*knob_names(), "generation")}
    return SchedulingPolicy(**{**values, "default_replicas": replicas_of(policy.default_replicas)})


def repacks_of(row: Any) -> Repacks:
    return Repacks(
        last_unix_seconds=row.last_repack_unix_seconds,
        last_wall_seconds=row.last_repack_wall_elapsed_seconds,
        last_compute_seconds=row.last_repack_compute_seconds,
        last_trigger=row.last_trigger,
        last_placed=row.last_models_placed,
        last_moved=row.last_models_moved,
        count=row.repack_count,
        accumulated_seconds=row.compute_accumulated_seconds,
        threshold_seconds=row.active_threshold_seconds,
        first_done=row.first_tick_repack_done,
        last_tick_unix_seconds=row.last_tick_unix_seconds,
        since_compaction=row.repacks_since_compaction,
        requested=row.operator_repacks_requested,
        completed=row.operator_repacks_completed,
    )


def placed_model(row: Any) -> PlacedModel:
    return PlacedModel(
        name=row.name,
        configured_replicas=replicas_of(row.configured_replicas),
        effective_replicas=row.effective_replicas,
        replicas=tuple(
            Replica(one.worker, one.worker_name or one.worker, one.weight, one.outstanding, one.routed_total)
            for one in row.replicas
        ),
        utilization=row.utilization,
        arrival_rate=row.arrival_rate,
        cost_seconds=row.cost_seconds,
        max_batch=row.max_batch,
        fill_mode=row.fill_mode,
        fill_quantum=row.fill_quantum,
        weight_nbytes=row.weight_nbytes,
        placed=row.placed,
        drifted=row.drifted,
    )


def placed_worker(row: Any) -> PlacedWorker:
    return PlacedWorker(
        worker=row.worker,
        name=row.name or row.worker,
        ready=row.ready,
        draining=row.draining,
        models_placed=row.models_placed,
        inflight_work=row.inflight_compute,
        assigned_bytes=row.assigned_weight_bytes,
        budget_bytes=row.weight_budget_bytes,
        oversubscribed=row.oversubscribed,
    )


def fleet_worker(row: Any) -> FleetWorker:
    return FleetWorker(
        worker=row.worker,
        name=row.name or row.worker,
        metrics=row.metrics,
        source=row.source,
        ready=row.ready,
        draining=row.draining,
        inflight=row.inflight,
        waiting=row.waiting,
        incarnation=row.incarnation,
        discipline=row.discipline,
        models=row.models,
    )


def fleet_change(answer: Any) -> FleetChange:
    return FleetChange(fleet_worker(answer.worker), answer.persisted)
