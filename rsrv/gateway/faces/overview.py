"""What ``GET /v1/gateway`` answers: the gateway at a glance, for people; `rsrv ctl` and metrics tell more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rsrv

if TYPE_CHECKING:
    from rsrv.gateway.metrics.counters import GatewayCounters
    from rsrv.gateway.routing.admission import Admission
    from rsrv.gateway.routing.retries import RetryBudget
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.scheduling.reports import PackingStatus
    from rsrv.gateway.workers.fleet import Fleet

NAMED = 20
"""Most models that are named because they are not ready."""


def overview(
    fleet: Fleet,
    router: Router,
    counters: GatewayCounters,
    *,
    admission: Admission,
    retries: RetryBudget,
    ready: bool,
) -> dict[str, Any]:
    """As plain values for JSON."""
    with router.lock:
        table, mode = router.table, router.mode
        work = mode.inflight_work()
        status = mode.status()
        ejected = {worker.url for worker in fleet.workers if router.standing.is_ejected(worker.url)}
    counted = counters.snapshot()
    loads = {} if work is None else work[1]
    document: dict[str, Any] = {
        "version": rsrv.__version__,
        "ready": ready,
        "mode": mode.name,
        "workers": [
            {
                "name": worker.name,
                "url": worker.url,
                "metrics": worker.metrics,
                "source": worker.source,
                "ready": worker.ready,
                "draining": worker.draining,
                "incarnation": worker.incarnation,
                "discipline": worker.discipline,
                "inflight": worker.inflight,
                "waiting": worker.waiting,
                "load": loads.get(worker.url, 0),
                "ejected": worker.url in ejected,
                "ejections": counted.ejections.get(worker.url, 0),
            }
            for worker in fleet.workers
        ],
        "models": {
            "routable": len(table),
            "not_ready": {
                model: {"reason": why.reason, "text": why.text} for model, why in sorted(table.missing.items())[:NAMED]
            },
        },
        "requests": {
            "inflight": admission.inflight,
            "cap": admission.cap,
            "shed": admission.shed,
            "retries": retries.total,
            "retries_refused": retries.refused,
            "hedges": counted.hedges,
        },
        "warnings": _warnings(fleet, len(table.missing)),
    }
    if work is not None:
        document["work_basis"] = work[0]
    if status is not None:
        document["placement"] = _placement(status, fleet)
        document["warnings"] += status.warnings
    return document


def _placement(status: PackingStatus, fleet: Fleet) -> dict[str, Any]:
    repack, tick = status.repack, status.tick
    return {
        "repacks": dict(status.repacks),
        "last_repack": None
        if repack is None
        else {
            "unix_seconds": repack.unix_seconds,
            "trigger": repack.trigger,
            "moved": list(repack.moved),
            "held": repack.held,
        },
        "next_repack": None
        if tick is None
        else {"device_seconds": tick.accumulated, "wanted_device_seconds": tick.threshold},
        "models": {
            row.name: [{"worker": fleet.name_of(at.worker), "weight": at.weight} for at in row.replicas]
            for row in status.models
        },
    }


def _warnings(fleet: Fleet, not_ready: int) -> list[str]:
    found = []
    if not fleet.workers:
        found.append("there are no workers; add one with `rsrv ctl gateway workers add`, or name where to find them")
    elif not any(worker.ready for worker in fleet.workers):
        found.append("no worker is ready")
    else:
        found += [f"worker {worker.name} is not ready" for worker in fleet.workers if not worker.ready]
    if not_ready:
        found.append(f"{not_ready} models are registered at workers and served by none")
    return found
