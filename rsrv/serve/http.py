"""The HTTP face of a worker: liveness, readiness, metrics and status. The listener is `rsrv.rpc.http`'s."""

from __future__ import annotations

import json

from rsrv.rpc.http import HttpAnswer, HttpRoutes
from rsrv.serve.lifecycle import Lifecycle
from rsrv.serve.metrics import CONTENT_TYPE, WorkerMetrics
from rsrv.serve.status import StatusReport


def http_routes(lifecycle: Lifecycle, metrics: WorkerMetrics, status: StatusReport) -> HttpRoutes:
    def live() -> HttpAnswer:
        return HttpAnswer(200, "ok")

    def ready() -> HttpAnswer:
        now = lifecycle.readiness()
        body = {
            "ready": now.ready,
            "state": now.state,
            "phase": now.phase,
            "reason": now.reason,
            "progress": {
                "models": now.progress.total,
                "prepared": now.progress.prepared,
                "failed": now.progress.failed,
                "programs": now.programs.total,
                "compiled": now.programs.done,
                "from_cache": now.programs.cache,
            },
        }
        return HttpAnswer(200 if now.ready else 503, json.dumps(body).encode() + b"\n", "application/json")

    def document() -> HttpAnswer:
        return HttpAnswer(200, status.json(), "application/json")

    def exposition() -> HttpAnswer:
        return HttpAnswer(200, metrics.text(), CONTENT_TYPE)

    return {
        ("GET", "/healthz"): live,
        ("GET", "/livez"): live,
        ("GET", "/v2/health/live"): live,
        ("GET", "/readyz"): ready,
        ("GET", "/v2/health/ready"): ready,
        ("GET", "/metrics"): exposition,
        ("GET", "/v1/status"): document,
    }
