"""Fills in the status document of a worker from live state; it is read, and never waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import rsrv
from rsrv.core.status import (
    DeviceStatus,
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
    WeightBudget,
    WorkerStatus,
)
from rsrv.serve.metrics import largest_batch
from rsrv.serve.residency.view import residency_mode, whereabouts

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.serve.counters import RequestSnapshot
    from rsrv.serve.numerics import ServerNumerics
    from rsrv.serve.registry import Entry, Prepared
    from rsrv.serve.residency.manager import Residency
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

    def document(self) -> WorkerStatus:
        scheduled = self._sources.scheduled()
        counters, residency = self._sources.counters, self._sources.residency
        snapshot = None if residency is None else residency.snapshot()
        models = [
            _model(
                entry,
                scheduled.get(entry.name),
                counters.snapshot(entry.name),
                _residency(residency, snapshot, entry.prepared) if entry.prepared is not None else None,
            )
            for entry in self._sources.registry.entries()
        ]
        weights = sum(model.weights_bytes or 0 for model in models) if residency is None else residency.resident_bytes
        return WorkerStatus(server=self._server(), devices=[self._device(weights, snapshot)], models=models)

    def json(self) -> bytes:
        return self.document().model_dump_json(indent=2).encode() + b"\n"

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
            limits=ServerLimits(
                max_concurrent_requests=sources.admission.limit, max_queue_depth=config.scheduler.max_queue_depth
            ),
            inflight=sources.admission.in_flight,
            shed=sources.admission.shed,
        )

    def _device(self, weights_bytes: int, snapshot: LedgerSnapshot | None) -> DeviceStatus:
        device = self._sources.device
        memory = device.memory()
        return DeviceStatus(
            device=self._config.runtime.device_ordinal,
            platform=device.platform,
            kind=device.kind,
            weights_bytes=weights_bytes,
            budget=None if snapshot is None else _budget(snapshot),
            in_use_bytes=memory.bytes_in_use if memory else None,
            peak_bytes=memory.peak_bytes_in_use if memory else None,
            limit_bytes=memory.bytes_limit if memory else None,
            largest_free_block_bytes=memory.largest_free_block_bytes if memory else None,
        )


def _budget(snapshot: LedgerSnapshot) -> WeightBudget:
    return WeightBudget(
        arena_bytes=snapshot.budget.arena,
        pool_bytes=snapshot.budget.weight_pool,
        scratch_bytes=snapshot.budget.max_scratch,
        pinned_bytes=snapshot.pinned_bytes,
        budget_bytes=snapshot.max_bytes,
        resident_bytes=snapshot.resident_bytes,
        pending_bytes=snapshot.pending_bytes,
        evictable_bytes=snapshot.evictable_bytes,
        eviction=snapshot.policy,
        uses=snapshot.uses,
        loads=snapshot.loads,
        load_seconds=snapshot.load_seconds,
        evictions={str(reason): count for reason, count in snapshot.evicts.items()},
        compactions=snapshot.compactions,
        lru_age_s=snapshot.lru_age_seconds,
        bytes_for_99_percent_hits=snapshot.bytes_for_99_percent_hits,
    )


def _residency(residency: Residency | None, snapshot: LedgerSnapshot | None, prepared: Prepared) -> ModelResidency:
    where = whereabouts(residency, prepared.model)
    placed = snapshot.models.get(prepared.model.name) if snapshot is not None else None
    return ModelResidency(
        floor=where.floor.value,
        state=placed.state.value if placed is not None else "resident",
        host_copy=where.host_resident,
        host_shared=where.host_shared,
        pinned=placed is None or placed.reserved or placed.pinned,
        loads=placed.loads if placed is not None else 0,
        evictions=placed.evicts if placed is not None else 0,
        load_seconds=placed.reload_seconds if placed is not None else None,
        uses_per_second=placed.requests_per_second if placed is not None else 0.0,
        idle_s=placed.idle_seconds if placed is not None else None,
    )


def _model(
    entry: Entry, stats: ModelStats | None, requests: RequestSnapshot, residency: ModelResidency | None
) -> ModelStatus:
    failure, prepared = entry.failure, entry.prepared
    return ModelStatus(
        name=entry.name,
        state=entry.state.value,
        reason=entry.reason,
        error=ModelError(phase=failure.phase, type=failure.type, message=failure.message) if failure else None,
        incarnation=entry.incarnation,
        directory=str(entry.path),
        modified=list(entry.modified),
        weights_bytes=prepared.model.weights.nbytes if prepared else None,
        residency=residency,
        hooks=[role for role in ("preprocess", "postprocess") if getattr(prepared.hooks, role)] if prepared else [],
        programs=_programs(prepared, stats) if prepared else None,
        weight=stats.weight if stats else None,
        recent_seconds=stats.recent_seconds if stats else None,
        queue=_queue(stats) if stats else None,
        counters=_counters(stats, requests) if stats else None,
        batch_fill=_fill(stats) if stats else None,
        queue_wait_s=_waits(stats) if stats and stats.waits_ns else None,
        cost_seconds={program_name(*program): seconds for program, seconds in sorted(stats.costs.items())}
        if stats
        else {},
    )


def _programs(prepared: Prepared, stats: ModelStats | None) -> ModelPrograms:
    variants = prepared.model.batch_keys_by_variant
    return ModelPrograms(
        batch_sizes=sorted({key for keys in variants.values() for key in keys}),
        shape_variants=[list(variant) for variant in sorted(variants)],
        # What the scheduler says may have been changed since the model was loaded.
        max_batch_size=stats.max_batch_size if stats else largest_batch(prepared.model),
        numerics=prepared.numerics,
    )


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


def _fill(stats: ModelStats) -> float | None:
    computed = stats.rows_served + stats.padding_rows
    return stats.rows_served / computed if computed else None


def _waits(stats: ModelStats) -> QueueWait:
    quantiles = stats.queue_wait_seconds
    return QueueWait(p50=quantiles[0.5], p90=quantiles[0.9], p99=quantiles[0.99])


def program_name(variant: tuple[int, ...], batch_key: int) -> str:
    """``8``, or ``224x224/8`` where there are several shapes."""
    return f"{'x'.join(map(str, variant))}/{batch_key}" if variant else str(batch_key)
