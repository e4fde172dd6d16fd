"""What is told of program sets: plain values, as they were at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rsrv.serve.programs.compare import ShadowRecord

Phase = Literal["pending", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class ProgramSet:
    """One executable for every shape and batch size of a model.

    Attributes:
        id: 1 = what the model was loaded with; counts on until the model is loaded again.
        label: what its author called it.
        fingerprint: sha256 over shapes, batch sizes and digests of its program files; equal for equal sets. "" when the
            files that it was made of are not known any more.
        diagnostics: what the compiler said.
        created_unix: seconds since 1970.
        shadow: what it did with copies of batches; None = it never got any.
    """

    id: int
    phase: Phase
    label: str
    fingerprint: str
    diagnostics: str
    created_unix: float
    shadow: ShadowRecord | None = None


@dataclass(frozen=True, slots=True)
class ProgramList:
    """The sets of a model by id; `selected` is the id of the one that serves, 0 = the model is not prepared."""

    selected: int
    capacity: int
    programs: tuple[ProgramSet, ...]


@dataclass(frozen=True, slots=True)
class Selected:
    """Ids of the sets that serve now, and that served before."""

    selected: int
    previous: int


class Retained(NamedTuple):
    """How many sets a model has, and the id of the one that serves."""

    selected: int
    retained: int
