"""What administration is asked and what it answers: one frozen model for each operation, whichever face carries it.

The field names are those of the HTTP bodies and of the gRPC messages. Names, sizes and ranges are checked here; what
depends on the state of the server is `operations`' work. Times are in milliseconds where the name ends in ``_ms``,
otherwise in seconds; sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rsrv.core.config.keys import closest, describe_type
from rsrv.core.errors import InvalidRequest
from rsrv.core.status import DeviceStatus

LONGEST_WAIT_MS = 3_600_000
"""An hour: the longest that one call may wait. Who needs more asks again."""
MAX_SOURCES = 4096

Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""An incarnation, an id, a sequence number or a size; 0 where none is meant."""
Name = Annotated[str, Field(min_length=1, max_length=1024)]
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Wait = Annotated[int, Field(ge=0, le=LONGEST_WAIT_MS)]
IdleMs = Annotated[float, Field(ge=0, le=1e12)]
Percent = Annotated[float, Field(ge=0, le=100)]
Tolerance = Annotated[float, Field(ge=0, le=1e6)]
FloorName = Literal["unpinned", "system", "device"]
AdmissionName = Literal["open", "drained"]


class Request(BaseModel):
    """Strict: no text for a number, no field that is not known; ints pass as floats."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Answer(BaseModel):
    """What an operation answers; readers ignore fields that they do not know."""

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        ser_json_inf_nan="null",
        populate_by_name=True,
        serialize_by_alias=True,
    )


# --- requests -----------------------------------------------------------------------------------------------------


class EmptyRequest(Request):
    """Nothing to say: list_models, get_reclaim, poll_repository."""


class StatusRequest(Request):
    model: str = ""
    """Only this model's status; empty: all of them."""


class RegisterRequest(Request):
    model: Name
    """The name to serve it under."""
    directory: Path
    """The bundle, on the server's machine."""
    admission: AdmissionName = "open"
    """`open`: prepare and serve it; `drained`: only read its manifest, and take no requests."""
    residency: FloorName | None = None
    """Where its weights always are, over the configuration."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Its share of the device under `fair`, over the configuration."""
    max_batch_size: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most rows that requests are merged to, over the configuration."""
    pinned: bool = False
    """Never evict its weights once they are on the device."""
    if_incarnation: Number = 0
    """Of a name that is taken nothing is expected, so only 0 passes; it is here for the sake of uniform clients."""


class Target(Request):
    """One model: retry_model, undrain_model, pin_model, unpin_model, list_programs."""

    model: Name
    if_incarnation: Number = 0
    """Do it only to this incarnation; 0: to any."""
    component: str = ""
    """A part of a meta model. There are none yet, so it is refused."""


class DrainRequest(Target):
    wait_ms: Wait = 0
    """How long the answer may wait until what was accepted has finished; 0: not at all."""


class UnregisterRequest(Target):
    mode: Literal["drain", "abort"] = "drain"
    """`drain`: what was accepted is answered first; `abort`: it is refused."""


class ActivateRequest(Target):
    allow_open: bool = False
    """Also while the model takes requests."""


class DeactivateRequest(Target):
    host: bool = False
    """Drop the copy in host memory, too."""


class ResidencyRequest(Request):
    model: Name
    floor: FloorName
    """Where its weights always are from now on."""
    if_incarnation: Number = 0


class ReclaimPolicy(Request):
    """What is given back after nobody used it for so long; 0 = never. A field that is left out stays as it is."""

    parameter_idle_ms: IdleMs | None = None
    """Weights on the device."""
    workspace_idle_ms: IdleMs | None = None
    """Staging buffers."""
    host_idle_ms: IdleMs | None = None
    """Copies of weights in host memory, since they left the device."""


class StageRequest(Request):
    model: Name
    base_directory: Path
    """Where the new programs are, on the server's machine."""
    base: Number = 0
    """The program set that the programs come from which `sources` leaves out; 0: the selected one."""
    sources: Annotated[list[Name], Field(max_length=MAX_SOURCES)] = []
    """File names of the programs to take from `base_directory`; empty: all of them."""
    wait: bool = True
    """Answer when the set is ready or failed; otherwise as soon as its number is known."""
    label: Annotated[str, Field(max_length=256)] = ""
    """Free text for people."""
    shadow_percent: Percent = 0.0
    """Share of batches that the set gets a copy of, to be compared, once it is ready."""
    if_incarnation: Number = 0


class SelectRequest(Target):
    program: Annotated[int, Field(ge=1, le=2**63 - 1)]
    """The set to use from now on."""
    expected: Number
    """The set that the caller believes to be in use: compare and set."""
    require_clean: bool = False
    """Only when its shadow has compared at least one batch and found no difference."""


class RemoveRequest(Target):
    program: Annotated[int, Field(ge=1, le=2**63 - 1)]


class ShadowRequest(Target):
    program: Annotated[int, Field(ge=1, le=2**63 - 1)]
    percent: Percent
    """Share of batches to copy to the set; 0 ends it."""
    tolerances: dict[Name, Tolerance] = {}
    """By dtype: how far an output may be off, as max|Δ| / max|reference|. Those left out have their defaults."""


class TrimRequest(Request):
    device: Number = 0
    """The only one is 0."""
    target_bytes: Number = 0
    """Free weights until at most so many bytes are taken."""
    compact: bool = False
    """Instead: free all that may leave, so that holes in the memory merge."""


class WaitRequest(Target):
    until: Literal["idle", "drained", "ready", "gone"]
    timeout_ms: Wait


