"""The weights of models in the hands of an operator: activate, deactivate, pin, floors, trim. Residency moves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rsrv.core.errors import ModelUnloaded, WrongState
from rsrv.serve.admin.matrix import NO_OP, verdict
from rsrv.serve.registry import Failure
from rsrv.serve.residency.floors import Floor

if TYPE_CHECKING:
    from rsrv.serve.admin.events import EventLog
    from rsrv.serve.registrations import Registrations
    from rsrv.serve.registry import Entry, Registry
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.residency.operations import ParameterOperations


class Parameters:
    """Thread safe. `warm` runs each program of a model once, whose weights are on the device; it may take long."""

    def __init__(
        self,
        *,
        registry: Registry,
        registrations: Registrations,
        residency: Residency,
        operations: ParameterOperations,
        events: EventLog,
        warm: Callable[[str], None],
    ) -> None:
        self._registry = registry
        self._registrations = registrations
        self._residency = residency
        self._operations = operations
        self._events = events
        self._warm = warm

    def operation(self, name: str) -> str:
        """What is being done with its weights by order: ``idle`` when nothing is."""
        return self._operations.state(name).operation

    def error(self, name: str) -> str:
        """Why the last order failed; "" when it did not."""
        error = self._operations.state(name).error
        return "" if error is None else f"{error.phase}: {error.message}"

    def pinned(self, entry: Entry) -> bool:
        """Whether an operator pinned it; a model that has no weights here yet remembers it."""
        known = self._residency.model(entry.name)
        return entry.settings.pinned if known is None else known.pinned

    # --- orders -----------------------------------------------------------------------------------------------------

    def activate(self, entry: Entry, *, allow_open: bool) -> None:
        """Begin to prepare the model if it is not, and to bring its weights to the device."""
        name = entry.name
        # Nobody opens the gate between the look at it and the begin, which keeps it closed.
        with self._registry.changing:
            entry = self._registry.find(name)
            verdict("activate", entry)
            if not allow_open:
                _require_drained(entry, "activated", hint="drain it first, or say allow_open")
            if self._operations.busy(name):
                raise _pending(name, "activated")
            prepare = None
            if entry.prepared is None:
                prepare = self._registrations.prepare(name, if_incarnation=entry.incarnation).result
            self._operations.activate(name, lambda: self._warm(name), prepare=prepare)

    def deactivate(self, entry: Entry, *, host: bool) -> bool:
        """Begin to free the device memory of its weights; False when there is nothing to do."""
        with self._registry.changing:
            entry = self._registry.find(entry.name)
            no_op = verdict("deactivate", entry) == NO_OP
            _require_drained(entry, "deactivated", hint="drain it first")
            if not no_op:
                self._operations.deactivate(entry.name, host=host)
            return not no_op

    def pin(self, entry: Entry, pinned: bool) -> None:
        """Never, or again, evict its weights."""
        name = entry.name
        verdict("pin", entry)
        if pinned and self.operation(name) == "deactivating":
            raise _pending(name, "pinned")
        was = self.pinned(entry)
        # Kept for a model that has no weights yet, and for the next version of one that has.
        changed = self._registry.change(name, of=entry.incarnation, settings=replace(entry.settings, pinned=pinned))
        if changed is None:
            raise ModelUnloaded(f"model {name!r} was removed or loaded again meanwhile")
        if self._residency.model(name) is not None:
            (self._residency.pin if pinned else self._residency.unpin)(name)
        if was != pinned:
            self._events.append(name, entry.incarnation, "pinned", _word(was), _word(pinned))

    def set_floor(self, entry: Entry, floor: Floor) -> Floor:
        """Change the floor and move the weights there; blocks."""
        known = self._residency.model(entry.name)
        old = "" if known is None else known.floor.value
        reached = self._residency.set_floor(entry.name, floor)
        if old != reached.value:
            self._events.append(entry.name, entry.incarnation, "floor", old, reached.value)
        return reached

    def trim(self, target_bytes: int) -> None:
        """Free weights that may leave, the least recently used ones first, down to `target_bytes`; blocks."""
        self._residency.trim(target_bytes)

    def compact(self) -> None:
        """Free all weights that may leave; blocks."""
        if not self._residency.on_demand:
            raise WrongState("nothing can be compacted: all weights stay on the device", reason="fixed")
        self._residency.compact()


def failure_text(failure: Failure | None) -> str:
    return "" if failure is None else str(failure)


def _require_drained(entry: Entry, verb: str, *, hint: str) -> None:
    if entry.gate != "drained":
        raise WrongState(
            f"the gate of model {entry.name!r} is {entry.gate}; it can be {verb} when it is drained",
            reason="not_drained",
            hint=hint,
        )


def _pending(name: str, verb: str) -> WrongState:
    return WrongState(
        f"the weights of model {name!r} are being moved, so it cannot be {verb} now",
        reason="operation_pending",
        hint=f"rsrv ctl wait {name} idle",
    )


def _word(value: bool) -> str:
    return "true" if value else "false"
