"""The HTTP face of a gateway: liveness, readiness, metrics, and a look at everything for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rsrv.rpc.access import require_own_host
from rsrv.rpc.exposition import CONTENT_TYPE
from rsrv.rpc.http_messages import HttpAnswer, HttpRequest, HttpRoute, json_answer

if TYPE_CHECKING:
    from rsrv.gateway.metrics.exposition import GatewayMetrics
    from rsrv.rpc.http import HttpRoutes


def http_routes(
    metrics: GatewayMetrics, *, ready: Callable[[], bool], overview: Callable[[], dict[str, Any]], host: str = ""
) -> HttpRoutes:
    """`host` is the address that the listener was told: on a loopback address every path looks at ``Host``.

    `ready` says whether clients should come: any worker is ready, and the gateway is not about to stop.
    """

    def own_host(request: HttpRequest) -> None:
        require_own_host(request.headers.get("Host"), host)

    def foreign_host(request: HttpRequest) -> None:
        # Health checks of HTTP/1.0 send no Host; every browser does, and it is the browser's page that is kept out.
        if request.headers.get("Host") is not None:
            own_host(request)

    def live(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, "ok")

    def readiness(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, "ok") if ready() else HttpAnswer(503, "not ready")

    def exposition(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, metrics.text(), CONTENT_TYPE)

    def document(request: HttpRequest) -> HttpAnswer:
        return json_answer(200, overview())

    return {
        ("GET", "/healthz"): HttpRoute(live, guard=foreign_host),
        ("GET", "/livez"): HttpRoute(live, guard=foreign_host),
        ("GET", "/v2/health/live"): HttpRoute(live, guard=foreign_host),
        ("GET", "/readyz"): HttpRoute(readiness, guard=foreign_host),
        ("GET", "/v2/health/ready"): HttpRoute(readiness, guard=foreign_host),
        ("GET", "/metrics"): HttpRoute(exposition, where="thread", guard=foreign_host),
        ("GET", "/v1/gateway"): HttpRoute(document, where="thread", guard=own_host),
    }
