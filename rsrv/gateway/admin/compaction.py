"""CompactMemory: for operators, who ask for it on all workers, and after a repack, for those whose models moved."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rsrv.core.errors import NoWorkers, Shed, Unimplemented
from rsrv.gateway.faces.answer import Answer
from rsrv.gateway.faces.fanout import Outcomes, gather
from rsrv.gateway.faces.unions import read
from rsrv.gateway.methods import COMPACT, CONTROL, path
from rsrv.gateway.workers.hops import Metadata, passed_by
from rsrv.gateway.workers.outcome import Outcome
from rsrv.protos import control as pb
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from rsrv.gateway.faces.fanout import Done
    from rsrv.gateway.metrics.counters import GatewayCounters
    from rsrv.gateway.timers import Timers
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.gateway.workers.worker import Worker
    from rsrv.rpc.call import Call

log = logging.getLogger(__name__)

LEAST_SECONDS = 300.0
MAX_OPEN = 4
"""Operators' calls at a time. Each may take minutes, and holds a thread of the engine."""
_WORKERS_ONLY = ("ModelControlStatus", "SetModelPolicy", "SetModelResidency")


class CompactionCalls:
    """Nothing waits, no gate is closed. `timeout` is that of requests, in seconds; these calls may take longer."""

    def __init__(self, fleet: Fleet, timers: Timers, counters: GatewayCounters, *, timeout: float) -> None:
        self._fleet = fleet
        self._timers = timers
        self._counters = counters
        self._timeout = max(timeout, LEAST_SECONDS)
        self._lock = threading.Lock()
        self._open = 0
        self._busy: set[str] = set()

    def routes(self) -> Routes:
        """All of ControlService, of which a gateway answers only this method."""
        others = {path(CONTROL, name): Route(self._refuse) for name in _WORKERS_ONLY}
        return {COMPACT: Route(self.handle), **others}

    def handle(self, call: Call) -> None:
        """An operator's call: every worker that is ready does it, with the same models. Raises Shed."""
        body = parse(call, pb.CompactMemoryRequest).SerializeToString()
        answer = Answer(call, self._counters)
        workers = self._fleet.ready or self._fleet.workers
        with self._lock:
            if self._open >= MAX_OPEN:
                raise Shed(f"{self._open} calls of CompactMemory are open; at most {MAX_OPEN} may be")
            self._open += 1

        def all_done(outcomes: Outcomes) -> None:
            with self._lock:
                self._open -= 1
            answer.answered_by(lambda: answer.message(self._total(outcomes)))

        passed = passed_by(call.metadata)
        gather(workers, lambda worker, done: self._call(worker, body, done, passed), all_done)

    def after_repack(self, models: Mapping[str, Sequence[str]]) -> None:
        """Worker's address → the models to load again there. Returns at once; may be called under the router's lock.

        A worker that is still at it is left out: it will do what is asked of it next time.
        """
        self._timers.after(0.0, lambda: self._after_repack(models))

    def _after_repack(self, models: Mapping[str, Sequence[str]]) -> None:
        for url in sorted(models):
            worker = self._fleet.get(url)
            with self._lock:
                if worker is None or url in self._busy:
                    continue
                self._busy.add(url)
            request = pb.CompactMemoryRequest(reload_models=sorted(models[url]))
            self._call(worker, request.SerializeToString(), self._logged(worker))

    def _logged(self, worker: Worker) -> Callable[[Outcome], None]:
        def done(outcome: Outcome) -> None:
            with self._lock:
                self._busy.discard(worker.url)
            if outcome.ok:
                log.info("memory compacted after a repack worker=%s seconds=%.3f", worker.name, outcome.seconds)
            else:
                log.warning(
                    "memory was not compacted after a repack worker=%s status=%s %s",
                    worker.name,
                    outcome.code.name,
                    outcome.text,
                )

        return done

    def _call(self, worker: Worker, body: bytes, done: Done, metadata: Metadata = ()) -> None:
        def ended(outcome: Outcome) -> None:
            if self._fleet.get(worker.url) is worker:
                self._counters.worker_call("CompactMemory", worker.url, outcome.seconds)
            done(outcome)

        worker.call(COMPACT, body, timeout=self._timeout, metadata=metadata, done=ended)

    def _total(self, outcomes: Outcomes) -> pb.CompactMemoryResponse:
        """The sums over the workers that did it. Raises NoWorkers when nobody did."""
        answers, failures = read(pb.CompactMemoryResponse, outcomes)
        texts = "; ".join(f"{self._fleet.name_of(url)}: {text}" for url, text in failures.items())
        if not answers:
            raise NoWorkers(f"CompactMemory failed on all workers: [{texts}]")
        if failures:
            log.warning("memory was not compacted everywhere %s", texts)
        return pb.CompactMemoryResponse(
            reloaded_models=sum(answer.reloaded_models for answer in answers.values()),
            resident_bytes_after=sum(answer.resident_bytes_after for answer in answers.values()),
        )

    def _refuse(self, call: Call) -> None:
        method = call.path.rpartition("/")[2]
        urls = ", ".join(worker.url for worker in self._fleet.workers) or "none now"
        raise Unimplemented(f"a gateway does not answer {method}: ask a worker", hint=f"its workers are {urls}")
