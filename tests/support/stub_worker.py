"""A worker without a connection, for tests of what the gateway does with answers: each probe waits until it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rsrv.core.errors import Code
from rsrv.gateway.workers.fleet import Endpoint
from rsrv.gateway.workers.outcome import Outcome
from rsrv.protos import inference as pb


@dataclass
class Probe:
    path: str
    done: Callable[[Outcome], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def answer(self, body: bytes = b"") -> None:
        self.done(Outcome(Code.OK, body))

    def fail(self, code: Code, reason: str = "") -> None:
        self.done(Outcome(code, trailers={"rsrv-reason": reason} if reason else {}))


class StubWorker:
    """What `Fleet(StubWorker.connect)` makes. `probes` are the questions so far; `on_probe` may answer them at once."""

    def __init__(self, url: str, name: str = "", metrics: str | None = None, source: str = "config") -> None:
        self.url, self.name, self.metrics, self.source = url, name or url, metrics, source
        self.ready = False
        self.draining = False
        self.incarnation = ""
        self.discipline = ""
        self.inflight = 0
        self.waiting = 0
        self.rebuilt = 0
        self.closed = False
        self.probes: list[Probe] = []
        self.on_probe: Callable[[Probe], None] | None = None

    @classmethod
    def connect(cls, endpoint: Endpoint) -> StubWorker:
        return cls(endpoint.url, endpoint.name, endpoint.metrics, endpoint.source)

    def probe(self, path: str, body: bytes, *, timeout: float, done: Callable[[Outcome], None]) -> Probe:
        probe = Probe(path, done)
        self.probes.append(probe)
        if self.on_probe is not None:
            self.on_probe(probe)
        return probe

    def rebuild(self) -> None:
        self.rebuilt += 1

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def index_of(*ready: str, **reasons: str) -> bytes:
    """The bytes of a RepositoryIndex answer: READY models, and others with why they are not."""
    answer = pb.RepositoryIndexResponse()
    for name in ready:
        answer.models.add(name=name, state="READY")
    for name, reason in reasons.items():
        answer.models.add(name=name, state="UNAVAILABLE", reason=reason)
    return answer.SerializeToString()
