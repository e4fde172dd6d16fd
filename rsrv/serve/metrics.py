"""The Prometheus series of a worker, pulled from live state at scrape time. Nothing here runs on the request path."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from rsrv.core.errors import UnknownModel
from rsrv.rpc.exposition import Exposition, HistogramValue, histogram
from rsrv.serve import triton_metrics
from rsrv.serve.lifecycle import STATES
from rsrv.serve.registry import Gate, ModelState
from rsrv.serve.residency.view import whereabouts
from rsrv.serve.series import PREFIX, SERIES

if TYPE_CHECKING:
    from rsrv.serve.counters import HistogramSnapshot
    from rsrv.serve.programs.sets import ProgramSets
    from rsrv.serve.residency.snapshot import LedgerSnapshot
    from rsrv.serve.sources import Sources

ROW_BOUNDS = tuple(2**k for k in range(11))
"""Upper bounds of the histogram of rows: 1 … 1024."""


class WorkerMetrics:
    """The exposition of one worker, with a registry of its own."""

    def __init__(
        self,
        sources: Sources,
        *,
        info: Mapping[str, str],
        constant_labels: Mapping[str, str],
        triton_compat: bool = False,
    ) -> None:
        self._sources = sources
        self._triton_compat = triton_compat
        self._info = dict(info)
        self._constant = {name: value for name, value in constant_labels.items() if value}
        self._exposition = Exposition(PREFIX, SERIES, self._samples, constant_labels=self._constant)

    def text(self) -> bytes:
        """The text exposition, format 0.0.4."""
        text = self._exposition.text()
        if self._triton_compat:
            text += triton_metrics.exposition(self._sources, self._constant).encode()
        return text

    # --- what there is to tell ---------------------------------------------------------------------------------------

    def _samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        sources = self._sources
        yield "info", tuple(self._info.get(label, "") for label in SERIES["info"].labels), 1
        for state in STATES:
            yield "state", (state,), int(sources.lifecycle.state == state)
        yield from self._model_samples()
        yield from self._request_samples()
        yield from self._scheduler_samples()
        yield from self._live_samples()
        yield "inflight_requests", (), sources.admission.in_flight
        yield "held_requests", (), sources.admission.held
        yield "max_concurrent_requests", (), sources.admission.limit
        yield "requests_shed_total", (), sources.admission.shed
        yield "hook_threads_lost_total", (), sources.hook_pool.lost_threads
        yield "hook_processes_lost_total", (), sources.hook_processes_lost()
        yield from self._program_samples()
        if sources.regions is not None:
            yield "shm_regions", (), len(sources.regions)
            yield "shm_region_bytes", (), sources.regions.total_bytes
        memory = sources.device.memory()
        if memory is not None:
            yield "device_memory_in_use_bytes", (), memory.bytes_in_use
            if memory.peak_bytes_in_use is not None:
                yield "device_memory_peak_in_use_bytes", (), memory.peak_bytes_in_use
            if memory.bytes_limit is not None:
                yield "device_memory_limit_bytes", (), memory.bytes_limit
                yield "device_memory_free_bytes", (), memory.bytes_limit - memory.bytes_in_use

    def _model_samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        sources = self._sources
        loaded = resident = weights = host = shared = 0
        snapshot = sources.residency.snapshot() if sources.residency is not None else None
        for entry in sources.registry.entries():
            for state in ModelState:
                yield "model_state", (entry.name, state.value), int(entry.state is state)
            for gate in get_args(Gate):
                yield "model_admission", (entry.name, gate), int(entry.gate == gate)
            yield "model_pending_error", (entry.name,), int(entry.pending is not None)
            if entry.prepared is None:
                continue
            model = entry.prepared.model
            where = whereabouts(sources.residency, model)
            placed = snapshot.models.get(entry.name) if snapshot is not None else None
            loaded += 1
            resident += where.device_resident
            weights += where.nbytes * where.device_resident
            host += where.host_bytes
            shared |= where.host_shared
            yield "model_incarnation", (entry.name,), entry.incarnation
            yield "model_resident", (entry.name,), int(where.device_resident)
            yield "model_pinned", (entry.name,), int(placed is None or placed.reserved or placed.pinned)
            yield "model_weight_bytes", (entry.name,), where.nbytes
            yield "model_max_batch_size", (entry.name,), largest_batch(model)
        yield "models_loaded", (), loaded
        yield "models_resident", (), resident
        yield "resident_weight_bytes", (), weights if sources.residency is None else sources.residency.resident_bytes
        yield "host_weights_bytes", (), host
        yield "host_weights_shared", (), int(shared)
        if snapshot is not None:
            yield from self._residency_samples(snapshot)

    def _residency_samples(self, snapshot: LedgerSnapshot) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        yield "weight_pool_bytes", (), snapshot.budget.weight_pool
        yield "weight_cache_max_bytes", (), snapshot.max_bytes
        yield "weight_cache_resident_bytes", (), snapshot.resident_bytes
        yield "weight_cache_pinned_bytes", (), snapshot.pinned_bytes
        yield "weight_cache_max_scratch_bytes", (), snapshot.budget.max_scratch
        yield "evictable_bytes", (), snapshot.evictable_bytes
        if snapshot.bytes_for_99_percent_hits is not None:
            yield "weight_cache_bytes_for_99_percent_hits", (), snapshot.bytes_for_99_percent_hits
        if snapshot.lru_age_seconds is not None:
            yield "lru_age_seconds", (), snapshot.lru_age_seconds
        yield "weight_uses_total", (), snapshot.uses
        yield "weight_loads_total", (), snapshot.loads
        yield "weight_load_seconds_total", (), snapshot.load_seconds
        yield "weight_load_time_seconds", (), _in_seconds(self._sources.load_times.snapshot())
        for reason, count in snapshot.evicts.items():
            yield "weight_evicts_total", (reason,), count
        yield "idle_reclaims_total", (), snapshot.idle_reclaims
        yield "compactions_total", (), snapshot.compactions

    def _program_samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        sources = self._sources
        counts = sources.programs()
        yield "programs", (), counts.total
        yield "programs_loaded_total", ("cache",), counts.cache
        yield "programs_loaded_total", ("compiled",), counts.compiled
        yield "programs_loaded_total", ("shared",), counts.shared
        yield "compile_seconds_total", (), counts.compile_seconds
        if sources.cache is not None:
            stats = sources.cache.stats
            yield "cache_lookups_total", ("hit",), stats.hits
            yield "cache_lookups_total", ("miss",), stats.misses
            yield "cache_lookups_total", ("rejected",), stats.rejected
            yield "cache_stored_total", (), stats.stored
            yield "cache_evicted_total", (), stats.evicted

    def _live_samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        """What changes of the models there were, and the sets of programs that they have."""
        sources = self._sources
        for entry in sources.registry.entries():
            name = entry.name
            if sources.registrations is not None:
                yield "model_accepted_requests", (name,), sources.registrations.accepted(entry)
                yield "model_load_failures_total", (name,), sources.registrations.failures[name]
                yield "reloads_total", (name,), sources.registrations.reloads[name]
            if sources.program_sets is None or entry.prepared is None:
                continue
            sets = sources.program_sets.retained(name)
            yield "model_program_sets", (name,), sets.retained
            yield "model_selected_program", (name,), sets.selected
            if sets.retained > 1:
                yield from _shadow_samples(sources.program_sets, name)

    def _request_samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        sources = self._sources
        for counters in sources.counters.snapshots():
            for status, count in sorted(counters.statuses.items()):
                yield "requests_total", (counters.name, status), count
            yield "request_latency_seconds", (counters.name,), _in_seconds(counters.latency)
            for stage, counted in counters.stages.items():
                if any(counted.counts):
                    yield "stage_seconds", (counters.name, stage), _in_seconds(counted)

    def _scheduler_samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        sources = self._sources
        yield "dispatch_stuck", (), int(sources.scheduler.stuck is not None)
        for name, stats in sorted(sources.scheduled().items()):
            yield "dispatch_total", (name,), stats.dispatch_count
            yield "compute_seconds_total", (name,), stats.total_compute_seconds
            yield "requests_served_total", (name,), stats.requests_served
            yield "rows_served_total", (name,), stats.rows_served
            yield "batch_rows", (name,), _by_rows(stats.batch_rows)
            yield "padding_rows_total", (name,), stats.padding_rows
            yield "queue_depth", (name,), stats.queue_depth
            for batch_key, count in sorted(stats.batch_keys.items()):
                yield "dispatches_by_batch_size_total", (name, str(batch_key)), count
            for quantile, seconds in stats.queue_wait_seconds.items():
                yield "queue_wait_seconds", (name, str(quantile)), seconds
            for reason, count in sorted(stats.errors.items()):
                yield "dispatch_errors_total", (name, reason), count
            for reason, count in sorted(stats.dropped.items()):
                yield "requests_dropped_total", (name, reason), count


def _shadow_samples(sets: ProgramSets, name: str) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    try:
        programs = sets.list(name).programs
    except UnknownModel:  # it has just gone
        return
    for program in programs:
        record, labels = program.shadow, (name, str(program.id))
        if record is None:
            continue
        yield "shadow_batches_total", (*labels, "match"), record.batches - record.mismatches
        yield "shadow_batches_total", (*labels, "mismatch"), record.mismatches
        yield "shadow_batches_total", (*labels, "error"), record.errors
        yield "shadow_batches_total", (*labels, "skipped"), record.skipped
        for output, difference in record.largest.items():
            yield "shadow_largest_difference", (*labels, output), difference


def largest_batch(model: Any) -> int:
    """Most rows that requests to a model are merged to; 0 when they never are."""
    if not model.coalescable:
        return 0
    largest: int = max(keys[-1] for keys in model.batch_keys_by_variant.values())
    return largest if model.max_batch_size is None else min(largest, model.max_batch_size)


def gpu_label(platform: str, ordinal: int, environ: Mapping[str, str] = os.environ) -> str:
    """The card as operators name it: its token in CUDA_VISIBLE_DEVICES, else its ordinal; "" on other platforms."""
    if platform not in ("cuda", "gpu"):
        return ""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(ordinal)
    tokens = [token.strip() for token in visible.split(",") if token.strip()]
    if len(tokens) == 1:
        return tokens[0]
    return tokens[ordinal] if ordinal < len(tokens) else str(ordinal)


def _in_seconds(counted: HistogramSnapshot) -> HistogramValue:
    return histogram([bound / 1e9 for bound in counted.bounds_ns], counted.counts, counted.total_ns / 1e9)


def _by_rows(counts: Mapping[int, int]) -> HistogramValue:
    binned = [0] * (len(ROW_BOUNDS) + 1)
    for rows, count in counts.items():
        binned[bisect_left(ROW_BOUNDS, rows)] += count
    return histogram(map(float, ROW_BOUNDS), binned, sum(rows * count for rows, count in counts.items()))
