"""The HTTP face of a worker: liveness, readiness, metrics and status. Administration is `admin.http`'s."""

from __future__ import annotations

import json

from rsrv.rpc.access import require_own_host
from rsrv.rpc.exposition import CONTENT_TYPE
from rsrv.rpc.http import HttpAnswer, HttpRequest, HttpRoute, HttpRoutes
from rsrv.serve.admin.requests import StatusRequest, parse_query
from rsrv.serve.lifecycle import Lifecycle
from rsrv.serve.metrics import WorkerMetrics
from rsrv.serve.status import StatusReport


def http_routes(lifecycle: Lifecycle, metrics: WorkerMetrics, status: StatusReport, *, host: str = "") -> HttpRoutes:
    """`host` is the address that the listener was told: on a loopback address ``/v1/status`` looks at ``Host``."""

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

    def document(request: HttpRequest) -> HttpAnswer:
        wanted = parse_query(StatusRequest, request.parameters())
        return HttpAnswer(200, status.json(wanted.model), "application/json")

    def own_host(request: HttpRequest) -> None:
        require_own_host(request.headers.get("Host"), host)

    def exposition() -> HttpAnswer:
        return HttpAnswer(200, metrics.text(), CONTENT_TYPE)

    return {
        ("GET", "/healthz"): live,
        ("GET", "/livez"): live,
        ("GET", "/v2/health/live"): live,
        ("GET", "/readyz"): ready,
        ("GET", "/v2/health/ready"): ready,
        ("GET", "/metrics"): exposition,
        ("GET", "/v1/status"): HttpRoute(document, guard=own_host),
    }
