"""What the administration of a worker answers, as plain values, and how they are read from its messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Operation:
    """Where a model stands after an operation.

    Attributes:
        incarnation: which load of the name it is; give it as `if_incarnation` to mean no later one.
        registration: registered, preparing, ready, failed, retiring, release_failed, or gone.
        admission: open, draining, drained or removing.
        parameter_operation: idle, waiting, activating or deactivating.
        underway: the server goes on with it after this answer.
        pinned: whether its weights stay on the device once they are there.
        error: what the preparation, the last reload or the last move of weights failed with; "" = nothing.
        queued, executing, hooks: requests that it has accepted and not answered yet.
    """

    model: str
    incarnation: int
    registration: str
    admission: str
    parameter_operation: str
    underway: bool
    pinned: bool
    error: str
    queued: int
    executing: int
    hooks: int

    @property
    def accepted(self) -> int:
        """Requests that it has accepted and not answered yet."""
        return self.queued + self.executing + self.hooks


@dataclass(frozen=True, slots=True)
class Shadow:
    """What comparing a program set with the selected one, `against`, has found, in batches.

    `largest_difference` is max|Δ| / max|reference| by output, None = not finite.
    """

    percent: float
    batches: int
    skipped: int
    mismatches: int
    errors: int
    largest_difference: Mapping[str, float | None]
    first_mismatch: str
    first_error: str
    against: int


@dataclass(frozen=True, slots=True)
class Program:
    """A program set of a model; 1 is the one that came with its bundle. `phase` is pending, ready or failed."""

    id: int
    phase: str
    label: str
    fingerprint: str
    diagnostics: str
    created_unix: float
    shadow: Shadow | None = None


@dataclass(frozen=True, slots=True)
class Programs:
    """The program sets of a model, at most `capacity`; `selected` answers its requests."""

    selected: int
    capacity: int
    programs: tuple[Program, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Selected:
    selected: int
    previous: int


@dataclass(frozen=True, slots=True)
class Reclaim:
    """After how many idle milliseconds weights, staging buffers and host copies are given back; 0 = never."""

    parameter_idle_ms: float
    workspace_idle_ms: float
    host_idle_ms: float


@dataclass(frozen=True, slots=True)
class Event:
    """One change on the server; `time` in Unix seconds. Type ``gap``: those before `seq` are no longer there."""

    seq: int
    time: float
    model: str
    incarnation: int
    type: str
    old: str
    new: str
    detail: str


@dataclass(frozen=True, slots=True)
class Change:
    """What a look at the model directories found: `action` is load, reload, unload or rename (from `origin`)."""

    name: str
    action: str
    directory: str
    origin: str = ""


def operation(message: Any) -> Operation:
    return Operation(
        model=message.model,
        incarnation=message.incarnation,
        registration=message.registration,
        admission=message.admission,
        parameter_operation=message.parameter_operation,
        underway=message.accepted,
        pinned=message.pinned,
        error=message.error,
        queued=message.requests.queued,
        executing=message.requests.executing,
        hooks=message.requests.hooks,
    )


def event(message: Any) -> Event:
    return Event(
        seq=message.seq,
        time=message.time,
        model=message.model,
        incarnation=message.incarnation,
        type=message.type,
        old=getattr(message, "from"),
        new=message.to,
        detail=message.detail,
    )


def change(row: Mapping[str, Any]) -> Change:
    return Change(*(str(row.get(key, "")) for key in ("name", "action", "directory", "from")))


def programs(answer: Any) -> Programs:
    rows = tuple(program(row) for row in answer.programs)
    return Programs(answer.selected, answer.capacity, rows, answer.incarnation)


def program(row: Any) -> Program:
    return Program(
        id=row.id,
        phase=row.phase,
        label=row.label,
        fingerprint=row.fingerprint,
        diagnostics=row.diagnostics,
        created_unix=row.created_unix,
        shadow=_shadow(row.shadow) if row.HasField("shadow") else None,
    )


def _shadow(row: Any) -> Shadow:
    differences = row.largest_difference.items()
    return Shadow(
        percent=row.percent,
        batches=row.batches,
        skipped=row.skipped,
        mismatches=row.mismatches,
        errors=row.errors,
        largest_difference={name: None if math.isnan(value) else value for name, value in differences},
        first_mismatch=row.first_mismatch,
        first_error=row.first_error,
        against=row.against,
    )
