"""The workers of a gateway over gRPC: list them, add, remove and drain one (spec 10, item 1)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rsrv.gateway.admin.messages import worker_message
from rsrv.gateway.admin.scheduling_control import ControlGate
from rsrv.gateway.methods import GATEWAY_CONTROL, path
from rsrv.protos import control as pb
from rsrv.rpc.routes import Route, Routes
from rsrv.rpc.unary import unary

if TYPE_CHECKING:
    from rsrv.gateway.discovery.membership import Change, Membership
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.workers.fleet import Fleet

log = logging.getLogger(__name__)


class WorkersControl:
    """The five methods about workers; they answer in every mode."""

    def __init__(self, membership: Membership, fleet: Fleet, router: Router, gate: ControlGate) -> None:
        self._membership = membership
        self._fleet = fleet
        self._router = router
        self._gate = gate

    def routes(self) -> Routes:
        guarded = self._gate.guarded
        methods = {
            "ListWorkers": unary(pb.ListWorkersRequest, self.list_workers),
            "AddWorker": unary(pb.AddWorkerRequest, guarded(self.add)),
            "RemoveWorker": unary(pb.RemoveWorkerRequest, guarded(self.remove)),
            "DrainWorker": unary(pb.DrainWorkerRequest, guarded(self.drain)),
            "UndrainWorker": unary(pb.UndrainWorkerRequest, guarded(self.undrain)),
        }
        return {path(GATEWAY_CONTROL, name): Route(handler, "unary") for name, handler in methods.items()}

    def list_workers(self, request: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
        table = self._router.table
        return pb.ListWorkersResponse(workers=[worker_message(worker, table) for worker in self._fleet.workers])

    def add(self, request: pb.AddWorkerRequest) -> pb.AddWorkerResponse:
        change = self._membership.add(request.worker, request.metrics, request.name)
        return pb.AddWorkerResponse(**self._answer("added", change))

    def remove(self, request: pb.RemoveWorkerRequest) -> pb.RemoveWorkerResponse:
        return pb.RemoveWorkerResponse(**self._answer("removed", self._membership.remove(request.worker)))

    def drain(self, request: pb.DrainWorkerRequest) -> pb.DrainWorkerResponse:
        change = self._membership.drain(request.worker, request.deadline_seconds)
        return pb.DrainWorkerResponse(**self._answer("drained", change))

    def undrain(self, request: pb.UndrainWorkerRequest) -> pb.UndrainWorkerResponse:
        return pb.UndrainWorkerResponse(**self._answer("undrained", self._membership.undrain(request.worker)))

    def _answer(self, what: str, change: Change) -> dict[str, Any]:
        log.info("worker %s by an operator worker=%s url=%s", what, change.worker.name, change.worker.url)
        return {"worker": worker_message(change.worker, self._router.table), "persisted": change.persisted}
