"""``grpc.health.v1``: Check and Watch, for load balancers and Kubernetes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from google.protobuf.message import DecodeError

from rsrv.core.errors import Code, InvalidRequest, RsrvError
from rsrv.protos import health
from rsrv.rpc.call import Call, reply
from rsrv.rpc.routes import Route, Routes

SERVICE = "grpc.health.v1.Health"


class HealthService:
    """Tells who is ready. `check` maps a name (``""`` = the server) to ready or not, or to None for an unknown name.

    `check` runs on the threads of calls. A Watch holds a thread of the grpcio engine, and one place among its streams,
    until the client or the engine ends it.
    """

    def __init__(self, check: Callable[[str], bool | None]) -> None:
        self._check_name = check
        self._lock = threading.Lock()
        self._watchers: set[_Watcher] = set()

    def routes(self) -> Routes:
        return {f"/{SERVICE}/Check": Route(self._check), f"/{SERVICE}/Watch": Route(self._watch, "server_stream")}

    def notify(self) -> None:
        """Say that an answer of `check` may have changed; every Watch whose answer did sends the new one."""
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.call.defer(watcher.push)

    def _check(self, call: Call) -> None:
        name = _service(call)
        serving = self._check_name(name)
        if serving is None:
            raise RsrvError(f"unknown service {name!r}", code=Code.NOT_FOUND, reason="unknown_service")
        reply(call, health.HealthCheckResponse(status=_status(serving)))

    def _watch(self, call: Call) -> None:
        watcher = _Watcher(call, _service(call), self._check_name)
        with self._lock:
            self._watchers.add(watcher)
        call.on_end(lambda: self._forget(watcher))
        watcher.push()

    def _forget(self, watcher: _Watcher) -> None:
        with self._lock:
            self._watchers.discard(watcher)


class _Watcher:
    def __init__(self, call: Call, name: str, check: Callable[[str], bool | None]) -> None:
        self.call = call
        self._name = name
        self._check = check
        self._last: int | None = None

    def push(self) -> None:
        """Send the status if it is not the one sent last. Runs on the call's thread only."""
        status = _status(self._check(self._name))
        if status != self._last:
            self._last = status
            self.call.send([health.HealthCheckResponse(status=status).SerializeToString()])


def _service(call: Call) -> str:
    try:
        return health.HealthCheckRequest.FromString(call.body).service
    except DecodeError:
        raise InvalidRequest("the request is no grpc.health.v1.HealthCheckRequest") from None


def _status(serving: bool | None) -> health.HealthCheckResponse.ServingStatus:
    if serving is None:
        return health.HealthCheckResponse.SERVICE_UNKNOWN
    return health.HealthCheckResponse.SERVING if serving else health.HealthCheckResponse.NOT_SERVING
