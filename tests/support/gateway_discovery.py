"""The discovery of a gateway without its proxy: fleet, prober and refresher around real channels, or around stubs."""

from __future__ import annotations

import threading

from support.stub_worker import StubWorker, index_of

from rsrv.gateway.discovery.prober import Prober
from rsrv.gateway.discovery.refresh import Refresher
from rsrv.gateway.methods import INDEX, READY, STATUS
from rsrv.gateway.metrics.counters import GatewayCounters
from rsrv.gateway.routing.table import RoutingTable
from rsrv.gateway.timers import Timers
from rsrv.gateway.workers.channels import ChannelSettings
from rsrv.gateway.workers.fleet import Endpoint, Fleet
from rsrv.gateway.workers.worker import Worker
from rsrv.protos import control as cp
from rsrv.protos import inference as pb


class FakeMode:
    name = "fake"

    def __init__(self, needs_poll=True):
        self.needs_poll = needs_poll
        self.ticks = []
        self.notes = []
        self.error = None

    def tick(self, ready, poll, now):
        self.ticks.append((list(ready), poll))
        if self.error is not None:
            raise self.error

    def take_notes(self):
        notes, self.notes = self.notes, []
        return notes


class FakeRouter:
    def __init__(self, mode):
        self.mode = mode
        self.lock = threading.Lock()
        self.table = RoutingTable()

    def install(self, table):
        self.table = table


class Scene:
    """A gateway's discovery around real channels, or stubs; `returned` has the workers that were on their way back."""

    def __init__(self, stack, *, stubs=False, probe_seconds=5.0, **options):
        self.timers = Timers()
        stack.callback(self.timers.close)
        self.fleet = Fleet(StubWorker.connect if stubs else self._connect)
        self.mode = FakeMode()
        self.router = FakeRouter(self.mode)
        self.refresher = Refresher(self.fleet, self.router, self.timers, probe_seconds=probe_seconds)
        self.returned = []
        self.held = None
        self.prober = Prober(
            self.fleet,
            self.router,
            self.timers,
            self.refresher,
            on_returned=self._on_returned,
            probe_seconds=probe_seconds,
            **options,
        )
        stack.callback(self.fleet.close)
        stack.callback(self.prober.stop)

    def _connect(self, endpoint):
        return Worker(
            endpoint.url,
            endpoint.name,
            settings=ChannelSettings(1 << 20, 1 << 20),
            streams=4,
            timers=self.timers,
            counters=GatewayCounters(),
        )

    def _on_returned(self, worker, proceed):
        self.returned.append(worker.url)
        if self.held is None:
            proceed()
        else:
            self.held.append(proceed)

    def join(self, *urls):
        return [self.fleet.add(Endpoint(url)) for url in urls]

    def ready(self):
        return [worker.url for worker in self.fleet.ready]


def let_all_answer(fleet):
    """Every stub that joins from now on answers as a ready worker with the model ``m``."""
    connect = fleet._connect

    def answering(endpoint):
        worker = connect(endpoint)
        worker.on_probe = answers_of(index_of("m"))
        return worker

    fleet._connect = answering


def answers_of(index):
    """What a stub does to be a ready worker with this index."""
    bodies = {
        READY: pb.ServerReadyResponse(ready=True).SerializeToString(),
        INDEX: index,
        STATUS: cp.ModelControlStatusResponse(incarnation="one", discipline="fifo").SerializeToString(),
    }
    return lambda probe: probe.answer(bodies[probe.path])