class WatchRequest(Request):
    from_seq: Number = 0
    """The first event to send; 0: only those to come."""
    model: str = ""
    """Only this model's events; empty: all of them."""


# --- answers ------------------------------------------------------------------------------------------------------


class Accepted(Answer):
    """The requests that a model has accepted and not answered yet."""

    queued: int = 0
    executing: int = 0
    hooks: int = 0
    """In hooks, or being read or answered."""
    earlier: int = 0
    """Those that came for a version before the present one."""


class Operation(Answer):
    """Where a model stands after an operation."""

    model: str
    incarnation: int
    """The load of it that the operation met."""
    registration: str
    """registered, preparing, ready, failed, retiring, release_failed, or gone."""
    admission: str
    """The gate: open, draining, drained or removing."""
    accepted: Accepted = Accepted()
    parameter_operation: str = "idle"
    """idle, waiting, activating or deactivating."""
    pinned: bool = False
    error: str = ""
    """Why the preparation, the last reload or the last parameter operation failed; empty when none did."""
    underway: bool = False
    """Whether the server still works on what was asked: HTTP 202, and `accepted` of the gRPC message."""


class TensorInfo(Answer):
    name: str
    datatype: str
    shape: list[int]
    """Row-major, -1 for a variable axis."""


class CatalogueRow(Answer):
    """A prepared model."""

    name: str
    incarnation: int
    kind: str
    admission: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    batch_sizes: list[int]
    shape_variants: list[list[int]]
    platform: str


class Catalogue(Answer):
    models: list[CatalogueRow]


class Shadow(Answer):
    """What comparing a program set with the selected one has found."""

    percent: float
    batches: int = 0
    """Compared."""
    skipped: int = 0
    """Not compared, as others were being compared."""
    mismatches: int = 0
    """Batches with an output beyond its tolerance."""
    errors: int = 0
    """Batches that the set could not run."""
    largest_difference: dict[str, float | None] = {}
    """By output: the largest max|Δ| / max|reference| seen; null = not finite."""
    first_mismatch: str = ""
    first_error: str = ""
    against: int = 0
    """The set that it was compared with."""


class Program(Answer):
    """A program set."""

    id: int
    """1 is the one that came with the bundle."""
    phase: str
    """pending, ready or failed."""
    label: str = ""
    fingerprint: str = ""
    """sha256 over its programs."""
    diagnostics: str = ""
    """What reading and compiling it said; why it failed."""
    created_unix: float = 0.0
    shadow: Shadow | None = None


class StageAnswer(Answer):
    model: str
    incarnation: int
    program: Program
    underway: bool = False
    """Whether it is still being compiled: HTTP 202."""


class ProgramListAnswer(Answer):
    model: str
    incarnation: int
    selected: int
    capacity: int
    programs: list[Program]


class SelectAnswer(Answer):
    model: str
    incarnation: int
    selected: int
    previous: int


class ResidencyAnswer(Answer):
    model: str
    incarnation: int
    floor: str


class ReclaimAnswer(Answer):
    """The idle times in force, in milliseconds; 0 = never."""

    parameter_idle_ms: float
    workspace_idle_ms: float
    host_idle_ms: float


class TrimAnswer(Answer):
    device: DeviceStatus
    """Its memory afterwards."""


class RepositoryChange(Answer):
    """What a look at the model directories found."""

    name: str
    action: str
    """load, reload, unload or rename."""
    directory: str
    origin: str = Field(default="", alias="from")
    """Of a rename: the old name."""


class PollAnswer(Answer):
    changes: list[RepositoryChange]


# --- reading ------------------------------------------------------------------------------------------------------

R = TypeVar("R", bound=Request)


def parse_json(kind: type[R], body: bytes) -> R:
    """The request in a JSON body; an empty one is ``{}``. Raises InvalidRequest."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise _refusal(kind, error) from None


def parse_fields(kind: type[R], fields: Mapping[str, Any]) -> R:
    """The request in fields that have their types already. Raises InvalidRequest."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise _refusal(kind, error) from None


def parse_query(kind: type[R], fields: Mapping[str, str]) -> R:
    """The request in a query string, whose values are text. Raises InvalidRequest."""
    try:
        return kind.model_validate_strings(dict(fields))
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: type[Request], error: ValidationError) -> InvalidRequest:
    """The first problem as one sentence: the field, its value, and what was wanted."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    field, value = ".".join(path), _short(first["input"])
    if not path:
        if first["type"] == "json_invalid":
            return InvalidRequest(f"the body is no JSON: {first['ctx']['error']}")
        return InvalidRequest(f"the body is {value}; wanted a JSON object", hint=_fields_text(kind))
    if first["type"] == "extra_forbidden":
        near = closest(field, kind.model_fields)
        return InvalidRequest(
            f"unknown field {field!r}", hint=_fields_text(kind) if near is None else f"did you mean {near!r}?"
        )
    declared = kind.model_fields.get(path[0])
    wanted = describe_type(declared.annotation) if declared is not None else "another type"
    if declared is not None and declared.metadata:
        wanted = describe_type(Annotated[declared.annotation, *declared.metadata])
    if first["type"] == "missing":
        return InvalidRequest(f"field {field!r} is missing; wanted {wanted}")
    return InvalidRequest(f"field {field!r} is {value}: {first['msg']}; wanted {wanted}")


def _fields_text(kind: type[Request]) -> str:
    names = ", ".join(kind.model_fields)
    return f"the fields are {names}" if names else "this call takes no fields"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
