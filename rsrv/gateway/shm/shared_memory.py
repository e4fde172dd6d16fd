"""System shared memory at the gateway: every worker is told what clients register, those that come later included.

Spec gateway-node 1.6. While a worker is being told, the ModelInfer calls for it wait at its gate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from rsrv.core.errors import Code, InvalidRequest, NoWorkers, RegionLimit, RegistrationFailed, RsrvError
from rsrv.gateway.faces.answer import Answer
from rsrv.gateway.faces.fanout import Done, Outcomes, fan_out, gather, unanswered
from rsrv.gateway.methods import LIVE, REGIONS, REGISTER, UNREGISTER
from rsrv.gateway.shm.regions import Regions, Step, forget
from rsrv.gateway.shm.replays import STEP_SECONDS, Replays
from rsrv.gateway.shm.turns import Turn, Turns
from rsrv.gateway.workers.hops import Metadata, passed_by
from rsrv.gateway.workers.outcome import Outcome, WorkerFailed
from rsrv.protos import inference as pb
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import parse, unary

if TYPE_CHECKING:
    from rsrv.gateway.metrics.counters import GatewayCounters
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.gateway.workers.worker import Worker
    from rsrv.rpc.call import Call

log = logging.getLogger(__name__)

MAX_REGIONS = 1024
MAX_OPERATIONS = 1024
"""Registrations and unregistrations that may be open at a time, most of which wait for others of the same name."""
MAX_BODY_BYTES = 16 << 10
"""A registration is kept as it came; a valid one takes at most some 5 KiB."""
STATUS_SECONDS = 5.0

_SAME_EVERYWHERE = (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED)
"""What a lone worker would say of such a request, too: handed on when all workers say the same."""


@dataclass(eq=False, slots=True)
class _Operation:
    """A client's registration or unregistration on its way.

    Attributes:
        targets: the workers that decide about it: those that were ready when it began.
        unsure: addresses of workers whose replay crossed it, so that nobody knows which came last.
        ended: whether it was answered and has left its turn.
    """

    step: Step
    answer: Answer
    turn: Turn = field(init=False)
    targets: tuple[Worker, ...] = ()
    unsure: set[str] = field(default_factory=set)
    ended: bool = False

    @property
    def passed(self) -> Metadata:
        """The gateways that the call has passed, as workers are told."""
        return passed_by(self.answer.call.metadata)


class SharedMemory:
    """The three methods, the registrations that are valid, and the replay of them. Thread safe; nothing waits.

    A worker that does not answer (it is away, or hangs) does not make a registration fail: it hears of it when it is
    back. `timeout` is in seconds, per call to a worker.
    """

    def __init__(
        self,
        fleet: Fleet,
        counters: GatewayCounters,
        *,
        timeout: float,
        max_regions: int = MAX_REGIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._counters = counters
        self._timeout = timeout
        self._max_regions = max_regions
        self._lock = threading.Lock()
        self._regions = Regions()
        self._open: set[_Operation] = set()
        self._turns = Turns(MAX_OPERATIONS)
        self._replays = Replays(
            self._regions,
            self._lock,
            lambda worker, step, done: self._tell(step, STEP_SECONDS, worker, done),
            on_begin=self._replay_begins,
            clock=clock,
        )

    def routes(self) -> Routes:
        return {
            REGIONS: Route(unary(pb.SystemSharedMemoryStatusRequest, self.status)),
            REGISTER: Route(self.register),
            UNREGISTER: Route(self.unregister),
        }

    # --- for clients ----------------------------------------------------------------------------------------------

    def status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        """The region of that name, or all for ""; nothing for an unknown name."""
        with self._lock:
            steps = [step for name, step in self._regions.steps.items() if request.name in ("", name)]
        response = pb.SystemSharedMemoryStatusResponse()
        for step in sorted(steps, key=lambda step: step.name):
            region = pb.SystemSharedMemoryRegisterRequest.FromString(step.body)
            row = response.regions[step.name]
            row.name, row.key, row.offset, row.byte_size = region.name, region.key, region.offset, region.byte_size
        return response

    def register(self, call: Call) -> None:
        """All workers that answer have the region, or none has it."""
        step = _step(call, registers=True)
        if not step.name:
            raise InvalidRequest("the registration names no shared memory region (name is empty)")
        self._enter(_Operation(step, Answer(call, self._counters)), self._register)

    def unregister(self, call: Call) -> None:
        """Of the named region, or of all for "". An unknown name is no error."""
        self._enter(_Operation(_step(call, registers=False), Answer(call, self._counters)), self._unregister)

    # --- for workers that know less than they should ----------------------------------------------------------------

    def replay(self, worker: Worker, done: Callable[[bool], object]) -> bool:
        """A request failed because `worker` does not know its region: register all regions there, then call `done`.

        False, without a call of `done`, when that would change nothing. `done` is told whether the worker took all.
        """
        return self._replays.tell_all(worker, done, needed=False)

    def welcome(self, worker: Worker, proceed: Callable[[], object]) -> None:
        """A worker has become ready, or started anew: tell it every region, then `proceed`, which is always called.

        A probe has a connection of its own. So the first call waits until the one of inference is there again: it may
        still be waiting to be dialled.
        """

        def greeted(_: Outcome) -> None:
            self._replays.tell_all(worker, lambda _: proceed())

        worker.call(LIVE, b"", timeout=STEP_SECONDS, wait=True, done=greeted)

    # --- operations -------------------------------------------------------------------------------------------------

    def _enter(self, operation: _Operation, begin: Callable[[_Operation], None]) -> None:
        """Raises Shed."""

        def begun() -> None:
            if operation.answer.call.cancelled:  # nothing was sent, and nobody waits
                self._turns.leave(operation.turn)
                return
            try:
                begin(operation)
            except Exception as error:
                self._conclude(operation, error)

        operation.turn = Turn(operation.step.name, begun)
        self._turns.take(operation.turn)

    def _register(self, operation: _Operation) -> None:
        if self._admit(operation):
            self._send(operation, self._registered)
        else:
            self._sweep(operation)

    def _unregister(self, operation: _Operation) -> None:
        self._admit(operation)
        self._send(operation, self._unregistered)

    def _admit(self, operation: _Operation) -> bool:
        """Count it as open and choose its targets; false when there is no room for one region more."""
        step = operation.step
        with self._lock:
            if step.registers and self._regions.get(step.name) is None:
                coming = sum(each.step.registers for each in self._open)
                if len(self._regions) + coming >= self._max_regions:
                    return False
            workers = self._fleet.workers
            operation.targets = tuple(worker for worker in workers if worker.ready) or workers
            operation.unsure |= self._replays.running
            self._open.add(operation)
        return True

    def _send(self, operation: _Operation, then: Callable[[_Operation, Outcomes], None]) -> None:
        tell = partial(self._tell, operation.step, self._timeout, metadata=operation.passed)
        gather(operation.targets, tell, self._continued(operation, then))

    def _registered(self, operation: _Operation, outcomes: Outcomes) -> None:
        done = [worker for worker in operation.targets if outcomes[worker.url].ok]
        refused = any(not outcome.ok and not unanswered(outcome) for outcome in outcomes.values())
        if not refused and (done or not operation.targets):
            silent = [worker.name for worker in operation.targets if not outcomes[worker.url].ok]
            if silent:
                log.warning("workers hear of a shared memory region later workers=%s", ",".join(silent))
            self._settle(operation, operation.step, _taken(outcomes))
            self._conclude(operation, None, _first(outcomes))
            return
        # As with a single worker, a region of that name that was valid before stays so.
        before = self._regions.get(operation.step.name)
        undo = before or forget(operation.step.name)
        error = self._failure(operation, outcomes)
        spared = {url for url, outcome in outcomes.items() if not outcome.ok and not unanswered(outcome)}

        def undone(operation: _Operation, undoings: Outcomes) -> None:
            for url, outcome in undoings.items():
                if not outcome.ok:
                    log.warning("a shared memory region stays on a worker worker=%s %s", url, outcome.text)
            self._settle(operation, undo, spared | _taken(undoings))
            self._conclude(operation, error)

        gather(
            done, partial(self._tell, undo, STEP_SECONDS, metadata=operation.passed), self._continued(operation, undone)
        )

    def _unregistered(self, operation: _Operation, outcomes: Outcomes) -> None:
        if operation.targets and not any(outcome.ok for outcome in outcomes.values()):
            self._conclude(operation, self._failure(operation, outcomes))
            return
        failed = [f"{self._fleet.name_of(url)}: {outcome.text}" for url, outcome in outcomes.items() if not outcome.ok]
        if failed:
            log.warning("shared memory was not unregistered everywhere %s", "; ".join(failed))
        self._settle(operation, operation.step, _taken(outcomes))
        self._conclude(operation, None, _first(outcomes))

    def _continued(
        self, operation: _Operation, then: Callable[[_Operation, Outcomes], None]
    ) -> Callable[[Outcomes], None]:
        """`then`, whose exceptions end the operation: its turn must not be held for ever."""

        def run(outcomes: Outcomes) -> None:
            try:
                then(operation, outcomes)
            except Exception as error:
                self._conclude(operation, error)

        return run

    def _settle(self, operation: _Operation, step: Step, taken: set[str]) -> None:
        """`step` is what is valid now, and `taken` are the addresses of the workers for which it is; of the others,
        those that have come meanwhile are told at once, the rest when they come back."""
        begun = []
        with self._lock:
            self._regions.apply(step)
            workers = self._fleet.workers
            told = {worker.url for worker in operation.targets}
            for worker in workers:
                url = worker.url
                if url in self._replays.running or url in operation.unsure or (url not in told and worker.ready):
                    begun.append(self._replays.tell(worker, step))
                elif url not in taken:
                    self._regions.misses(url, step)
                    worker.behind = True
            self._regions.keep({worker.url for worker in workers})
        for replay in begun:
            if replay is not None:
                self._replays.run(replay)

    def _conclude(self, operation: _Operation, error: Exception | None, body: bytes = b"") -> None:
        with self._lock:
            self._open.discard(operation)
            if operation.ended:
                return
            operation.ended = True
        if error is None:
            operation.answer.send(body)
        else:
            if not isinstance(error, RsrvError):
                log.error("an operation on shared memory failed in the gateway", exc_info=error)
            operation.answer.fail(error)
        self._turns.leave(operation.turn)

    def _failure(self, operation: _Operation, outcomes: Outcomes) -> RsrvError:
        what = "register" if operation.step.registers else "unregister"
        failed = {url: outcome for url, outcome in outcomes.items() if not outcome.ok}
        said = {(outcome.code, outcome.reason) for outcome in failed.values()}
        if len(failed) == len(outcomes) and len(said) == 1 and next(iter(said))[0] in _SAME_EVERYWHERE:
            return WorkerFailed(*next(iter(failed.items())))
        texts = "; ".join(f"{self._fleet.name_of(url)}: {outcome.text}" for url, outcome in failed.items())
        if not operation.step.registers or all(unanswered(outcome) for outcome in failed.values()):
            return NoWorkers(f"SHM {what} failed on all workers: [{texts}]")
        return RegistrationFailed(f"SHM {what} failed on workers: [{texts}]")

    # --- room for one more --------------------------------------------------------------------------------------------

    def _sweep(self, operation: _Operation) -> None:
        """Workers drop regions whose owners are gone: drop here what no worker has any more, then try once again."""
        with self._lock:
            known = list(self._regions.steps.values())
            workers = tuple(worker for worker in self._fleet.workers if worker.ready)

        def swept(operation: _Operation, outcomes: Outcomes) -> None:
            held = _names(outcomes)
            with self._lock:
                gone = 0 if held is None else self._regions.discard([s for s in known if s.name not in held])
            if gone:
                log.info("shared memory regions that no worker has any more were dropped count=%d", gone)
            if not self._admit(operation):
                raise RegionLimit(
                    f"cannot register shared memory region {operation.step.name!r}: {len(self._regions)} regions are "
                    "registered, the most that the gateway keeps",
                    hint="unregister what nobody uses: an empty name unregisters all regions",
                )
            self._send(operation, self._registered)

        fan_out(workers, REGIONS, b"", STATUS_SECONDS, self._continued(operation, swept), operation.passed)

    # --- small parts --------------------------------------------------------------------------------------------------

    def _tell(self, step: Step, timeout: float, worker: Worker, done: Done, metadata: Metadata = ()) -> None:
        """One call with the worker's gate closed."""

        def ended(outcome: Outcome) -> None:
            worker.release()
            if self._fleet.get(worker.url) is worker:
                self._counters.worker_call("SystemSharedMemory", worker.url, outcome.seconds)
            done(outcome)

        worker.hold()
        worker.call(step.path, step.body, timeout=timeout, metadata=metadata, done=ended)

    def _replay_begins(self, url: str) -> None:
        for operation in self._open:
            operation.unsure.add(url)
        workers = self._fleet.workers
        if self._regions.behind > len(workers):  # some are behind for good: they have left
            self._regions.keep({worker.url for worker in workers})


def _step(call: Call, *, registers: bool) -> Step:
    """Raises InvalidRequest for a body that is no such message, or longer than one needs to be."""
    kind = pb.SystemSharedMemoryRegisterRequest if registers else pb.SystemSharedMemoryUnregisterRequest
    if len(call.body) > MAX_BODY_BYTES:
        raise InvalidRequest(f"{len(call.body)} bytes for one shared memory region; at most {MAX_BODY_BYTES} are taken")
    return Step(registers, parse(call, kind).name, bytes(call.body))


def _taken(outcomes: Outcomes) -> set[str]:
    return {url for url, outcome in outcomes.items() if outcome.ok}


def _first(outcomes: Outcomes) -> bytes:
    """The first answer that arrived; empty when there are no workers."""
    return next((outcome.body for outcome in outcomes.values() if outcome.ok), b"")


def _names(outcomes: Outcomes) -> set[str] | None:
    """The regions that some worker has; None when one did not say."""
    found: set[str] = set()
    for outcome in outcomes.values():
        if not outcome.ok:
            return None
        try:
            found |= set(pb.SystemSharedMemoryStatusResponse.FromString(outcome.body).regions)
        except DecodeError:
            return None
    return found if outcomes else None
