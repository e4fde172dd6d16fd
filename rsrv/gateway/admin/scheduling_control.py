"""The gateway's scheduling over gRPC: what it does, and what operators may change while it runs (spec 3.3)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import InvalidRequest, NoWorkers, Shed, UnknownModel, WrongState
from rsrv.gateway.admin.messages import (
    policy_message,
    policy_values,
    repack_message,
    replicas_on_wire,
    status_message,
)
from rsrv.gateway.admin.rules import (
    effective_replicas,
    override_of,
    placement_warnings,
    policy_warnings,
    require_model_name,
)
from rsrv.gateway.methods import GATEWAY_CONTROL, path
from rsrv.gateway.scheduling.packing import LptPacking
from rsrv.protos import control as pb
from rsrv.rpc.call import reply
from rsrv.rpc.listen import is_loopback
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import parse, unary

if TYPE_CHECKING:
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.scheduling.knobs import Knobs
    from rsrv.gateway.scheduling.reports import PackingStatus
    from rsrv.gateway.timers import Timers
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.rpc.call import Call

log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 120.0
POLL_SECONDS = 0.05
"""How often a call that waits for a repack looks whether it is done."""
MAX_WAITING = 16
"""Calls that wait for a repack. Each holds a thread of the engine, which other calls need."""


class ControlGate:
    """Whether callers may change anything."""

    def __init__(self, control: bool | None, host: str) -> None:
        """`control` is the configuration's; None means yes when `host`, where gRPC listens, is a loopback address."""
        self._open = is_loopback(host) if control is None else control
        self._configured = control is not None

    def require(self) -> None:
        """Raises WrongState (``control_off``)."""
        if not self._open:
            why = "has control: false" if self._configured else "listens on more than a loopback address"
            raise WrongState(
                f"this gateway lets nobody change anything: it {why}",
                reason="control_off",
                hint="control: true in its configuration (RSRV_GATEWAY_CONTROL) allows it",
            )

    def guarded(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`method`, which changes something, behind the gate."""

        def checked(request: Any) -> Any:
            self.require()
            return method(request)

        return checked


class SchedulingControl:
    """The four methods about scheduling. `keep` writes changed knobs where they outlive the process and says whether
    it could; None = nowhere."""

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        timers: Timers,
        gate: ControlGate,
        *,
        keep: Callable[[Knobs], bool] | None = None,
    ) -> None:
        self._router = router
        self._fleet = fleet
        self._timers = timers
        self._gate = gate
        self._keep = keep
        self._lock = threading.Lock()
        self._waiting = 0

    def routes(self) -> Routes:
        guarded = self._gate.guarded
        methods = {
            "GetSchedulingStatus": unary(pb.GetSchedulingStatusRequest, self.status),
            "SetSchedulingPolicy": unary(pb.SetSchedulingPolicyRequest, guarded(self.set_policy)),
            "SetModelPlacement": unary(pb.SetModelPlacementRequest, guarded(self.set_placement)),
            "Repack": self.repack,
        }
        return {path(GATEWAY_CONTROL, name): Route(handler, "unary") for name, handler in methods.items()}

    # --- methods ----------------------------------------------------------------------------------------------------

    def status(self, request: pb.GetSchedulingStatusRequest) -> pb.GetSchedulingStatusResponse:
        with self._router.lock:
            mode = self._router.mode
            status = mode.status()
        if status is None:
            return pb.GetSchedulingStatusResponse(mode=mode.name)
        draining = frozenset(worker.url for worker in self._fleet.workers if worker.draining)
        message = status_message(mode.name, status, self._fleet.name_of, draining)
        shown = {row.worker for row in message.workers}
        for worker in self._fleet.workers:  # those without a model, a budget, or readiness: drained ones, for example
            if worker.url not in shown:
                message.workers.add(worker=worker.url, name=worker.name, draining=worker.draining, ready=worker.ready)
        return message

    def set_policy(self, request: pb.SetSchedulingPolicyRequest) -> pb.SetSchedulingPolicyResponse:
        self._packing()
        if not request.update_mask:
            raise InvalidRequest("update_mask is empty; wanted the names of the fields that are to change")
        if not request.HasField("policy"):
            raise InvalidRequest("policy is not set; wanted the new values of the fields in update_mask")
        values = policy_values(request.policy, request.update_mask)
        with self._router.lock:
            packing = self._packing()
            before = packing.knobs
            after = packing.change(**values)
            status = packing.status()
        log.info(
            "scheduling policy changed by an operator fields=%s generation=%d before=%s after=%s",
            ",".join(values),
            after.generation,
            {name: getattr(before, name) for name in values},
            {name: getattr(after, name) for name in values},
        )
        warnings = policy_warnings(before, after, frozenset(values), status)
        persisted = self._persist(after, warnings)
        return pb.SetSchedulingPolicyResponse(applied=policy_message(after), warnings=warnings, persisted=persisted)

    def set_placement(self, request: pb.SetModelPlacementRequest) -> pb.SetModelPlacementResponse:
        self._packing()
        name = request.name
        if not name:
            raise InvalidRequest("name is empty; wanted the name of a model")
        known = self._router.table.knows(name)
        if not known:
            require_model_name(name)
        if not known and not request.allow_unknown_model:
            raise UnknownModel(
                f"no worker has a model {name!r}",
                hint="allow_unknown_model (--allow-unknown) keeps the setting for one that comes later",
            )
        # The new record is made of the one that it replaces under one lock: of two calls at once both survive.
        with self._router.lock:
            packing = self._packing()
            before = packing.knobs.override(name)
            after = packing.set_override(name, override_of(request, before))
            status = packing.status()
        override = after.override(name)
        log.info(
            "placement of a model changed by an operator model=%s generation=%d before=%s after=%s",
            name,
            after.generation,
            before,
            override,
        )
        row = next((model for model in status.models if model.name == name), None)
        fill_mode, quantum = ("unknown", 1) if row is None else (row.fill_mode, row.fill_quantum)
        wanted = override.replicas or after.default_replicas
        effective = effective_replicas(wanted, sum(worker.ready for worker in status.workers))
        warnings = placement_warnings(name, wanted, effective, status, known=known)
        if fill_mode == "inflight":
            warnings += replace(after, models={name: override}).inflight_warnings()
        persisted = self._persist(after, warnings)
        return pb.SetModelPlacementResponse(
            name=name,
            configured_replicas=replicas_on_wire(override.replicas),
            effective_replicas=effective,
            fill_mode=fill_mode,
            fill_quantum=quantum,
            warnings=warnings,
            persisted=persisted,
        )

    def repack(self, call: Call) -> None:
        """Ask for a repack. For a call that waits for it, a timer looks again and again, and answers."""
        request = parse(call, pb.RepackRequest)
        self._gate.require()
        self._packing()
        wait, warnings = request.wait_seconds, []
        if not wait >= 0:
            raise InvalidRequest(f"wait_seconds is {wait:g}; wanted a number from 0 to {MAX_WAIT_SECONDS:g}")
        if wait > MAX_WAIT_SECONDS:
            warnings.append(f"wait_seconds is {wait:g}; this call waits {MAX_WAIT_SECONDS:g} s at most")
            wait = MAX_WAIT_SECONDS
        if wait > 0:
            self._take_place(call)
        with self._router.lock:
            packing = self._packing()
            tick = packing.status().tick
            if wait > 0 and (tick is None or not tick.ready):
                raise NoWorkers(
                    "no worker was ready when the gateway last looked, so that nothing can be placed",
                    hint="wait_seconds: 0 asks for a repack as soon as one is",
                )
            sequence = packing.request_repack()
        log.info("repack asked for by an operator sequence=%d", sequence)
        if wait > 0:
            RepackWait(call, packing, sequence, wait, warnings, self._router, self._timers).look()
        else:
            with self._router.lock:
                status = packing.status()
            reply(call, repack_answer(status, sequence, 0.0, warnings))

    # --- small parts ------------------------------------------------------------------------------------------------

    def _packing(self) -> LptPacking:
        """The scheduler. Raises WrongState (``mode``) when it is another."""
        mode = self._router.mode
        if not isinstance(mode, LptPacking):
            raise WrongState(
                f"this gateway places no models: its mode is {mode.name}",
                reason="mode",
                hint="scheduling.mode: lpt_packing does, from the start of the gateway",
            )
        return mode

    def _take_place(self, call: Call) -> None:
        """Count a call among those that wait, until it ends. Raises Shed."""
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise Shed(
                    f"{self._waiting} calls wait for a repack; at most {MAX_WAITING} may",
                    hint="wait_seconds: 0 asks for a repack without waiting",
                )
            self._waiting += 1
        call.on_end(self._leave_place)

    def _leave_place(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _persist(self, knobs: Knobs, warnings: list[str]) -> bool:
        if self._keep is None:
            return False
        kept = self._keep(knobs)
        if not kept:
            warnings.append("the state file could not be written: the change is lost when the gateway ends")
        return kept


class RepackWait:
    """A call that is answered when a repack is done, or when it has waited long enough."""

    def __init__(
        self,
        call: Call,
        packing: LptPacking,
        sequence: int,
        seconds: float,
        warnings: list[str],
        router: Router,
        timers: Timers,
    ) -> None:
        self._call = call
        self._packing = packing
        self._sequence = sequence
        self._warnings = warnings
        self._router = router
        self._timers = timers
        self._began_ns = time.monotonic_ns()
        self._ends_ns = self._began_ns + int(seconds * 1e9)

    def look(self) -> None:
        """Answer, or look again in a moment. Nobody is answered who went away."""
        if self._call.cancelled:
            return
        now = time.monotonic_ns()
        if self._packing.completed < self._sequence and now < self._ends_ns:
            self._timers.at(min(now + int(POLL_SECONDS * 1e9), self._ends_ns), self.look)
            return
        try:
            with self._router.lock:
                status = self._packing.status()
            reply(self._call, repack_answer(status, self._sequence, (now - self._began_ns) / 1e9, self._warnings))
        except Exception as error:  # on the timer's thread nobody else would end the call
            self._call.fail(error)
            raise


def repack_answer(status: PackingStatus, sequence: int, waited: float, warnings: list[str]) -> pb.RepackResponse:
    completed = status.completed >= sequence
    queued = [] if completed else [f"repack {sequence} is queued: it comes with the next look at the workers"]
    return pb.RepackResponse(
        sequence=sequence,
        completed_sequence=status.completed,
        completed=completed,
        waited_seconds=waited,
        repack=repack_message(status),
        warnings=[*warnings, *queued],
    )
