"""The unary RPCs beside ModelInfer, shared memory and control: a gateway answers them as a single worker would."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rsrv
from rsrv.core.errors import Code, DeadlineExceeded, NoWorkers, RsrvError, UnknownModel
from rsrv.gateway.faces.answer import Answer
from rsrv.gateway.faces.fanout import Outcomes, fan_out, unanswered
from rsrv.gateway.faces.unions import read, sum_of_statistics, union_of_indexes
from rsrv.gateway.methods import INFERENCE, path
from rsrv.gateway.workers.channels import forwarded
from rsrv.gateway.workers.hops import Metadata, passed_by
from rsrv.gateway.workers.outcome import Outcome, WorkerFailed
from rsrv.protos import inference as pb
from rsrv.rpc.health import HealthService
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import parse, unary

if TYPE_CHECKING:
    from rsrv.gateway.discovery.refresh import Refresher
    from rsrv.gateway.metrics.counters import GatewayCounters
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.gateway.workers.worker import Worker
    from rsrv.rpc.call import Call

log = logging.getLogger(__name__)

VERSIONS = ("", "1")
EXTENSIONS = ("system_shared_memory", "model_configuration", "statistics")
"""Of the names in docs/protocol.md those that a gateway has: models are loaded, and weights moved, at a worker."""

WORKER_SECONDS = 5.0
"""How long one worker may take for one of these calls."""
NAMESPACE_SECONDS = 2.0
"""How long one may take to say whether it sees an object: clients wait with their first request, some for 3 s."""


class GatewayServices:
    """The handlers; those that ask workers end in continuations. `timeout` is in seconds, for clients without a
    deadline; `ready` is the answer of ServerReady, of ``/readyz`` and of health.

    Attributes:
        health: ``grpc.health.v1``; `changed` tells it what it has to know.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        counters: GatewayCounters,
        refresh: Refresher,
        *,
        ready: Callable[[], bool],
        timeout: float,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._counters = counters
        self._refresh = refresh
        self._ready = ready
        self._timeout_ns = int(timeout * 1e9)
        self.health = HealthService(self.is_serving)
        self._last: Any = None

    def routes(self) -> Routes:
        handlers: dict[str, Callable[[Call], None]] = {
            "ServerLive": unary(pb.ServerLiveRequest, lambda _: pb.ServerLiveResponse(live=True)),
            "ServerReady": unary(pb.ServerReadyRequest, lambda _: pb.ServerReadyResponse(ready=self._ready())),
            "ServerMetadata": unary(pb.ServerMetadataRequest, self.server_metadata),
            "ModelReady": unary(pb.ModelReadyRequest, self.model_ready),
            "ModelMetadata": self._forwarding(pb.ModelMetadataRequest),
            "ModelConfig": self._forwarding(pb.ModelConfigRequest),
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
            "IsSameIPCNamespace": self.is_same_ipc_namespace,
            # As at a worker: clients that used no memory of a card unregister all of it nevertheless.
            "CudaSharedMemoryStatus": unary(
                pb.CudaSharedMemoryStatusRequest, lambda _: pb.CudaSharedMemoryStatusResponse()
            ),
            "CudaSharedMemoryUnregister": unary(
                pb.CudaSharedMemoryUnregisterRequest, lambda _: pb.CudaSharedMemoryUnregisterResponse()
            ),
        }
        return {
            **{path(INFERENCE, name): Route(handler) for name, handler in handlers.items()},
            **self.health.routes(),
        }

    # --- answered here ----------------------------------------------------------------------------------------------

    def is_serving(self, service: str) -> bool | None:
        """The answer of ``grpc.health.v1``: "" and the service are the gateway, other names models; None = unknown."""
        if service in ("", INFERENCE):
            return self._ready()
        table = self._router.table
        return bool(table.urls(service)) if table.knows(service) else None

    def changed(self) -> None:
        """Call it when readiness or the routing table may have changed: who watches health is told. Quick."""
        table = self._router.table
        now = (self._ready(), table.models, frozenset(table.missing))
        if now != self._last:
            self._last = now
            self.health.notify()

    def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="rsrv", version=rsrv.__version__, extensions=EXTENSIONS)

    def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """False for unknown names too."""
        return pb.ModelReadyResponse(ready=request.version in VERSIONS and bool(self._router.table.urls(request.name)))

    # --- answered by one worker -------------------------------------------------------------------------------------

    def _forwarding(self, request_class: Any) -> Callable[[Call], None]:
        """A handler that hands the bytes to a worker that has the model, and its answer back."""

        def handle(call: Call) -> None:
            model = parse(call, request_class).name
            deadline_ns = call.deadline_ns or time.monotonic_ns() + self._timeout_ns
            forward = _Forward(call, Answer(call, self._counters), deadline_ns)
            call.on_cancel(forward.cancel)
            workers = self._holders(model)
            if workers:
                forward.ask(workers)
                return

            def looked() -> None:
                found = self._holders(model)
                if found:
                    forward.ask(found)
                else:
                    forward.answer.fail(UnknownModel(f"model {model!r} not found on any worker"))

            self._refresh.refresh(deadline_ns, lambda: forward.answer.answered_by(looked))

        return handle

    def _holders(self, model: str) -> Sequence[Worker]:
        """Who can tell about the model, the best to ask first: also one that does not serve it knows its tensors."""
        table = self._router.table
        found = [worker for url in table.urls(model) if (worker := self._fleet.get(url)) is not None]
        if not found and table.knows(model):
            found = list(self._fleet.workers)
        return sorted(found, key=lambda worker: (not worker.ready, worker.draining))

    # --- answered by all workers --------------------------------------------------------------------------------------

    def repository_index(self, call: Call) -> None:
        parse(call, pb.RepositoryIndexRequest)
        self._ask_all(call, pb.RepositoryIndexResponse, lambda answers: union_of_indexes(answers, self._fleet.name_of))

    def model_statistics(self, call: Call) -> None:
        model = parse(call, pb.ModelStatisticsRequest).name
        if model and not self._fleet.workers:
            raise UnknownModel(f"model {model!r} not found on any worker")
        self._ask_all(call, pb.ModelStatisticsResponse, sum_of_statistics)

    def is_same_ipc_namespace(self, call: Call) -> None:
        """True when all workers say so that are ready and answer; nobody is no.

        As with registrations, one that is away or hangs has no say: it is told of regions when it is back, and a
        request for a region that it cannot open is an error that says so.
        """
        parse(call, pb.IsSameIPCNamespaceRequest)
        answer = Answer(call, self._counters)
        seconds = NAMESPACE_SECONDS
        if call.deadline_ns:  # who gives less time gets an answer, too
            seconds = min(seconds, max(0.0, (call.deadline_ns - time.monotonic_ns()) / 2e9))

        def answered(outcomes: Outcomes) -> None:
            present = {url: each for url, each in outcomes.items() if not (unanswered(each) or each.moves_on)}
            answers, failures = read(pb.IsSameIPCNamespaceResponse, present)
            same = bool(answers) and not failures and all(each.same for each in answers.values())
            answer.message(pb.IsSameIPCNamespaceResponse(same=same))

        fan_out(self._present(), call.path, call.body, seconds, answered, passed_by(call.metadata))

    def _ask_all(self, call: Call, response_class: Any, merge: Callable[[Mapping[str, Any]], Any]) -> None:
        """Ask the workers that are ready (all, when none is) and merge what those say that answer."""
        answer = Answer(call, self._counters)

        def answered(outcomes: Outcomes) -> None:
            answers, failures = read(response_class, outcomes)
            if outcomes and not answers:
                answer.fail(self._worst(call, outcomes, failures))
            else:
                for url, text in failures.items():
                    # Not every worker has every model, and clients ask for statistics again and again.
                    level = logging.DEBUG if outcomes[url].code is Code.NOT_FOUND else logging.WARNING
                    log.log(level, "rpc=%s worker=%s %s", call.path, self._fleet.name_of(url), text)
                answer.answered_by(lambda: answer.message(merge(answers)))

        fan_out(self._present(), call.path, call.body, WORKER_SECONDS, answered, passed_by(call.metadata))

    def _present(self) -> Sequence[Worker]:
        """The workers that are ready; all, when none is."""
        return tuple(worker for worker in self._fleet.workers if worker.ready) or self._fleet.workers

    def _worst(self, call: Call, outcomes: Outcomes, failures: Mapping[str, str]) -> RsrvError:
        """Nobody gave an answer: that a model is unknown only holds if all say so."""
        if all(outcome.code is Code.NOT_FOUND for outcome in outcomes.values()):
            return WorkerFailed(*next(iter(outcomes.items())))
        said = [
            (url, outcome)
            for url, outcome in outcomes.items()
            if not (outcome.ok or outcome.code is Code.NOT_FOUND or unanswered(outcome))
        ]
        if said:
            return WorkerFailed(*said[0])
        texts = "; ".join(f"{self._fleet.name_of(url)}: {text}" for url, text in failures.items())
        return NoWorkers(f"no worker answered {call.path.rpartition('/')[2]}: [{texts}]")


