"""ModelInfer at the gateway: bytes in, bytes out. Reads a name, chooses a worker, and moves on when that one fails.

Nothing here waits: each step ends in a call to a worker, a timer or a refresh, and goes on where that reports back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import (
    FAILOVER_METADATA_KEY,
    Cancelled,
    Code,
    DeadlineExceeded,
    GatewayLoop,
    InvalidRequest,
    ModelFailed,
    ModelPreparing,
    NoWorkers,
    RsrvError,
    Shed,
    UnknownModel,
    UnregisteredRegion,
)
from rsrv.core.wire.peek import peek, timeout_parameter_ns, writes_shared_memory
from rsrv.gateway.metrics.counters import UNKNOWN, GatewayCounters
from rsrv.gateway.routing.log_limit import LogLimit
from rsrv.gateway.workers.channels import forwarded
from rsrv.gateway.workers.hops import GATEWAY_KEY, Hops, Metadata
from rsrv.gateway.workers.outcome import Outcome, WorkerFailed, status_name
from rsrv.gateway.workers.worker import BEHIND

if TYPE_CHECKING:
    from rsrv.gateway.discovery.refresh import Refresher
    from rsrv.gateway.routing.admission import Admission
    from rsrv.gateway.routing.retries import RetryBudget
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.shm.shared_memory import SharedMemory
    from rsrv.gateway.timers import Timer, Timers
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.gateway.workers.worker import Attempt, Worker
    from rsrv.rpc.call import Call

log = logging.getLogger(__name__)

RPC = "ModelInfer"


@dataclass(frozen=True, slots=True)
class Proxy:
    """The handler of ModelInfer and what it needs.

    Attributes:
        timeout_ns: for requests whose clients set no deadline.
        hedge_ns: after so long a second worker is asked as well; 0 = never.
        spreads: whether the mode spreads each model over all its workers, so that one that is full is no sign that all
            of them are.
    """

    fleet: Fleet
    router: Router
    admission: Admission
    counters: GatewayCounters
    retries: RetryBudget
    refresh: Refresher
    regions: SharedMemory
    timers: Timers
    timeout_ns: int
    hedge_ns: int = 0
    spreads: bool = False
    hops: Hops = field(default_factory=Hops)
    log_limit: LogLimit = field(default_factory=LogLimit)
    on_lost: Callable[[str], object] = lambda url: None
    """Told the address of a worker that could not be reached."""

    def handle(self, call: Call) -> None:
        """The handler of the route."""
        started = time.monotonic_ns()
        try:
            found = peek(call.body)
            if not found.model:
                raise InvalidRequest("the request names no model (model_name is empty)")
            known = self.router.table.knows(found.model)
            passed = call.metadata.get(GATEWAY_KEY)
            hop = self.hops.own if passed is None else self.hops.after(passed)
            # All that may find fault with the request comes before it is admitted: what enters has to leave.
            request = _Request(self, call, found.model, found.id, known, started, hop)
        except InvalidRequest:
            self._refused("", "InvalidArgument", started)
            raise
        except GatewayLoop:
            self._refused(found.model if known else UNKNOWN, "Unavailable", started)
            raise
        try:
            self.admission.enter()
        except Shed:
            self._refused(found.model if known else UNKNOWN, "ResourceExhausted", started)
            raise
        self.retries.request()
        call.on_cancel(request.cancelled)
        request.begin()

    def _refused(self, model: str, status: str, started: int) -> None:
        self.counters.finished(RPC, model, status, (time.monotonic_ns() - started) / 1e9)


class _Request:
    """One request on its way: the workers to try, the one that is being tried, and the one end of it."""

    __slots__ = (
        "_attempts",
        "_call",
        "_choice",
        "_deadline_ns",
        "_ended",
        "_hedge",
        "_id",
        "_known",
        "_lock",
        "_metadata",
        "_model",
        "_next",
        "_open",
        "_proxy",
        "_replayed",
        "_started",
    )

    def __init__(
        self, proxy: Proxy, call: Call, model: str, request_id: str, known: bool, started: int, hop: Metadata
    ) -> None:
        self._proxy = proxy
        self._call = call
        self._model = model
        self._id = request_id
        self._started = started
        self._deadline_ns = _deadline(call, started, proxy.timeout_ns)
        self._metadata: Metadata = forwarded(call.metadata, hop)
        self._lock = Lock()
        self._ended = False
        self._known = known
        self._choice: Any = None
        self._next = 0
        self._open = 0
        self._attempts: list[Attempt] = []
        self._hedge: Timer | None = None
        self._replayed = False

    # --- choosing ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Choose among the workers and send the request. When nobody serves the model as far as is known, look for it
        once, then choose, or say why not."""
        try:
            if self._known:
                self._proxy.router.arrived(self._model)
                if self._choose():
                    return
            self._proxy.refresh.refresh(self._deadline_ns, self._looked)
        except Exception as error:
            self._fail(error)

    def _looked(self) -> None:
        try:
            table = self._proxy.router.table
            self._known = table.knows(self._model)
            if self._known:
                self._proxy.router.arrived(self._model)
            if self._choose():
                return
            missing = table.not_ready(self._model)
            if missing is None and table.unheard:
                names = ", ".join(map(self._proxy.fleet.name_of, table.unheard[:8]))
                self._fail(NoWorkers(f"no worker has model {self._model!r}; not heard of yet: {names}"))
            elif missing is None:
                log.info("unknown model requested id=%r", self._id[:_SHOWN_ID])
                self._fail(UnknownModel(f"model {self._model!r} not found on any worker"))
            elif missing.reason == "failed":
                self._fail(ModelFailed(f"model {self._model!r} failed on every worker: {missing.text}"))
            else:
                self._fail(ModelPreparing(f"model {self._model!r} is not ready: {missing.text}"))
        except Exception as error:
            self._fail(error)

    def _choose(self) -> bool:
        """Choose and send; false when there is nobody to choose."""
        proxy = self._proxy
        units = proxy.router.mode.request_units(self._model, self._call.body)
        choice = proxy.router.choose(self._model, units)
        if choice is None:
            return False
        with self._lock:
            if self._ended:  # the client went away during the choice
                proxy.router.release(choice.reservation)
                return True
            self._choice = choice
        self._try_next(None)
        return True

    # --- trying -----------------------------------------------------------------------------------------------------

    def _try_next(self, last: Outcome | None) -> bool:
        """Send to the next worker of the list; when none is left, `last` is the answer. False when it was."""
        proxy, urls = self._proxy, self._choice.urls
        while True:
            with self._lock:
                if self._ended:
                    return True
                position, self._next = self._next, self._next + 1
            if position >= len(urls):
                self._give_up(last, urls[-1])
                return False
            worker = proxy.fleet.get(urls[position])
            if worker is not None:
                break
            last = last or Outcome(Code.UNAVAILABLE, text="it has left the gateway", sent=False)
        if position:
            proxy.router.move(self._choice.reservation, worker.url)
        self._send(worker)
        return True

    def _send(self, worker: Worker) -> None:
        proxy = self._proxy
        with self._lock:
            ended = self._ended
            self._open += not ended
            first = not self._attempts
            others = self._next < len(self._choice.urls)
        if ended:
            return
        attempt = worker.infer(
            self._call.body,
            deadline_ns=self._deadline_ns,
            metadata=self._metadata + _FAILOVER if others else self._metadata,
            others=others,
            done=lambda outcome: self._answered(worker, outcome),
        )
        with self._lock:
            ended = self._ended
            if not ended:
                self._attempts.append(attempt)
        if ended:
            attempt.cancel()
        elif first and others and proxy.hedge_ns and self._may_repeat():
            self._hedge = proxy.timers.at(time.monotonic_ns() + proxy.hedge_ns, self._ask_another)

    def _ask_another(self) -> None:
        """The first worker takes long: ask a second one, too, if it is one to be asked. Its work is not charged."""
        proxy = self._proxy
        with self._lock:
            if self._ended or self._next >= len(self._choice.urls):
                return
            url = self._choice.urls[self._next]
            worker = proxy.fleet.get(url)
            if worker is None or not worker.ready or worker.draining or not proxy.retries.take(hedge=True):
                return
            self._next += 1
        proxy.counters.hedged()
        self._send(worker)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _answered(self, worker: Worker, outcome: Outcome) -> None:
        try:
            self._take(worker, outcome)
        except Exception as error:
            self._fail(error)

    def _take(self, worker: Worker, outcome: Outcome) -> None:
        proxy = self._proxy
        with self._lock:
            self._open -= 1
        if outcome.ok:
            proxy.router.succeeded(worker.url, self._model)
            if self._end("OK"):
                try:
                    self._call.send([outcome.body])
                    self._call.finish(outcome.trailers)
                except Exception as error:  # it has ended, so nobody else will tell the client
                    self._call.fail(error)
            return
        if self._ended:
            return
        if seconds := proxy.router.failed(worker.url, self._model, outcome):
            proxy.counters.ejected(worker.url)
            log.warning("worker=%s is asked last for %g s: its calls fail one after the other", worker.name, seconds)
        if outcome.lost:
            proxy.on_lost(worker.url)
        if outcome.code is Code.NOT_FOUND:
            proxy.refresh.request()
        if self._is_stale(outcome) and proxy.regions.replay(worker, lambda all_well: self._again(worker, outcome)):
            return
        with self._lock:
            others = self._next < len(self._choice.urls)
            hedged = self._open > 0
        if hedged:
            return  # there is another attempt, which decides
        if others and self._moves_on(outcome) and time.monotonic_ns() < self._deadline_ns:
            # What was never sent makes no worker do anything twice.
            if not outcome.sent or proxy.retries.take():
                proxy.counters.failover(self._model, outcome.reason or status_name(outcome.code))
                log.debug("failover model=%s worker=%s status=%s", self._model, worker.url, outcome.code.name)
                self._try_next(outcome)
                return
            self._give_up(outcome, worker.url, _NO_BUDGET)
            return
        self._give_up(outcome, worker.url)

    def _moves_on(self, outcome: Outcome) -> bool:
        """Whether another worker is to be tried (spec gateway-node 1.5.3)."""
        if outcome.moves_on:
            # A worker that is gone cannot write into shared memory any more, and one that hangs was looked at before.
            return not outcome.unsure or self._may_repeat()
        if outcome.code is Code.RESOURCE_EXHAUSTED:
            return outcome.reason in _FULL or (self._proxy.spreads and outcome.reason in _MODEL_FULL)
        return False

    def _is_stale(self, outcome: Outcome) -> bool:
        """Whether a worker does not know a region that the gateway may know: it has started anew, or was away."""
        if self._replayed or not (outcome is BEHIND or outcome.reason == UnregisteredRegion.reason):
            return False
        self._replayed = True
        return True

    def _again(self, worker: Worker, outcome: Outcome) -> None:
        """Ask the same worker once more, after its regions were registered again."""
        if outcome.sent and not self._proxy.retries.take():
            self._give_up(outcome, worker.url, _NO_BUDGET)
        elif not self._ended:
            self._send(worker)

    def _may_repeat(self) -> bool:
        return not writes_shared_memory(self._call.body)

    # --- the end ----------------------------------------------------------------------------------------------------

    def cancelled(self) -> None:
        """Nobody waits for the answer any more: the client went away, or its deadline passed."""
        # The engine may be a little early, for it was told the deadline as a time from its own now.
        late = 0 < self._call.deadline_ns <= time.monotonic_ns() + _EARLY_NS
        self._end("DeadlineExceeded" if late else "Cancelled")

    def _give_up(self, outcome: Outcome | None, url: str, why: str = "") -> None:
        """The last word of the last worker is the answer; `why` there is no other one, for the log."""
        outcome = outcome or Outcome(Code.UNAVAILABLE, text="no replica was tried", sent=False)
        name = self._proxy.fleet.name_of(url)
        if outcome.code is Code.CANCELLED and not outcome.sent:
            self._fail(Cancelled(outcome.text))
        elif not outcome.sent and outcome.code is Code.DEADLINE_EXCEEDED:
            self._fail(DeadlineExceeded(outcome.text))
        else:
            self._log(name, outcome, why)
            self._fail(WorkerFailed(url, outcome))

    def _log(self, name: str, outcome: Outcome, why: str) -> None:
        left_out = self._proxy.log_limit.take((name, outcome.code, why))
        if left_out is None:
            return
        level = logging.WARNING if outcome.code in _WORKERS_FAULT else logging.INFO
        told = (name, self._model, self._id[:_SHOWN_ID], outcome.code.name, why, outcome.text[:_SHOWN_TEXT])
        more = f" (and {left_out} more of this kind)" if left_out else ""
        log.log(level, "worker=%s model=%s id=%r status=%s %s%s%s", *told, more)

    def _fail(self, error: Exception) -> None:
        """The call logs what is no error of ours."""
        if self._end(status_name(error.code if isinstance(error, RsrvError) else Code.INTERNAL)):
            self._call.fail(error)

    def _end(self, status: str) -> bool:
        """Let go of everything, once; false when that was done before."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
            choice = self._choice
            # Without a circle of references the bytes are freed now, and not when Python looks for circles.
            attempts, self._attempts = self._attempts, []
        proxy = self._proxy
        if self._hedge is not None:
            self._hedge.cancel()
        for attempt in attempts:
            attempt.cancel()  # which those that are over ignore
        if choice is not None:
            proxy.router.release(choice.reservation)
        proxy.admission.leave()
        label = self._model if self._known else UNKNOWN
        proxy.counters.finished(RPC, label, status, (time.monotonic_ns() - self._started) / 1e9)
        return True


_EARLY_NS = 10_000_000
_NO_BUDGET = "no budget for another attempt: "
_SHOWN_ID, _SHOWN_TEXT = 64, 500
"""Characters in the log of what clients make up, and of what workers say about it."""
_FULL = ("device_oom", "shed")
"""Reasons of RESOURCE_EXHAUSTED that say that this worker has no room for any model."""
_MODEL_FULL = ("queue_full", "held_full")
"""Reasons that say that it has none for this model, which a placement wants to keep where it is."""
_WORKERS_FAULT = frozenset({Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED})
_FAILOVER: Metadata = ((FAILOVER_METADATA_KEY, "1"),)
"""Tells a worker that another one is there, so that it refuses what would have to wait."""


def _deadline(call: Call, now: int, timeout_ns: int) -> int:
    """When the request must be over: what the client said, in the call or in its body, else the gateway's own limit."""
    if call.deadline_ns:
        return call.deadline_ns
    within = timeout_parameter_ns(call.body)
    return now + (within if within > 0 else timeout_ns)
