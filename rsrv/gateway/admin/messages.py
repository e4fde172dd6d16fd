"""The gateway's control messages, made of what packing and fleet tell. No decisions are made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rsrv.core.config.gateway import Replicas
from rsrv.gateway.scheduling.knobs import POLICY_FIELDS
from rsrv.protos import control as pb

if TYPE_CHECKING:
    from rsrv.gateway.routing.table import RoutingTable
    from rsrv.gateway.scheduling.knobs import Knobs
    from rsrv.gateway.scheduling.reports import ModelStatus, PackingStatus, WorkerStatus
    from rsrv.gateway.workers.worker import Worker

ALL = -1
"""What stands for ``all`` on the wire, where a number of replicas does; 0 stands for none of its own."""


def replicas_on_wire(replicas: Replicas | None) -> int:
    return 0 if replicas is None else ALL if replicas == "all" else replicas


def policy_message(knobs: Knobs) -> pb.SchedulingPolicy:
    values = {**knobs.policy(), "default_replicas": replicas_on_wire(knobs.default_replicas)}
    return pb.SchedulingPolicy(**values, generation=knobs.generation)


def policy_values(policy: pb.SchedulingPolicy, mask: Iterable[str]) -> dict[str, Any]:
    """The masked fields as `Knobs.changed` takes them; of names that are no such field, None."""
    values = {name: getattr(policy, name) if name in POLICY_FIELDS else None for name in mask}
    if values.get("default_replicas") == ALL:
        values["default_replicas"] = "all"
    return values


def repack_message(status: PackingStatus) -> pb.RepackStatus:
    message = pb.RepackStatus(
        last_trigger="none",
        repack_count=status.repack_count,
        active_threshold_seconds=threshold(status),
        repacks_since_compaction=status.since_compaction,
        operator_repacks_requested=status.requested,
        operator_repacks_completed=status.completed,
    )
    if status.repack is not None:
        message.last_repack_unix_seconds = status.repack.unix_seconds
        message.last_repack_wall_elapsed_seconds = status.repack.wall
        message.last_repack_compute_seconds = status.repack.compute
        message.last_trigger = status.repack.trigger
        message.last_models_placed = len(status.repack.assignment)
        message.last_models_moved = len(status.repack.moved)
    if status.tick is not None:
        message.compute_accumulated_seconds = status.tick.accumulated
        message.first_tick_repack_done = status.tick.first_done
        message.last_tick_unix_seconds = status.tick.unix_seconds
    return message


def threshold(status: PackingStatus) -> float:
    """Device seconds since the last repack at which the next one comes, by the knobs of this moment."""
    return status.knobs.repack_budget(first_done=status.tick is not None and status.tick.first_done)


def status_message(
    mode: str, status: PackingStatus, name_of: Callable[[str], str], draining: frozenset[str]
) -> pb.GetSchedulingStatusResponse:
    return pb.GetSchedulingStatusResponse(
        mode=mode,
        policy=policy_message(status.knobs),
        repack=repack_message(status),
        models=[_model(row, name_of) for row in status.models],
        workers=[_worker(row, name_of, draining) for row in status.workers],
        warnings=sorted(status.warnings),
    )


def _model(row: ModelStatus, name_of: Callable[[str], str]) -> pb.ModelSchedulingStatus:
    return pb.ModelSchedulingStatus(
        name=row.name,
        configured_replicas=replicas_on_wire(row.configured_replicas),
        effective_replicas=len(row.replicas),
        replicas=[
            pb.ReplicaPlacement(
                worker=one.worker,
                weight=one.weight,
                outstanding=one.outstanding,
                routed_total=one.routed,
                worker_name=name_of(one.worker),
            )
            for one in row.replicas
        ],
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


def _worker(row: WorkerStatus, name_of: Callable[[str], str], draining: frozenset[str]) -> pb.WorkerSchedulingStatus:
    return pb.WorkerSchedulingStatus(
        worker=row.worker,
        ready=row.ready,
        models_placed=row.models_placed,
        inflight_compute=row.inflight,
        assigned_weight_bytes=row.assigned_bytes,
        weight_budget_bytes=row.budget_bytes,
        oversubscribed=row.oversubscribed,
        name=name_of(row.worker),
        draining=row.worker in draining,
    )


def worker_message(worker: Worker, table: RoutingTable) -> pb.FleetWorker:
    return pb.FleetWorker(
        worker=worker.url,
        name=worker.name,
        metrics=worker.metrics or "",
        source=worker.source,
        ready=worker.ready,
        draining=worker.draining,
        inflight=worker.inflight,
        waiting=worker.waiting,
        incarnation=worker.incarnation,
        discipline=worker.discipline,
        models=sum(1 for model in table.models if worker.url in table.urls(model)),
    )
