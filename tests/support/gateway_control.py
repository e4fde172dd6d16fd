"""A gateway's control plane behind a real engine, with a fleet that has no connections and a prober that tests step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from support.stub_worker import StubWorker

from rsrv.core.config.gateway import OutliersConfig, SchedulingConfig
from rsrv.gateway.admin.scheduling_control import ControlGate, SchedulingControl
from rsrv.gateway.admin.workers_control import WorkersControl
from rsrv.gateway.discovery.membership import Configured, Membership
from rsrv.gateway.routing.router import Router
from rsrv.gateway.routing.standing import Standing
from rsrv.gateway.routing.table import NotReady, RoutingTable
from rsrv.gateway.scheduling.knobs import Knobs
from rsrv.gateway.scheduling.packing import LptPacking
from rsrv.gateway.timers import Timers
from rsrv.gateway.workers.fleet import Endpoint, Fleet
from rsrv.gateway.workers.poll import ModelReport, Poll, WorkerReport
from rsrv.rpc import GrpcioEngine


def report(url: str, models: Mapping[str, ModelReport], budget: int = 0) -> WorkerReport:
    return WorkerReport(url, dict(models), budget_bytes=budget, discipline="fifo", incarnation=f"{url}#1")


class ControlledGateway:
    """Two workers, ``w0:1`` and ``w1:1``, called a0 and a1, that both have the model ``m`` (largest batch 8).

    `tick` is a round of the prober; with `automatic` a wake-up makes one, on the thread of the timers, as a real
    gateway's prober does.
    """

    URLS = ("w0:1", "w1:1")

    def __init__(
        self,
        *,
        mode=None,
        control: bool | None = True,
        host: str = "127.0.0.1",
        keep=None,
        keep_workers=None,
        **scheduling,
    ) -> None:
        self.timers = Timers()
        self.automatic = True
        self.woken = threading.Event()
        self.models = {url: {"m": ModelReport(weight_nbytes=100, max_batch=8)} for url in self.URLS}
        self.budgets = dict.fromkeys(self.URLS, 0)
        self.ready = list(self.URLS)
        self.configured = Knobs.from_config(SchedulingConfig(mode="lpt_packing", **scheduling))
        self.now = 1000.0
        self.packing = LptPacking(self.configured, wake=self.wake, clock=lambda: self.now)
        self.fleet = Fleet(StubWorker.connect)
        listed = [Endpoint(url, f"a{index}", f"h{index}:2") for index, url in enumerate(self.URLS)]
        self.membership = Membership(self.fleet, self.timers, [Configured(listed)], keep=keep_workers)
        self.membership.start()
        for url in self.URLS:
            self.fleet.probed(url, True)
        self.router = Router(mode or self.packing, Standing(OutliersConfig(), lambda: self.now))
        self.router.install(RoutingTable({"m": self.URLS}, {"late": NotReady("preparing", "it is being prepared")}))
        self.gate = ControlGate(control, host)
        self.control = SchedulingControl(self.router, self.fleet, self.timers, self.gate, keep=keep)
        self.workers = WorkersControl(self.membership, self.fleet, self.router, self.gate)

    # --- the prober -------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self.woken.set()
        if self.automatic:
            self.timers.after(0.0, self.tick)

    def poll(self) -> Poll:
        return Poll({url: report(url, self.models[url], self.budgets[url]) for url in self.ready})

    def start(self) -> None:
        """The first placement, before the first tick."""
        with self.router.lock:
            self.packing.start(sorted(self.ready), self.poll(), self.now)

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        with self.router.lock:
            self.packing.tick(sorted(self.ready), self.poll(), self.now)

    def work(self, model: str, compute: float, *, requests: int = 10) -> None:
        """Device seconds that a model has used on each worker since the last call of this."""
        for url in self.URLS:
            row = self.models[url][model]
            self.models[url][model] = ModelReport(
                compute=row.compute + compute,
                requests=row.requests + requests,
                rows=row.rows + requests,
                weight_nbytes=row.weight_nbytes,
                max_batch=row.max_batch,
            )

    # --- the face ---------------------------------------------------------------------------------------------------

    def routes(self):
        return {**self.control.routes(), **self.workers.routes()}

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """The address of an engine that serves the control plane."""
        engine = GrpcioEngine(
            self.routes(), host="127.0.0.1", port=0, threads=8, max_recv_bytes=8 << 20, max_send_bytes=8 << 20
        )
        port = engine.bind()
        engine.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            engine.stop(0.0)

    def close(self) -> None:
        self.membership.stop()
        self.timers.close()
        self.fleet.close()

    def __enter__(self) -> ControlledGateway:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
