"""The Prometheus series of a worker, pulled from live state at scrape time. Nothing here runs on the request path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rsrv.serve.lifecycle import STATES
from rsrv.serve.registry import ModelState
from rsrv.serve.series import PREFIX, SERIES, Series

if TYPE_CHECKING:
    from rsrv.core.shm import RegionRegistry
    from rsrv.runtime.device import Device
    from rsrv.serve.counters import HistogramSnapshot, ServerCounters
    from rsrv.serve.hook_pool import HookPool
    from rsrv.serve.inference import Admission
    from rsrv.serve.lifecycle import Lifecycle
    from rsrv.serve.registry import Registry
    from rsrv.serve.scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class WorkerMetrics:
    """The exposition of one worker, with a registry of its own."""

    def __init__(
        self,
        *,
        registry: Registry,
        lifecycle: Lifecycle,
        scheduler: Scheduler,
        counters: ServerCounters,
        admission: Admission,
        hook_pool: HookPool,
        regions: RegionRegistry | None,
        device: Device,
        info: Mapping[str, str],
        constant_labels: Mapping[str, str],
    ) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._counters = counters
        self._admission = admission
        self._hook_pool = hook_pool
        self._regions = regions
        self._device = device
        self._info = dict(info)
        self._constant = {name: value for name, value in constant_labels.items() if value}
        self._exposition = CollectorRegistry(auto_describe=False)
        self._exposition.register(self)
        GCCollector(registry=self._exposition)
        ProcessCollector(registry=self._exposition)

    def text(self) -> bytes:
        """The text exposition, format 0.0.4."""
        return generate_latest(self._exposition)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at every scrape."""
        families: dict[str, Metric] = {}
        for name, labels, value in self._samples():
            family = families.get(name)
            if family is None:
                family = families[name] = self._family(SERIES[name])
            self._add(family, SERIES[name], labels, value)
        yield from (families[name] for name in SERIES if name in families)

    # --- what there is to tell: (name, values of the series' labels, value) -----------------------------------------

    def _samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        yield "info", tuple(self._info.get(label, "") for label in SERIES["info"].labels), 1
        for state in STATES:
            yield "state", (state,), int(self._lifecycle.state == state)
        yield from self._model_samples()
        yield from self._request_samples()
        yield from self._scheduler_samples()
        yield "inflight_requests", (), self._admission.in_flight
        yield "max_concurrent_requests", (), self._admission.limit
        yield "requests_shed_total", (), self._admission.shed
        yield "hook_threads_lost_total", (), self._hook_pool.lost_threads
        if self._regions is not None:
            yield "shm_regions", (), len(self._regions)
            yield "shm_region_bytes", (), self._regions.total_bytes
        memory = self._device.memory()
        if memory is not None:
            yield "device_memory_in_use_bytes", (), memory.bytes_in_use
            if memory.peak_bytes_in_use is not None:
                yield "device_memory_peak_in_use_bytes", (), memory.peak_bytes_in_use
            if memory.bytes_limit is not None:
                yield "device_memory_limit_bytes", (), memory.bytes_limit
                yield "device_memory_free_bytes", (), memory.bytes_limit - memory.bytes_in_use

    def _model_samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        loaded = resident_bytes = 0
        for entry in self._registry.entries():
            for state in ModelState:
                yield "model_state", (entry.name, state.value), int(entry.state is state)
            if entry.prepared is None:
                continue
            model = entry.prepared.model
            loaded += 1
            resident_bytes += model.weights.nbytes
            yield "model_incarnation", (entry.name,), entry.incarnation
            yield "model_resident", (entry.name,), 1
            yield "model_weight_bytes", (entry.name,), model.weights.nbytes
            yield "model_max_batch_size", (entry.name,), largest_batch(model)
        yield "models_loaded", (), loaded
        yield "models_resident", (), loaded
        yield "resident_weight_bytes", (), resident_bytes

    def _request_samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        for counters in self._counters.snapshots():
            for status, count in sorted(counters.statuses.items()):
                yield "requests_total", (counters.name, status), count
            yield "request_latency_seconds", (counters.name,), counters.latency
            for stage, histogram in counters.stages.items():
                if any(histogram.counts):
                    yield "stage_seconds", (counters.name, stage), histogram

    def _scheduler_samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        for name, stats in sorted(self._scheduler.stats().items()):
            yield "dispatch_total", (name,), stats.dispatch_count
            yield "compute_seconds_total", (name,), stats.total_compute_seconds
            yield "requests_served_total", (name,), stats.requests_served
            yield "rows_served_total", (name,), stats.rows_served
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

    # --- how it is told -------------------------------------------------------------------------------------------

    def _family(self, series: Series) -> Metric:
        extra = [label for label in self._constant if label not in series.labels]
        labels = [*series.labels, *extra]
        name = PREFIX + series.name
        if series.type == "counter":
            return CounterMetricFamily(name, series.help, labels=labels)
        if series.type == "gauge":
            return GaugeMetricFamily(name, series.help, labels=labels)
        return HistogramMetricFamily(name, series.help, labels=labels)

    def _add(self, family: Metric, series: Series, labels: tuple[str, ...], value: Any) -> None:
        values = [*labels, *(text for label, text in self._constant.items() if label not in series.labels)]
        if isinstance(family, HistogramMetricFamily):
            family.add_metric(values, buckets=list(_buckets(value)), sum_value=value.total_ns / 1e9)
        elif isinstance(family, (CounterMetricFamily, GaugeMetricFamily)):
            family.add_metric(values, value)


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


def _buckets(histogram: HistogramSnapshot) -> Iterable[tuple[str, int]]:
    total = 0
    for bound_ns, count in zip(histogram.bounds_ns, histogram.counts, strict=False):
        total += count
        yield str(bound_ns / 1e9), total
    yield "+Inf", total + histogram.counts[-1]
