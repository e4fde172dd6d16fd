"""Calls that must carry a secret: ``authorization: Bearer …`` in the metadata of a gRPC call."""

from __future__ import annotations

from collections.abc import Callable

from rsrv.rpc.access import BearerToken
from rsrv.rpc.call import Call
from rsrv.rpc.routes import Route, Routes

KEY = "authorization"


def with_token(routes: Routes, token: BearerToken | None) -> Routes:
    """`routes` whose calls are answered only with `token`, else Unauthenticated; None = they are as they were."""
    if token is None:
        return routes
    return {path: Route(_checked(route.handler, token), route.kind) for path, route in routes.items()}


def _checked(handler: Callable[[Call], None], token: BearerToken) -> Callable[[Call], None]:
    def handle(call: Call) -> None:
        token.require(call.metadata.get(KEY))
        handler(call)

    return handle
