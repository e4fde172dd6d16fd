"""What packing tells about itself: the last tick, the last repack, and a snapshot for control plane and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rsrv.core.config.gateway import Replicas
from rsrv.gateway.scheduling.knobs import Knobs
from rsrv.gateway.scheduling.placement import Assignment

Trigger = Literal["startup", "compute", "operator", "membership", "models"]


@dataclass(frozen=True, slots=True)
class TickReport:
    """One round of the prober.

    Attributes:
        unix_seconds: when.
        ready: the workers that were ready, sorted.
        accumulated: device seconds since the last repack, 0 right after one.
        threshold: at how many the next repack comes.
        first_done: whether the separate budget of the first repack is used up.
    """

    unix_seconds: float
    ready: tuple[str, ...]
    accumulated: float
    threshold: float
    first_done: bool


@dataclass(frozen=True)
class RepackReport:
    """One placement, and what it was made of.

    Attributes:
        unix_seconds: when.
        wall: seconds since the repack before it, 0 for the first.
        compute: device seconds of the fleet since then.
        trigger: what caused it.
        assignment: the placement, drifted models included.
        moved: models that were placed before and are now on other workers, sorted.
        changed: workers that lost or got one of those, or had a model that disappeared; sorted.
        held: models that hysteresis kept where they were.
        best_improvement: by how much the best of the moves that hysteresis judged would have lowered pressure.
        utilization: model → device seconds a second that it needs; 0 = cold.
        rates: model → requests a second.
        costs: model → device seconds a request.
        weights: model → bytes of its weights.
        budgets: worker → bytes for weights, 0 = no constraint.
        polled: the workers that the placement was made for, sorted.
        drifted: models that not all of them have → those that have it.
    """

    unix_seconds: float
    wall: float
    compute: float
    trigger: Trigger
    assignment: Assignment
    moved: tuple[str, ...]
    changed: tuple[str, ...]
    held: int
    best_improvement: float
    utilization: Mapping[str, float]
    rates: Mapping[str, float]
    costs: Mapping[str, float]
    weights: Mapping[str, int]
    budgets: Mapping[str, int]
    polled: tuple[str, ...]
    drifted: Mapping[str, tuple[str, ...]]

    def assigned_bytes(self, worker: str) -> int:
        """Weights of all models that are placed on the worker."""
        return sum(
            self.weights.get(model, 0)
            for model, homes in self.assignment.items()
            if any(url == worker for url, _ in homes)
        )


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica of a placed model: its share, the items in flight, and the requests that it was ever given."""

    worker: str
    weight: float
    outstanding: int
    routed: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model as ``GetSchedulingStatus`` shows it; `configured_replicas` None = no override."""

    name: str
    configured_replicas: Replicas | None
    replicas: tuple[ReplicaStatus, ...]
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
class WorkerStatus:
    """One worker; `inflight` is in the unit of the work basis, a `budget_bytes` of 0 is no constraint."""

    worker: str
    ready: bool
    models_placed: int
    inflight: float
    assigned_bytes: int
    budget_bytes: int

    @property
    def oversubscribed(self) -> bool:
        return 0 < self.budget_bytes < self.assigned_bytes


@dataclass(frozen=True)
class PackingStatus:
    """Everything at one moment; models and workers are sorted by name.

    Attributes:
        tick, repack: None before the first one.
        requested, completed: repacks that operators asked for, and how many of those are done.
        repacks: trigger → how many there were, startup included.
        since_compaction: repacks since workers were last told to compact.
        retired: (model, worker) of replicas that are no more, for gauges that go to 0 before they go away.
    """

    knobs: Knobs
    tick: TickReport | None
    repack: RepackReport | None
    requested: int
    completed: int
    repacks: Mapping[Trigger, int]
    since_compaction: int
    models: tuple[ModelStatus, ...]
    workers: tuple[WorkerStatus, ...]
    warnings: tuple[str, ...]
    retired: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    @property
    def repack_count(self) -> int:
        return sum(self.repacks.values())
