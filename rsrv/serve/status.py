"""Fills in the status document of a worker from live state; it is read, and never waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import rsrv
from rsrv.core.status import (
    AcceptedRequests,
    DeviceStatus,
    IdlePolicy,
    LoadedPrograms,
    ModelCounters,
    ModelError,
    ModelPrograms,
    ModelQueueStatus,
    ModelResidency,
    ModelStatus,
    NumericsStatus,
    QueueWait,
    ServerLimits,
    ServerStatus,
    TombstoneStatus,
    WeightBudget,
    WorkerStatus,
)
from rsrv.serve.metrics import largest_batch
from rsrv.serve.residency.view import residency_mode, whereabouts

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.serve.counters import RequestSnapshot
    from rsrv.serve.numerics import ServerNumerics
    from rsrv.serve.registry import Entry, Failure, Prepared
    from rsrv.serve.residency.operations import OperationError
    from rsrv.serve.residency.snapshot import LedgerSnapshot
    from rsrv.serve.scheduler.stats import ModelStats
    from rsrv.serve.sources import Sources


class StatusReport:
    """The status of one worker, whenever it is asked for. `clock` is monotonic seconds."""

    def __init__(
        self,
        sources: Sources,
        config: ServerConfig,
        *,
        worker: str | None,
        numerics: ServerNumerics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._config = config
        self._worker = worker
        self._numerics = numerics
        self._clock = clock
        self._began = clock()

    def document(self, model: str = "") -> WorkerStatus:
        """Of all models, or of one. Raises UnknownModel."""
        sources = self._sources
        entries = [sources.registry.find(model)] if model else sources.registry.entries()
        scheduled, residency = sources.scheduled(), sources.residency
        snapshot = None if residency is None else residency.snapshot()
        models = [self._model(entry, scheduled.get(entry.name), snapshot) for entry in entries]
        tombstones = () if sources.watcher is None else sources.watcher.tombstones()
        return WorkerStatus(
            server=self._server(),
            devices=[self._device(snapshot)],
            models=models,
            tombstones=[
                TombstoneStatus(name=one.name, signature=one.signature, since=one.since_unix)
                for one in tombstones
                if model in ("", one.name)
            ],
        )

    def device(self) -> DeviceStatus:
        """The device alone."""
        residency = self._sources.residency
        return self._device(None if residency is None else residency.snapshot())

    def json(self, model: str = "") -> bytes:
        """`document` as the HTTP port answers it."""
        return self.document(model).model_dump_json(indent=2).encode() + b"\n"

    def _server(self) -> ServerStatus:
        sources, config, numerics = self._sources, self._config, self._numerics
        now, programs, stuck = sources.lifecycle.readiness(), sources.programs(), sources.scheduler.stuck
        return ServerStatus(
            name="rsrv",
            version=rsrv.__version__,
            worker=self._worker,
            state=now.state,
            ready=now.ready,
            phase=now.phase,
            reason=now.reason,
            stuck="" if stuck is None else str(stuck),
            uptime_s=self._clock() - self._began,
            control_mode=config.model_control_mode,
            residency_mode=residency_mode(sources.residency),
            discipline=config.scheduler.discipline,
            numerics=NumericsStatus(
                mode=numerics.mode, tf32_active=numerics.tf32_active, pinned_exact=numerics.pinned_exact
            ),
            programs=LoadedPrograms(
                total=programs.total,
                cache=programs.cache,
                compiled=programs.compiled,
                shared=programs.shared,
                compile_seconds=programs.compile_seconds,
            ),
            idle=self._idle(),
            limits=ServerLimits(
                max_concurrent_requests=sources.admission.limit,
                max_queue_depth=config.scheduler.max_queue_depth,
                held_requests=sources.admission.held_limit,
                model_capacity=config.admin.model_capacity,
                program_capacity=config.admin.program_capacity,
                variant_overtakes=config.scheduler.variant_overtakes,
            ),
            inflight=sources.admission.in_flight,
            held_requests=sources.admission.held,
            shed=sources.admission.shed,
        )

    def _idle(self) -> IdlePolicy:
        """What is in force now; as configured where nobody can change it."""
        reclaimer, configured = self._sources.reclaimer, self._config.reclaim
        policy = configured if reclaimer is None else reclaimer.policy
        return IdlePolicy(
            parameter_ms=policy.parameter_idle_ms,
            workspace_ms=policy.workspace_idle_ms,
            host_ms=policy.host_idle_ms,
            device_workspace=False,
        )

    def _model(self, entry: Entry, stats: ModelStats | None, snapshot: LedgerSnapshot | None) -> ModelStatus:
        prepared = entry.prepared
        accepted = accepted_requests(entry, self._sources)
        residency = self._residency(prepared, snapshot) if prepared is not None else None
        return ModelStatus(
            name=entry.name,
            kind=entry.manifest.kind if entry.manifest is not None else None,
            source=entry.source,
            state=entry.state.value,
            admission=entry.gate,
            accepted=accepted,
            phase=_phase(accepted, residency),
            reason=entry.reason,
            error=_model_error(entry.failure),
            pending_error=_model_error(entry.pending),
            incarnation=entry.incarnation,
            directory=str(entry.path),
            modified=list(entry.modified),
            weights_bytes=prepared.model.weights.nbytes if prepared else None,
            residency=residency,
            hooks=[role for role in ("preprocess", "postprocess") if getattr(prepared.hooks, role)] if prepared else [],
            programs=self._programs(entry.name, prepared, stats) if prepared else None,
            weight=stats.weight if stats else None,
            recent_seconds=stats.recent_seconds if stats else None,
            queue=_queue(stats) if stats else None,
            counters=_counters(stats, self._sources.counters.snapshot(entry.name)) if stats else None,
            batch_fill=_fill(stats) if stats else None,
            queue_wait_s=_waits(stats) if stats and stats.waits_ns else None,
            cost_seconds=_costs(stats) if stats else {},
        )

    def _residency(self, prepared: Prepared, snapshot: LedgerSnapshot | None) -> ModelResidency:
        name, operations = prepared.model.name, self._sources.operations
        where = whereabouts(self._sources.residency, prepared.model)
        placed = snapshot.models.get(name) if snapshot is not None else None
        operation = None if operations is None else operations.state(name)
        return ModelResidency(
            floor=where.floor.value,
            state=placed.state.value if placed is not None else "resident",
            host_copy=where.host_resident,
            host_shared=where.host_shared,
            pinned=placed is None or placed.reserved or placed.pinned,
            pinned_by_operator=where.pinned,
            committed_bytes=where.committed_bytes,
            releasing_bytes=where.committed_bytes if where.releasing else 0,
            host_bytes=where.host_bytes,
            operation=operation.operation if operation is not None else "idle",
            operation_error=_model_error(operation.error) if operation is not None else None,
            loads=placed.loads if placed is not None else 0,
            evictions=placed.evicts if placed is not None else 0,
            load_seconds=placed.reload_seconds if placed is not None else None,
            uses_per_second=placed.requests_per_second if placed is not None else 0.0,
            idle_s=placed.idle_seconds if placed is not None else None,
        )

    def _programs(self, name: str, prepared: Prepared, stats: ModelStats | None) -> ModelPrograms:
        variants = prepared.model.batch_keys_by_variant
        sets = None if self._sources.program_sets is None else self._sources.program_sets.retained(name)
        return ModelPrograms(
            batch_sizes=sorted({key for keys in variants.values() for key in keys}),
            shape_variants=[list(variant) for variant in sorted(variants)],
            # What the scheduler says may have been changed since the model was loaded.
            max_batch_size=stats.max_batch_size if stats else largest_batch(prepared.model),
            numerics=prepared.numerics,
            selected=1 if sets is None else sets.selected,
            retained=1 if sets is None else sets.retained,
            capacity=self._config.admin.program_capacity,
        )

    def _device(self, snapshot: LedgerSnapshot | None) -> DeviceStatus:
        device, residency = self._sources.device, self._sources.residency
        memory = device.memory()
        models = [entry.prepared.model for entry in self._sources.registry.entries() if entry.prepared is not None]
        weights = sum(model.weights.nbytes for model in models) if residency is None else residency.resident_bytes
        releasing = 0 if residency is None else residency.releasing_bytes
        return DeviceStatus(
            device=self._config.runtime.device_ordinal,
            platform=device.platform,
            kind=device.kind,
            weights_bytes=weights,
            budget=None if snapshot is None else _budget(snapshot, releasing),
            in_use_bytes=memory.bytes_in_use if memory else None,
            peak_bytes=memory.peak_bytes_in_use if memory else None,
            limit_bytes=memory.bytes_limit if memory else None,
            largest_free_block_bytes=memory.largest_free_block_bytes if memory else None,
        )


def _budget(snapshot: LedgerSnapshot, releasing_bytes: int) -> WeightBudget:
    return WeightBudget(
        arena_bytes=snapshot.budget.arena,
        pool_bytes=snapshot.budget.weight_pool,
        scratch_bytes=snapshot.budget.max_scratch,
        pinned_bytes=snapshot.pinned_bytes,
        budget_bytes=snapshot.max_bytes,
        resident_bytes=snapshot.resident_bytes,
        pending_bytes=snapshot.pending_bytes,
        releasing_bytes=releasing_bytes,
        evictable_bytes=snapshot.evictable_bytes,
        eviction=snapshot.policy,
        uses=snapshot.uses,
        loads=snapshot.loads,
        load_seconds=snapshot.load_seconds,
        evictions={str(reason): count for reason, count in snapshot.evicts.items()},
        idle_reclaims=snapshot.idle_reclaims,
        compactions=snapshot.compactions,
        lru_age_s=snapshot.lru_age_seconds,
        bytes_for_99_percent_hits=snapshot.bytes_for_99_percent_hits,
    )


def accepted_requests(entry: Entry, sources: Sources) -> AcceptedRequests:
    """The requests that a model has accepted, by where they are."""
    queued, executing = (0, 0) if entry.prepared is None else sources.scheduler.depth(entry.prepared.model)
    own = entry.accepted
    total = own if sources.registrations is None else sources.registrations.accepted(entry)
    # The numbers are read one after the other, while requests move on.
    return AcceptedRequests(
        queued=queued, executing=executing, hooks=max(0, own - queued - executing), earlier=max(0, total - own)
    )


def _phase(accepted: AcceptedRequests, residency: ModelResidency | None) -> str:
    if accepted.executing:
        return "executing"
    if residency is not None and residency.state == "loading":
        return "loading"
    return "queued" if accepted.queued else "idle"


def _model_error(failure: Failure | OperationError | None) -> ModelError | None:
    if failure is None:
        return None
    return ModelError(phase=failure.phase, type=failure.type, message=failure.message)


def _queue(stats: ModelStats) -> ModelQueueStatus:
    return ModelQueueStatus(
        requests=stats.queue_depth,
        rows=stats.queued_rows,
        oldest_wait_s=stats.oldest_wait_seconds,
        inflight_batches=stats.in_flight,
    )


def _counters(stats: ModelStats, requests: RequestSnapshot) -> ModelCounters:
    return ModelCounters(
        requests=requests.statuses,
        dispatches=stats.dispatch_count,
        served=stats.requests_served,
        rows=stats.rows_served,
        padding_rows=stats.padding_rows,
        by_batch_size={str(key): count for key, count in sorted(stats.batch_keys.items())},
        compute_seconds=stats.total_compute_seconds,
        errors=dict(sorted(stats.errors.items())),
        dropped=dict(sorted(stats.dropped.items())),
    )


def _costs(stats: ModelStats) -> dict[str, float]:
    return {program_name(*program): seconds for program, seconds in sorted(stats.costs.items())}


def _fill(stats: ModelStats) -> float | None:
    computed = stats.rows_served + stats.padding_rows
    return stats.rows_served / computed if computed else None


def _waits(stats: ModelStats) -> QueueWait:
    quantiles = stats.queue_wait_seconds
    return QueueWait(p50=quantiles[0.5], p90=quantiles[0.9], p99=quantiles[0.99])


def program_name(variant: tuple[int, ...], batch_key: int) -> str:
    """``8``, or ``224x224/8`` where there are several shapes."""
    return f"{'x'.join(map(str, variant))}/{batch_key}" if variant else str(batch_key)
