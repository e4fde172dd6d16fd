"""Between the protobuf messages of ``rsrv.admin.v1`` and the models of `requests`; nothing is decided here."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import BaseModel

from rsrv.core.errors import InvalidRequest
from rsrv.protos import admin as pb
from rsrv.serve.admin.requests import (
    Accepted,
    Operation,
    Program,
    ProgramListAnswer,
    ReclaimAnswer,
    Request,
    ResidencyAnswer,
    SelectAnswer,
    Shadow,
    StageAnswer,
    parse_fields,
)

R = TypeVar("R", bound=Request)


def read(kind: type[R], message: Message) -> R:
    """The request that `message` stands for. Raises InvalidRequest, also for fields that nobody declared.

    What a message cannot tell from absent (0, "", an empty list) is left to the default of the field, if it has one.
    """
    return parse_fields(kind, _fields(kind, message))


def _fields(kind: type[Request], message: Message) -> dict[str, Any]:
    unknown = sorted({field.field_number for field in UnknownFieldSet(message)})  # type: ignore[attr-defined]
    if unknown:
        raise InvalidRequest(
            f"{message.DESCRIPTOR.full_name} has no field {', '.join(map(str, unknown))}",
            hint="the client was made for another version of rsrv",
        )
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.name == "t":  # the target, whose fields stand beside the others everywhere else
            found.update(_fields(kind, message.t))  # type: ignore[attr-defined]
            continue
        value = getattr(message, field.name)
        if field.has_presence:
            if message.HasField(field.name):
                found[field.name] = value
        elif _is_map(field):
            found[field.name] = dict(value)
        elif isinstance(value, (str, int, float)):
            declared = kind.model_fields.get(field.name)
            # An empty text says nothing where one is required; a number, 0 too, says itself.
            if value or (not isinstance(value, str) and declared is not None and declared.is_required()):
                found[field.name] = value
        elif value:
            found[field.name] = list(value)
    return found


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


# --- answers ------------------------------------------------------------------------------------------------------


def operation(answer: Operation) -> pb.Operation:
    return pb.Operation(
        model=answer.model,
        incarnation=answer.incarnation,
        registration=answer.registration,
        admission=answer.admission,
        parameter_operation=answer.parameter_operation,
        accepted=answer.underway,
        pinned=answer.pinned,
        error=answer.error,
        requests=_accepted(answer.accepted),
    )


def _accepted(counts: Accepted) -> pb.Accepted:
    return pb.Accepted(queued=counts.queued, executing=counts.executing, hooks=counts.hooks)


def staged(answer: StageAnswer) -> pb.Program:
    message = program(answer.program)
    message.incarnation = answer.incarnation
    return message


def program(answer: Program) -> pb.Program:
    return pb.Program(
        id=answer.id,
        phase=answer.phase,
        label=answer.label,
        fingerprint=answer.fingerprint,
        diagnostics=answer.diagnostics,
        created_unix=answer.created_unix,
        shadow=None if answer.shadow is None else _shadow(answer.shadow),
    )


def _shadow(answer: Shadow) -> pb.Shadow:
    return pb.Shadow(
        percent=answer.percent,
        batches=answer.batches,
        skipped=answer.skipped,
        mismatches=answer.mismatches,
        errors=answer.errors,
        largest_difference={
            name: math.nan if value is None else value for name, value in answer.largest_difference.items()
        },
        first_mismatch=answer.first_mismatch,
        first_error=answer.first_error,
        against=answer.against,
    )


def programs(answer: ProgramListAnswer) -> pb.ProgramList:
    return pb.ProgramList(
        selected=answer.selected,
        capacity=answer.capacity,
        programs=[program(one) for one in answer.programs],
        incarnation=answer.incarnation,
    )


def selected(answer: SelectAnswer) -> pb.SelectResponse:
    return pb.SelectResponse(selected=answer.selected, previous=answer.previous, incarnation=answer.incarnation)


def residency(answer: ResidencyAnswer) -> pb.ResidencyResponse:
    return pb.ResidencyResponse(model=answer.model, incarnation=answer.incarnation, floor=answer.floor)


def reclaim(answer: ReclaimAnswer) -> pb.ReclaimPolicy:
    return pb.ReclaimPolicy(**answer.model_dump())


def document(answer: BaseModel) -> str:
    """An answer that has no message of its own, as the JSON that HTTP sends."""
    return answer.model_dump_json()