class _Forward:
    """One call that is handed to one worker after another until one answers."""

    def __init__(self, call: Call, answer: Answer, deadline_ns: int) -> None:
        self.answer = answer
        self._call = call
        self._deadline_ns = deadline_ns
        self._metadata: Metadata = forwarded(call.metadata, passed_by(call.metadata))
        self._workers: Sequence[Worker] = ()
        self._next = 0
        self._lock = threading.Lock()
        self._attempt: Any = None
        self._cancelled = False

    def ask(self, workers: Sequence[Worker]) -> None:
        """The first of `workers`, and the next one when it cannot answer."""
        self._workers = workers
        self._ask_next(None)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled, attempt = True, self._attempt
        if attempt is not None:
            attempt.cancel()

    def _ask_next(self, last: RsrvError | None) -> None:
        left = (self._deadline_ns - time.monotonic_ns()) / 1e9
        if left <= 0:
            self.answer.fail(DeadlineExceeded("deadline exceeded at gateway"))
            return
        if self._next >= len(self._workers):
            assert last is not None, "there is at least one worker to ask"
            self.answer.fail(last)
            return
        worker = self._workers[self._next]
        position = self._next = self._next + 1
        attempt = worker.call(
            self._call.path,
            self._call.body,
            timeout=min(left, WORKER_SECONDS),
            metadata=self._metadata,
            done=lambda outcome: self._answered(worker, outcome),
        )
        with self._lock:
            cancelled = self._cancelled
            if self._next == position:  # it has not moved on already
                self._attempt = attempt
        if cancelled:
            attempt.cancel()

    def _answered(self, worker: Worker, outcome: Outcome) -> None:
        def go_on() -> None:
            if outcome.ok:
                self.answer.send(outcome.body, outcome.trailers)
            elif (outcome.moves_on or unanswered(outcome)) and not self._cancelled:
                self._ask_next(WorkerFailed(worker.url, outcome))
            else:
                self.answer.fail(WorkerFailed(worker.url, outcome))

        self.answer.answered_by(go_on)
