"""The Prometheus text of a gateway: its own series, pulled from live state at the scrape, and those of its workers."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import rsrv
from rsrv.gateway.metrics.counters import BOUNDS, UNKNOWN, CountersSnapshot, GatewayCounters, Histogram
from rsrv.gateway.metrics.merge import merge, read
from rsrv.gateway.metrics.series import PREFIX, SERIES
from rsrv.rpc.exposition import Exposition, HistogramValue, Sample, histogram

if TYPE_CHECKING:
    from rsrv.gateway.metrics.scrape import WorkerScrape
    from rsrv.gateway.routing.admission import Admission
    from rsrv.gateway.routing.retries import RetryBudget
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.scheduling.reports import PackingStatus
    from rsrv.gateway.workers.fleet import Fleet

FORGET_SECONDS = 3600.0
"""How long a model keeps its series after the last worker has forgotten it."""


class GatewayMetrics:
    """The exposition of one gateway, with a registry of its own. Thread safe. `clock` gives monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        counters: GatewayCounters,
        scrape: WorkerScrape,
        *,
        admission: Admission,
        retries: RetryBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._counters = counters
        self._scrape = scrape
        self._admission = admission
        self._retries = retries
        self._clock = clock
        self._gone: dict[str, float] = {}
        self._exposition = Exposition(PREFIX, SERIES, self._samples)

    def text(self) -> bytes:
        """The text exposition, format 0.0.4. May take as long as workers are waited for: not for the loop's thread."""
        theirs = self._scrape.fetch()
        own = self._exposition.text()
        return merge([read(own), *theirs.values()]) if theirs else own

    # --- what there is to tell --------------------------------------------------------------------------------------

    def _samples(self) -> Iterator[Sample]:
        counted = self._counters.snapshot()
        names = {worker.url: worker.name for worker in self._fleet.workers}
        with self._router.lock:
            table, mode = self._router.table, self._router.mode
            work = mode.inflight_work()
            status = mode.status()
            ejected = {url for url in names if self._router.standing.is_ejected(url)}
        known = {*table.models, *table.missing, *((row.name for row in status.models) if status is not None else ())}
        self._forget(counted, names, known)
        yield "build_info", (rsrv.__version__, platform.python_version(), mode.name), 1
        yield from _counted(counted, names)
        yield "retries_total", (), self._retries.total
        yield "retries_refused_total", (), self._retries.refused
        yield "inflight_requests", (), self._admission.inflight
        yield "requests_shed_total", (), self._admission.shed
        yield "max_concurrent_requests", (), self._admission.cap
        yield "routing_table_size", (), len(table)
        yield "models_not_ready", (), len(table.missing)
        yield from self._worker_samples(ejected)
        if work is not None and work[1]:
            basis, loads = work
            for url, name in sorted(names.items(), key=lambda item: item[1]):
                yield "worker_inflight_work", (name, basis), loads.get(url, 0)
        if status is not None:
            yield from _placed(status, names, {model: table.urls(model) for model in table.models})

    def _worker_samples(self, ejected: Collection[str]) -> Iterator[Sample]:
        up = self._scrape.up
        for worker in sorted(self._fleet.workers, key=lambda worker: worker.name):
            labels = (worker.name,)
            yield "worker_ready", labels, int(worker.ready)
            yield "worker_draining", labels, int(worker.draining)
            yield "worker_ejected", labels, int(worker.url in ejected)
            yield "worker_inflight_requests", labels, worker.inflight
            yield "worker_waiting_requests", labels, worker.waiting
            if worker.url in up:
                yield "worker_metrics_up", labels, int(up[worker.url])

    def _forget(self, counted: CountersSnapshot, members: Collection[str], known: Collection[str]) -> None:
        """Let go of what was counted for workers that left, also by calls that ended after they did, and for models
        that are long gone. Not at once: while no worker answers, no model is known, and the failures are news."""
        for url in counted.workers - frozenset(members):
            self._counters.forget(url)
        now, gone = self._clock(), counted.models - frozenset(known) - {"", UNKNOWN}
        self._gone = {model: self._gone.get(model, now) for model in gone}
        for model, since in list(self._gone.items()):
            if now - since >= FORGET_SECONDS:
                self._counters.forget_model(model)
                self._gone.pop(model, None)


def _counted(counted: CountersSnapshot, names: dict[str, str]) -> Iterator[Sample]:
    for labels, count in sorted(counted.statuses.items()):
        yield "requests_total", labels, count
    for pair, times in sorted(counted.latency.items()):
        yield "request_latency_seconds", pair, _seconds(times)
    for (rpc, url), times in sorted(counted.worker_latency.items()):
        if url in names:
            yield "worker_latency_seconds", (rpc, names[url]), _seconds(times)
    for url, times in sorted(counted.queue_wait.items()):
        if url in names:
            yield "worker_queue_wait_seconds", (names[url],), _seconds(times)
    for pair, count in sorted(counted.failovers.items()):
        yield "failovers_total", pair, count
    for url, count in sorted(counted.ejections.items()):
        if url in names:
            yield "worker_ejections_total", (names[url],), count
    yield "hedges_total", (), counted.hedges


def _placed(status: PackingStatus, names: dict[str, str], served: dict[str, tuple[str, ...]]) -> Iterator[Sample]:
    """What only a placement has; `served` by model are the workers that it could be placed on."""
    retired: dict[str, set[str]] = {}
    for model, url in status.retired:
        retired.setdefault(model, set()).add(url)
    for row in status.models:
        homes = {replica.worker: replica for replica in row.replicas}
        for url in sorted({*homes, *served.get(row.name, ()), *retired.pop(row.name, ())}):
            if url in names:
                yield "placement_weight", (row.name, names[url]), homes[url].weight if url in homes else 0
        for url, replica in homes.items():
            if url in names:
                yield "replica_outstanding", (row.name, names[url]), replica.outstanding
                yield "replica_routed_total", (row.name, names[url]), replica.routed
        yield "model_utilization", (row.name,), row.utilization
        yield "model_replicas", (row.name,), len(row.replicas) if row.placed else 0
        yield "model_fill_quantum", (row.name,), row.fill_quantum
    for model, urls in sorted(retired.items()):
        for url in sorted(urls & names.keys()):
            yield "placement_weight", (model, names[url]), 0
    for trigger, count in status.repacks.items():
        yield "repacks_total", (trigger,), count
    if status.repack is not None:
        yield "last_repack_moved_models", (), len(status.repack.moved)
    for worker in status.workers:
        if worker.worker in names:
            yield "worker_assigned_bytes", (names[worker.worker],), worker.assigned_bytes
            yield "worker_budget_bytes", (names[worker.worker],), worker.budget_bytes


def _seconds(times: Histogram) -> HistogramValue:
    return histogram(BOUNDS, times.counts, times.total)
