"""The control plane over gRPC: what a worker tells of its models, and the weights and shares that others may change."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import Cancelled, InvalidRequest, ResidencyRefused, Shed
from rsrv.protos import control as pb
from rsrv.rpc.call import reply
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import parse, unary
from rsrv.serve.hook_pool import HookPool, Job
from rsrv.serve.metrics import largest_batch
from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.view import residency_mode, whereabouts

if TYPE_CHECKING:
    from rsrv.rpc.call import Call
    from rsrv.serve.lifecycle import Lifecycle
    from rsrv.serve.registry import Registry
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)

SERVICE = "reactant_control.ControlService"

MAX_OPERATIONS = 16
"""Calls that move weights, one at a time, and those that wait for them. Each holds a thread of the engine, of which
there are 32 besides those of inference."""

_FLOORS = {pb.UNPINNED: Floor.UNPINNED, pb.PINNED_SYSTEM: Floor.SYSTEM, pb.PINNED_DEVICE: Floor.DEVICE}
_ON_THE_WIRE = {floor: number for number, floor in _FLOORS.items()}

Operation = Callable[[], Any]
"""What takes long; it returns the answer."""


class ControlService:
    """The handlers. What moves weights runs on a thread of its own; it goes on when its caller gives up.

    `residency` None = all weights are resident for good. `on_moved` is called when weights may have been moved.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        lifecycle: Lifecycle,
        scheduler: Scheduler,
        residency: Residency | None,
        on_moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._residency = residency
        self._on_moved = on_moved
        self._incarnation = secrets.token_hex(8)
        self._operations = HookPool(1, name="rsrv-control")
        self._lock = threading.Lock()
        self._open = 0

    def routes(self) -> Routes:
        methods = {
            "ModelControlStatus": unary(pb.ModelControlStatusRequest, self.status),
            "SetModelPolicy": unary(pb.SetModelPolicyRequest, self.set_policy),
            "SetModelResidency": self._long(pb.SetModelResidencyRequest, self.set_residency),
            "CompactMemory": self._long(pb.CompactMemoryRequest, self.compact),
        }
        return {f"/{SERVICE}/{name}": Route(handler, "unary") for name, handler in methods.items()}

    def close(self) -> None:
        """Answer what waits with ServerStopping; call it when residency has stopped, which ends what runs."""
        self._operations.close()

    # --- methods ----------------------------------------------------------------------------------------------------

    def status(self, request: pb.ModelControlStatusRequest) -> pb.ModelControlStatusResponse:
        residency, stats = self._residency, self._scheduler.stats()
        snapshot = None if residency is None else residency.snapshot()
        response = pb.ModelControlStatusResponse(
            residency_mode=residency_mode(residency),
            discipline=self._scheduler.policy.discipline,
            # 0 means that memory is no constraint, and a budget that is used up by pinned models is one.
            weight_cache_max_bytes=0 if snapshot is None else max(snapshot.max_bytes, 1),
            incarnation=self._incarnation,
        )
        for entry in self._registry.entries():
            # Only what can answer: a gateway would take a model whose size is not known yet for an empty one.
            if entry.prepared is None:
                continue
            model, counted = entry.prepared.model, stats.get(entry.name)
            where = whereabouts(residency, model)
            name, axis = model.manifest.wire_batch() or ("", 0)
            row = response.models.add(
                name=entry.name,
                residency=_ON_THE_WIRE[where.floor],
                device_resident=where.device_resident,
                host_resident=where.host_resident,
                weight_nbytes=where.nbytes,
                max_batch_size=largest_batch(model),
                batch_input_name=name,
                batch_axis=axis,
            )
            if counted is not None:
                row.weight = counted.weight
                row.queue_depth = counted.queue_depth
                row.total_compute_seconds = counted.total_compute_seconds
                row.requests_served = counted.requests_served
                row.rows_served = counted.rows_served
                row.dispatch_count = counted.dispatch_count
                row.max_batch_size = counted.max_batch_size
        return response

    def set_policy(self, request: pb.SetModelPolicyRequest) -> pb.SetModelPolicyResponse:
        self._lifecycle.require_running()
        self._registry.find(request.name)
        if request.has_weight:
            self._registry.prepared(request.name)
            self._scheduler.set_policy(request.name, weight=request.weight)
        return pb.SetModelPolicyResponse()

    def set_residency(self, request: pb.SetModelResidencyRequest) -> Operation:
        floor = _FLOORS.get(request.target)
        if floor is None:
            raise InvalidRequest(
                f"the residency {request.target} is no target; wanted UNPINNED (1), PINNED_SYSTEM (2) or "
                "PINNED_DEVICE (3)"
            )
        self._lifecycle.require_running()
        residency = require_moves_by_hand(self._residency)
        self._registry.prepared(request.name)

        def move() -> pb.SetModelResidencyResponse:
            reached = residency.set_floor(request.name, floor)
            self._on_moved()
            return pb.SetModelResidencyResponse(residency=_ON_THE_WIRE[reached])

        return move

    def compact(self, request: pb.CompactMemoryRequest) -> Operation:
        self._lifecycle.require_running()

        def move() -> pb.CompactMemoryResponse:
            if self._residency is None:
                return pb.CompactMemoryResponse()
            done = self._residency.compact(list(request.reload_models))
            log.info(
                "memory compacted by an operator reloaded=%d requested=%d resident_bytes=%d",
                done.reloaded,
                len(request.reload_models),
                done.resident_bytes,
            )
            self._on_moved()
            return pb.CompactMemoryResponse(reloaded_models=done.reloaded, resident_bytes_after=done.resident_bytes)

        return move

    # --- small parts ------------------------------------------------------------------------------------------------

    def _long(self, request_class: Any, method: Callable[[Any], Operation]) -> Callable[[Call], None]:
        """A handler whose checks run at once, and what they allow when its turn has come."""

        def handle(call: Call) -> None:
            operation = method(parse(call, request_class))
            with self._lock:
                if self._open >= MAX_OPERATIONS:
                    raise Shed(f"{self._open} calls that move weights are open; at most {MAX_OPERATIONS} may be")
                self._open += 1

            def run() -> Any:
                if call.cancelled:
                    raise Cancelled("the caller went away before its turn came")
                self._lifecycle.require_running()
                return operation()

            def done(answer: Any, error: BaseException | None) -> None:
                with self._lock:
                    self._open -= 1
                if error is not None:
                    call.fail(error)
                else:
                    reply(call, answer)

            self._operations.submit(Job(run, done, what=call.path, deadline_ns=call.deadline_ns))

        return handle


def require_moves_by_hand(residency: Residency | None) -> Residency:
    """Raises ResidencyRefused where an operator may not move weights from one floor to another (4.10)."""
    if residency is None or not residency.on_demand:
        raise ResidencyRefused(
            "this server has no budget for weights, so all of them stay on the device",
            hint="runtime.device_memory_bytes sets one on a CPU; runtime.weight_cache_fraction must not be 0",
        )
    if residency.mode != "externally_managed":
        raise ResidencyRefused(
            "this server moves weights itself, as requests need them",
            hint="start it with model_control_mode: explicit",
        )
    return residency
