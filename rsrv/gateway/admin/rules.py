"""What a change of the scheduling means and what an operator should know about it: pure functions over snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsrv.bundle.files import name_problem
from rsrv.core.errors import InvalidRequest
from rsrv.gateway.admin.messages import ALL, threshold
from rsrv.gateway.scheduling.knobs import ModelOverride

if TYPE_CHECKING:
    from collections.abc import Collection

    from rsrv.core.config.gateway import Replicas
    from rsrv.gateway.scheduling.knobs import Knobs
    from rsrv.gateway.scheduling.reports import PackingStatus
    from rsrv.protos import control as pb


MAX_MODEL_NAME = 255
"""Bytes. A model is called as its bundle, which is a directory."""


def require_model_name(name: str) -> None:
    """Raises InvalidRequest for what no worker can call a model: it would stay in metrics and state for nothing."""
    problem = name_problem(name)
    if problem is None and len(name.encode()) > MAX_MODEL_NAME:
        problem = f"has more than {MAX_MODEL_NAME} bytes"
    if problem is not None:
        shown = name if len(name) <= 80 else f"{name[:79]}…"
        raise InvalidRequest(f"name is {shown!r}; wanted the name of a model, and it {problem}")


def override_of(request: pb.SetModelPlacementRequest, before: ModelOverride) -> ModelOverride:
    """What is to be set for the model. Raises InvalidRequest for a number of replicas that means nothing.

    ``replicas``: above 0, -1 = all, 0 = none of its own, unless ``keep_replicas``. ``fill_mode``: "" = unchanged,
    ``inherit`` = none of its own. ``fill_factor``: below 0 = unchanged, 0 = none of its own.
    """
    replicas: Replicas | None = before.replicas
    if not request.keep_replicas:
        if request.replicas < ALL:
            raise InvalidRequest(
                f"replicas is {request.replicas}; wanted a number above 0, -1 for all workers, or 0 for the default"
            )
        replicas = "all" if request.replicas == ALL else request.replicas or None
    word = request.fill_mode.strip().lower()
    fill_mode = before.fill_mode if not word else None if word == "inherit" else word
    factor = request.fill_factor
    fill_factor = before.fill_factor if factor < 0 else None if factor == 0 else factor
    return ModelOverride(replicas, fill_mode, fill_factor)


def effective_replicas(wanted: Replicas, ready: int) -> int:
    """What the next repack makes of it with so many ready workers; with none, the number itself, and 1 for all."""
    if wanted == "all":
        return max(1, ready)
    return wanted if ready == 0 else min(wanted, ready)


def policy_warnings(before: Knobs, after: Knobs, fields: Collection[str], status: PackingStatus) -> list[str]:
    """`status` is of after the change."""
    found = []
    accumulated = 0.0 if status.tick is None else status.tick.accumulated
    budgets = ("rebalance_compute_seconds", "first_rebalance_compute_seconds")
    if any(name in fields for name in budgets) and accumulated >= threshold(status):
        found.append(
            f"{accumulated:g} device seconds have come together since the last repack, and the budget is now "
            f"{threshold(status):g}: the next look at the workers repacks"
        )
    if "ema_halflife_compute_seconds" in fields:
        found.append("ema_halflife_compute_seconds holds for what is measured from now on; what was measured stays")
    if "first_rebalance_compute_seconds" in fields and status.tick is not None and status.tick.first_done:
        found.append("first_rebalance_compute_seconds changes nothing any more: the first repack has been")
    known = before.inflight_warnings()
    found += [text for text in after.inflight_warnings() if text not in known]
    return found


def placement_warnings(
    model: str, wanted: Replicas, effective: int, status: PackingStatus, *, known: bool
) -> list[str]:
    """About replicas: nothing here stops the change. `effective` is that of `effective_replicas`."""
    found = []
    ready = sum(worker.ready for worker in status.workers)
    if wanted != "all" and wanted > ready > 0:
        found.append(f"{wanted} replicas are wanted and {ready} workers are ready: {ready} replicas for now")
    if not known:
        found.append(f"no worker has a model {model!r} now; the setting waits for it")
    found += _oversubscribed(model, effective, status)
    found.append("the number of replicas takes effect at the next repack; how they are filled, at once")
    return found


def _oversubscribed(model: str, replicas: int, status: PackingStatus) -> list[str]:
    """A warning for each worker that would hold more than fits, were the model on those that hold least without it."""
    row = next((one for one in status.models if one.name == model), None)
    if row is None or row.weight_nbytes == 0:
        return []
    homes = {one.worker for one in row.replicas}
    others = sorted(
        (worker.assigned_bytes - (row.weight_nbytes if worker.worker in homes else 0), worker.worker, worker)
        for worker in status.workers
        if worker.ready
    )
    return [
        f"worker {url} would have {held + row.weight_nbytes} bytes of weights with a replica of {model!r}, and room "
        f"for {worker.budget_bytes}"
        for held, url, worker in others[:replicas]
        if 0 < worker.budget_bytes < held + row.weight_nbytes
    ]
