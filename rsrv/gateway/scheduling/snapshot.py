"""From the parts of packing to one `PackingStatus`: which models and workers are shown, and what each row says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rsrv.gateway.scheduling.costs import Costs
from rsrv.gateway.scheduling.fill import FillPlan
from rsrv.gateway.scheduling.knobs import Knobs
from rsrv.gateway.scheduling.replicas import ReplicaRouting
from rsrv.gateway.scheduling.reports import (
    ModelStatus,
    PackingStatus,
    RepackReport,
    ReplicaStatus,
    TickReport,
    Trigger,
    WorkerStatus,
)

NO_REPACK = "no repack yet: requests go to any worker that has the model until there is a placement"


@dataclass(frozen=True, slots=True)
class Facts:
    """What packing knows at one moment: attributes of `PackingStatus`, and its parts by their names.

    `listed` are the models that workers have: costs and batches are kept of others too, for when they are back.
    """

    knobs: Knobs
    tick: TickReport | None
    repack: RepackReport | None
    requested: int
    completed: int
    repacks: Mapping[Trigger, int]
    since_compaction: int
    retired: frozenset[tuple[str, str]]
    routing: ReplicaRouting
    costs: Costs
    plans: Mapping[str, FillPlan]
    budgets: Mapping[str, int]
    listed: Collection[str]


def snapshot(facts: Facts) -> PackingStatus:
    """Models are those placed, overridden, or listed with a known batch; workers those with a budget, a model, or
    readiness."""
    placed = facts.routing.assignment
    models = sorted({*placed, *facts.knobs.models, *(m for m in facts.costs.max_batch if m in facts.listed)})
    warnings = facts.knobs.inflight_warnings()
    if facts.repack is None:
        warnings.append(NO_REPACK)
    return PackingStatus(
        knobs=facts.knobs,
        tick=facts.tick,
        repack=facts.repack,
        requested=facts.requested,
        completed=facts.completed,
        repacks=facts.repacks,
        since_compaction=facts.since_compaction,
        models=tuple(_model(name, facts) for name in models),
        workers=_workers(facts),
        warnings=tuple(sorted(warnings)),
        retired=facts.retired,
    )


def _model(name: str, facts: Facts) -> ModelStatus:
    repack, fill = facts.repack, facts.plans.get(name)
    shares = dict(facts.routing.assignment.get(name, ()))
    replicas = tuple(
        ReplicaStatus(one.url, shares[one.url], one.outstanding, one.routed) for one in facts.routing.replicas(name)
    )
    return ModelStatus(
        name=name,
        configured_replicas=facts.knobs.override(name).replicas,
        replicas=replicas,
        utilization=repack.utilization.get(name, 0.0) if repack else 0.0,
        arrival_rate=repack.rates.get(name, 0.0) if repack else 0.0,
        cost_seconds=repack.costs.get(name, 0.0) if repack else 0.0,
        max_batch=facts.costs.max_batch.get(name, 0),
        fill_mode=fill.mode if fill else "unknown",
        fill_quantum=fill.quantum if fill else 1,
        weight_nbytes=repack.weights.get(name, 0) if repack else 0,
        placed=bool(replicas),
        drifted=repack is not None and name in repack.drifted,
    )


def _workers(facts: Facts) -> tuple[WorkerStatus, ...]:
    ready = set(facts.tick.ready) if facts.tick else set()
    weights = facts.repack.weights if facts.repack else {}
    counts: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for model, homes in facts.routing.assignment.items():
        for url, _ in homes:
            counts[url] = counts.get(url, 0) + 1
            nbytes[url] = nbytes.get(url, 0) + weights.get(model, 0)
    loads = facts.routing.loads(facts.knobs.work_basis)
    return tuple(
        WorkerStatus(
            worker=url,
            ready=url in ready,
            models_placed=counts.get(url, 0),
            inflight=loads.get(url, 0.0),
            assigned_bytes=nbytes.get(url, 0),
            budget_bytes=facts.budgets.get(url, 0),
        )
        for url in sorted({*ready, *counts, *facts.budgets})
    )
