"""A proxy in this process in front of scripted workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from support.calls import FakeCall
from support.mock_worker import MockWorker

from rsrv.core.config.gateway import OutliersConfig, RetriesConfig
from rsrv.core.wire import encode_request, join
from rsrv.gateway.metrics.counters import GatewayCounters
from rsrv.gateway.routing.admission import Admission
from rsrv.gateway.routing.proxy import Proxy
from rsrv.gateway.routing.retries import RetryBudget
from rsrv.gateway.routing.router import Router
from rsrv.gateway.routing.standing import Standing
from rsrv.gateway.routing.table import RoutingTable
from rsrv.gateway.scheduling.simple import RoundRobin
from rsrv.gateway.timers import Timers
from rsrv.gateway.workers.channels import ChannelSettings
from rsrv.gateway.workers.fleet import Endpoint, Fleet
from rsrv.gateway.workers.worker import Worker

SETTINGS = ChannelSettings(64 << 20, 64 << 20)


def request_body(model: str = "m", *, request_id: str = "", parameters=None, outputs=(), inputs=()) -> bytes:
    return join(encode_request(model, inputs, id=request_id, parameters=parameters or {}, outputs=outputs))


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.002)


class NoRefresh:
    """A refresher that finds what `found` says, and counts how often it is asked."""

    def __init__(self) -> None:
        self.found: Callable[[], None] = lambda: None
        self.refreshed = 0
        self.requested = 0

    def refresh(self, deadline_ns, done) -> None:
        self.refreshed += 1
        self.found()
        done()

    def request(self) -> None:
        self.requested += 1


class NoRegions:
    def __init__(self) -> None:
        self.replayed: list[str] = []
        self.known = False

    def replay(self, worker, done) -> bool:
        if self.known:
            self.replayed.append(worker.url)
            done(True)
        return self.known


class Site:
    """Mock workers and what is in front of them. `post` makes one request and returns the call that ended."""

    def __init__(self, stack: ExitStack, count: int, **options) -> None:
        self.now = 1000.0
        mocks = [stack.enter_context(MockWorker()) for _ in range(count)]
        self.mocks = sorted(mocks, key=lambda mock: mock.url)  # the order in which a table takes turns
        self.timers = Timers()
        stack.callback(self.timers.close)
        self.counters = GatewayCounters()
        streams = options.pop("streams", 32)
        self.fleet = Fleet(
            lambda endpoint: Worker(
                endpoint.url,
                endpoint.name,
                settings=SETTINGS,
                streams=streams,
                timers=self.timers,
                counters=self.counters,
            )
        )
        stack.callback(self.fleet.close)
        outliers = OutliersConfig(**options.pop("outliers", {}))
        retries = RetriesConfig(**options.pop("retries", {}))
        self.standing = Standing(outliers, lambda: self.now)
        self.router = Router(options.pop("mode", None) or RoundRobin(), self.standing)
        for mock in self.mocks:
            self.fleet.add(Endpoint(mock.url))
            self.router.joined(mock.url, slowly=False)
            self.fleet.probed(mock.url, True)
            self.router.probed(mock.url, True)
        self.install()
        self.refresh, self.regions = NoRefresh(), NoRegions()
        self.lost: list[str] = []
        self.proxy = Proxy(
            fleet=self.fleet,
            router=self.router,
            admission=Admission(options.pop("cap", 64), lambda: len(self.fleet.ready)),
            counters=self.counters,
            retries=RetryBudget(retries, lambda: self.now),
            refresh=self.refresh,
            regions=self.regions,
            timers=self.timers,
            timeout_ns=int(options.pop("timeout", 20.0) * 1e9),
            on_lost=self.lost.append,
            **options,
        )

    def install(self, **more: list[str]) -> None:
        urls = [mock.url for mock in self.mocks]
        self.router.install(RoutingTable({"m": urls, **more}))

    def call(self, body: bytes, *, seconds: float | None = None, metadata=None) -> FakeCall:
        deadline = 0 if seconds is None else time.monotonic_ns() + int(seconds * 1e9)
        call = FakeCall(body, path="/inference.GRPCInferenceService/ModelInfer", deadline_ns=deadline)
        call.metadata = metadata or {}
        return call

    def post(self, body: bytes | None = None, **how) -> FakeCall:
        return self.call(request_body() if body is None else body, **how).serve(self.proxy.handle)

    def served(self) -> list[int]:
        return [mock.count("ModelInfer") for mock in self.mocks]

    def status_counts(self) -> dict[tuple[str, str, str], int]:
        return dict(self.counters.snapshot().statuses)
