"""Scripted workers, and before them the services of a gateway on a real engine."""

from __future__ import annotations

from contextlib import ExitStack

import grpc
from support.mock_worker import MockWorker

from rsrv.core.config.gateway import OutliersConfig
from rsrv.gateway.admin.compaction import CompactionCalls
from rsrv.gateway.faces.services import GatewayServices
from rsrv.gateway.metrics.counters import GatewayCounters
from rsrv.gateway.routing.router import Router
from rsrv.gateway.routing.standing import Standing
from rsrv.gateway.routing.table import RoutingTable
from rsrv.gateway.scheduling.simple import RoundRobin
from rsrv.gateway.shm.shared_memory import SharedMemory
from rsrv.gateway.timers import Timers
from rsrv.gateway.workers.channels import ChannelSettings
from rsrv.gateway.workers.fleet import Endpoint, Fleet
from rsrv.gateway.workers.worker import Worker
from rsrv.protos import control, inference
from rsrv.rpc import GrpcioEngine

SECONDS = 20.0


class Front:
    """`call` asks the gateway over gRPC; models are routed as `install` says."""

    def __init__(self, stack: ExitStack, count: int = 2) -> None:
        self.mocks = [stack.enter_context(MockWorker()) for _ in range(count)]
        self.timers = Timers()
        stack.callback(self.timers.close)
        self.counters = GatewayCounters()
        self.fleet = Fleet(self._connect)
        stack.callback(self.fleet.close)
        for number, mock in enumerate(self.mocks):
            self.fleet.add(Endpoint(mock.url, f"worker{number}"))
            self.fleet.probed(mock.url, True)
        self.router = Router(RoundRobin(), Standing(OutliersConfig(), lambda: 0.0))
        self.install(m=self.mocks)
        self.is_ready = True
        self.refreshed: list[int] = []
        self.found = lambda: None
        self.services = GatewayServices(
            self.fleet, self.router, self.counters, self, ready=lambda: self.is_ready, timeout=SECONDS
        )
        self.fleet.on_change.append(self.services.changed)
        self.router.on_install.append(self.services.changed)
        self.memory = SharedMemory(self.fleet, self.counters, timeout=SECONDS)
        self.compaction = CompactionCalls(self.fleet, self.timers, self.counters, timeout=SECONDS)
        routes = {**self.services.routes(), **self.memory.routes(), **self.compaction.routes()}
        self.engine = GrpcioEngine(
            routes, host="127.0.0.1", port=0, threads=24, max_recv_bytes=1 << 20, max_send_bytes=1 << 20
        )
        self.url = f"127.0.0.1:{self.engine.bind()}"
        self.engine.start()
        stack.callback(self.engine.stop, 0)
        self.channel = stack.enter_context(grpc.insecure_channel(self.url))

    def _connect(self, endpoint: Endpoint) -> Worker:
        return Worker(
            endpoint.url,
            endpoint.name,
            settings=ChannelSettings(1 << 20, 1 << 20),
            streams=4,
            timers=self.timers,
            counters=self.counters,
        )

    def refresh(self, deadline_ns, done):
        self.refreshed.append(deadline_ns)
        self.found()
        done()

    def install(self, missing=None, **models):
        urls = {name: [mock.url for mock in mocks] for name, mocks in models.items()}
        self.router.install(RoutingTable(urls, missing or {}))

    def call(self, method, *, timeout=SECONDS, metadata=None, **fields):
        """The answer of a method of either service; raises grpc.RpcError."""
        module, service = (
            (control, "reactant_control.ControlService")
            if hasattr(control, f"{method}Request")
            else (inference, "inference.GRPCInferenceService")
        )
        request = getattr(module, f"{method}Request")(**fields)
        body = self.channel.unary_unary(f"/{service}/{method}", None, None)(
            request.SerializeToString(), timeout=timeout, metadata=metadata
        )
        return getattr(module, f"{method}Response").FromString(body)


def refusal(error):
    """Code, reason and text of a call that failed."""
    trailers = dict(error.value.trailing_metadata())
    return error.value.code().name, trailers.get("rsrv-reason"), error.value.details()
