"""The control plane of a gateway: where models are placed and why, what its scheduling may be told, its workers."""

from __future__ import annotations

import difflib
import math
from typing import Any

from rsrv.client.connection import MAX_TIMEOUT_SECONDS, Handle, message_of
from rsrv.client.gateway_answers import (
    ALL,
    FleetChange,
    FleetWorker,
    PlacementChange,
    PolicyChange,
    RepackDone,
    Replicas,
    SchedulingStatus,
    fleet_change,
    fleet_worker,
    knob_names,
    placed_model,
    placed_worker,
    policy_of,
    repacks_of,
    replicas_of,
)
from rsrv.core.errors import UsageError

SERVICE = "/reactant_control.GatewayControlService/"
REPLY_SECONDS = 30.0
"""How long the answer to a call that waits may take beyond what it waits for."""


class Gateway(Handle):
    """The control plane of a gateway by its URL. See `KServeModel` for the options.

    `timeout` bounds each call, in seconds, 20 by default, at most `MAX_TIMEOUT_SECONDS`. Changes raise WrongState when
    the gateway lets nobody change anything, or its mode has nothing to change.
    """

    _service = SERVICE
    _default_timeout = 20.0
    _max_timeout = MAX_TIMEOUT_SECONDS

    # --- scheduling -------------------------------------------------------------------------------------------------

    def status(self) -> SchedulingStatus:
        answer = self._ask("GetSchedulingStatus")
        if not answer.HasField("policy"):
            return SchedulingStatus(answer.mode, warnings=tuple(answer.warnings))
        return SchedulingStatus(
            mode=answer.mode,
            policy=policy_of(answer.policy),
            repacks=repacks_of(answer.repack),
            models=tuple(placed_model(row) for row in answer.models),
            workers=tuple(placed_worker(row) for row in answer.workers),
            warnings=tuple(answer.warnings),
        )

    def set_policy(self, **knobs: float | str) -> PolicyChange:
        """Change knobs of the scheduling by their names in `SchedulingPolicy`; all of them, or none when one is wrong.

        Raises UsageError for a name that is no knob or a value of another type, InvalidRequest for one out of range.
        """
        from rsrv.protos import control

        policy = control.SchedulingPolicy()
        for name, value in knobs.items():
            _set_knob(policy, name, value)
        answer = self._ask("SetSchedulingPolicy", update_mask=list(knobs), policy=policy)
        return PolicyChange(policy_of(answer.applied), tuple(answer.warnings), answer.persisted)

    def set_placement(
        self,
        model: str,
        *,
        replicas: Replicas | None = None,
        fill_mode: str | None = None,
        fill_factor: float | None = None,
        allow_unknown: bool = False,
    ) -> PlacementChange:
        """Give `model` its own number of replicas, or its own way to fill them; what is None stays as it is.

        ``replicas="default"``, ``fill_mode="inherit"`` and ``fill_factor=0`` take back what it was told. Replicas
        change with the next repack, filling at once. `allow_unknown` keeps it for a model that comes later.

        Raises UnknownModel, or InvalidRequest for a value out of range.
        """
        if fill_factor is not None and not fill_factor >= 0:
            raise UsageError(f"the fill factor is {fill_factor:g}; wanted a number above 0, or 0 for no own one")
        answer = self._ask(
            "SetModelPlacement",
            name=model,
            replicas=0 if replicas is None else _count(replicas),
            keep_replicas=replicas is None,
            fill_mode=fill_mode or "",
            fill_factor=-1.0 if fill_factor is None else fill_factor,
            allow_unknown_model=allow_unknown,
        )
        return PlacementChange(
            name=answer.name,
            configured_replicas=replicas_of(answer.configured_replicas),
            effective_replicas=answer.effective_replicas,
            fill_mode=answer.fill_mode,
            fill_quantum=answer.fill_quantum,
            warnings=tuple(answer.warnings),
            persisted=answer.persisted,
        )

    def repack(self, wait: float = 0.0) -> RepackDone:
        """Have all models placed anew, and wait up to `wait` seconds (120 at most) until that is done.

        Raises NoWorkers when `wait` is above 0 and no worker is ready.
        """
        timeout = math.ceil(wait) + REPLY_SECONDS if 0 < wait <= MAX_TIMEOUT_SECONDS - REPLY_SECONDS else 0.0
        answer = self._ask("Repack", timeout=max(timeout, self._timeout), wait_seconds=wait)
        return RepackDone(
            sequence=answer.sequence,
            completed_sequence=answer.completed_sequence,
            completed=answer.completed,
            waited_seconds=answer.waited_seconds,
            repacks=repacks_of(answer.repack),
            warnings=tuple(answer.warnings),
        )

    # --- workers ----------------------------------------------------------------------------------------------------

    def workers(self) -> list[FleetWorker]:
        """In the order in which they joined."""
        return [fleet_worker(row) for row in self._ask("ListWorkers").workers]

    def add_worker(self, worker: str, *, metrics: str = "", name: str = "") -> FleetChange:
        """Have ``host:port`` as a worker, too; it gets requests when it is ready. `metrics` is its HTTP port.

        Raises NameTaken when it, or its name, is there, InvalidRequest for what is no address.
        """
        return fleet_change(self._ask("AddWorker", worker=worker, metrics=metrics, name=name))

    def remove_worker(self, worker: str) -> FleetChange:
        """Send a worker, by its address or name, nothing more; what it has is answered. Raises UnknownWorker."""
        return fleet_change(self._ask("RemoveWorker", worker=worker))

    def drain_worker(self, worker: str, *, deadline: float = 0.0) -> FleetChange:
        """Send a worker nothing new and keep it; with a `deadline` it is removed when it is idle, or so many seconds
        later. Returns at once. Raises UnknownWorker."""
        return fleet_change(self._ask("DrainWorker", worker=worker, deadline_seconds=deadline))

    def undrain_worker(self, worker: str) -> FleetChange:
        """Send a drained worker requests again. Raises UnknownWorker."""
        return fleet_change(self._ask("UndrainWorker", worker=worker))

    def _ask(self, method: str, *, timeout: float | None = None, **fields: Any) -> Any:
        from rsrv.protos import control

        try:
            request = getattr(control, f"{method}Request")(**fields)
        except (ValueError, TypeError) as error:  # a number that is too large, text that is not UTF-8
            raise UsageError(f"{method} cannot take these arguments: {error}") from None
        answer = self._connection.call(method, request.SerializeToString(), timeout or self._timeout)
        return message_of(getattr(control, f"{method}Response"), answer)


def _set_knob(policy: Any, name: str, value: float | str) -> None:
    require_knob(name)
    if name == "default_replicas":
        if value == "default":
            raise UsageError("default_replicas is 'default'; wanted a whole number above 0, or all")
        if isinstance(value, int | str):
            value = _count(value)
    try:
        setattr(policy, name, value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {value!r}, which has the wrong type or size") from None


def require_knob(name: str) -> None:
    """Raises UsageError, with what may be meant, for a name that `Gateway.set_policy` does not take."""
    names = knob_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"no key of the scheduling that can be changed is called {name!r}{meant}",
            hint=f"keys: {', '.join(names)}; all else is read when the gateway starts",
        )


def _count(replicas: int | str) -> int:
    """As it is on the wire; the server looks at the range of a number."""
    if replicas == "all":
        return ALL
    if replicas == "default":
        return 0
    if isinstance(replicas, int) and replicas != 0 and replicas != ALL:
        return int(replicas)
    raise UsageError(f"replicas is {replicas!r}; wanted a whole number above 0, 'all' or 'default'")
