"""May these programs stand in for those of a model? Pure: works on names and signatures, before anything is compiled.

A program set shares weights, manifest and hooks with the model, so all that it may differ in is what it computes: the
shapes and batch sizes that it covers, and what each program takes and returns, are those of the model (spec worker
11.8). That it computes the same is its author's claim; `shadow` tests it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rsrv.core.errors import InvalidRequest

if TYPE_CHECKING:
    from rsrv.serve.scheduler.plan import Variant
    from rsrv.stablehlo.signature import ProgramSignature, TensorType

_MAX_LISTED = 8
"""Problems that a refusal lists: its text travels in a header of a gRPC answer."""

Key = tuple["Variant", int]
"""Which program of a model: its variant, and its batch key."""


def describe(key: Key) -> str:
    """``variant 224x224 batch 8``; parts that a model does not have are left out."""
    variant, batch_key = key
    parts = [f"variant {'x'.join(map(str, variant))}"] if variant else []
    if batch_key or not parts:
        parts.append(f"batch {batch_key}" if batch_key else "the program without a batch size")
    return " ".join(parts)


def grid_problems(wanted: Iterable[Key], found: Iterable[Key], *, partial: bool = False) -> list[str]:
    """Programs that are missing, unless only a part is staged, and those that the model has no place for."""
    wanted, found = set(wanted), set(found)
    problems = [f"{describe(key)}: the model has no such program" for key in sorted(found - wanted)]
    if not partial:
        problems += [f"{describe(key)}: missing" for key in sorted(wanted - found)]
    return problems


def signature_problems(
    key: Key, wanted: ProgramSignature, found: ProgramSignature, inputs: Sequence[str], outputs: Sequence[str]
) -> list[str]:
    """Where one program takes or returns something else than the model's.

    Args:
        wanted: the signature of the model's program in this place.
        inputs, outputs: names of the executable inputs and outputs; further arguments are weights.
    """
    return [
        *_differences(key, "argument", wanted.arguments, found.arguments, [f"input {name!r}" for name in inputs]),
        *_differences(key, "result", wanted.results, found.results, [f"output {name!r}" for name in outputs]),
    ]


def refusal(model: str, directory: object, problems: Sequence[str]) -> InvalidRequest:
    """The error that says which programs of `directory` cannot serve `model`, and why."""
    listed = [*problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        listed.append(f"and {len(problems) - _MAX_LISTED} more problems")
    return InvalidRequest(
        f"the programs in {directory} do not fit model {model!r}: {'; '.join(listed)}",
        hint="a program set has one program for each shape and batch size of the model, with the same arguments and "
        "results; anything else is another model: register it",
    )


def _differences(
    key: Key, kind: str, wanted: Sequence[TensorType], found: Sequence[TensorType], names: Sequence[str]
) -> list[str]:
    if len(wanted) != len(found):
        verb = "takes" if kind == "argument" else "returns"
        return [f"{describe(key)}: {verb} {len(found)} {kind}s, wanted {len(wanted)}"]
    return [
        f"{describe(key)}: {kind} {index} ({_name(index, names)}) is {got}, wanted {want}"
        for index, (want, got) in enumerate(zip(wanted, found, strict=True))
        if want != got
    ]


def _name(index: int, names: Sequence[str]) -> str:
    return names[index] if index < len(names) else f"weight {index - len(names)}"
