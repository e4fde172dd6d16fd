"""Workers that a test answers for, call by call, and a fleet of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rsrv.core.errors import Code
from rsrv.gateway.workers.outcome import Outcome
from rsrv.protos import inference as pb

SERVICE = "/inference.GRPCInferenceService/"
OK = Outcome(Code.OK)
AWAY = Outcome(Code.UNAVAILABLE, text="connection refused", sent=False)
REFUSED = Outcome(Code.INTERNAL, text="no", trailers={"rsrv-reason": "internal"})


@dataclass
class Told:
    """One call to a worker that is not over."""

    what: str
    body: bytes
    timeout: float
    done: Callable[[Outcome], None]


class ScriptedWorker:
    """Registers what it is told as a worker would, unless `outcome` says otherwise; with `hold_calls` it waits for
    `answer`."""

    def __init__(self, url: str, *, ready: bool = True, incarnation: str = "first") -> None:
        self.url = url
        self.name = f"worker-{url}"
        self.ready = ready
        self.draining = False
        self.behind = False
        self.incarnation = incarnation
        self.outcome: Callable[[str, bytes], Outcome | None] = lambda what, body: None
        self.hold_calls = False
        self.holds = 0
        self.log: list[str] = []
        self.regions: dict[str, bytes] = {}
        self.open: list[Told] = []

    def hold(self) -> None:
        self.holds += 1

    def release(self) -> None:
        self.holds -= 1
        assert self.holds >= 0

    def call(self, path, body, *, timeout, metadata=(), wait=False, done):
        assert path.startswith(SERVICE)
        if wait:  # until it is connected, which it is
            done(OK)
            return
        told = Told(path.removeprefix(SERVICE).removeprefix("SystemSharedMemory"), body, timeout, done)
        self.open.append(told)
        if not self.hold_calls:
            self.answer()

    def answer(self, outcome: Outcome | None = None, *, position: int = 0, takes: bool = False) -> None:
        """End an open call, the oldest one; with `takes` the worker does what it is told, whatever it says then."""
        told = self.open.pop(position)
        if takes:
            self._take(told)
        scripted = outcome or self.outcome(told.what, told.body)
        told.done(self._take(told) if scripted is None else scripted)

    def _take(self, told: Told) -> Outcome:
        if told.what == "Register":
            name = pb.SystemSharedMemoryRegisterRequest.FromString(told.body).name
            self.log.append(f"+{name}")
            self.regions[name] = told.body
        elif told.what == "Unregister":
            name = pb.SystemSharedMemoryUnregisterRequest.FromString(told.body).name
            self.log.append(f"-{name}")
            for each in [name] if name else list(self.regions):
                self.regions.pop(each, None)
        elif told.what == "Status":
            response = pb.SystemSharedMemoryStatusResponse()
            for name in self.regions:
                response.regions[name].name = name
            return Outcome(Code.OK, response.SerializeToString())
        return OK


class ScriptedFleet:
    def __init__(self, *workers: ScriptedWorker) -> None:
        self.workers = tuple(workers)

    @property
    def ready(self):
        return tuple(worker for worker in self.workers if worker.ready and not worker.draining)

    def get(self, url):
        return next((worker for worker in self.workers if worker.url == url), None)

    def name_of(self, url):
        worker = self.get(url)
        return url if worker is None else worker.name
