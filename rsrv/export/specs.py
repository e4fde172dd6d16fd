"""Example inputs written as text: ``image=f32[1,224,224,3]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rsrv.core.dtypes import DType
from rsrv.core.errors import UsageError

_FORM = re.compile(r"(?P<name>[^=]+)=(?P<dtype>[a-z0-9_]+)\[(?P<shape>[^\]]*)\]")


@dataclass(frozen=True)
class InputSpec:
    """An example input without values: dtype and row-major shape are all that tracing needs."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


def parse_input_spec(text: str) -> InputSpec:
    """Parse ``NAME=DTYPE[d0,d1,…]``; ``x=f32[]`` is a scalar. Raises UsageError that says which part is wrong."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"input {text!r} is not NAME=DTYPE[SIZES]", hint="for example image=f32[1,224,224,3]")
    name = match["name"].strip()
    try:
        dtype = DType(match["dtype"])
    except ValueError:
        tokens = ", ".join(d.value for d in DType)
        raise UsageError(f"input {name!r}: {match['dtype']!r} is not a dtype; dtypes: {tokens}") from None
    return InputSpec(name, dtype, tuple(_size(name, part) for part in _split(match["shape"])))


def parse_variant_spec(text: str) -> dict[str, InputSpec]:
    """Parse one shape variant, ``image=f32[1,256,256,3] mask=f32[1,256,256]``: the inputs that it sets, by name."""
    variant: dict[str, InputSpec] = {}
    for part in text.split():
        spec = parse_input_spec(part)
        if spec.name in variant:
            raise UsageError(f"shape variant {text!r} has the input {spec.name!r} twice")
        variant[spec.name] = spec
    if not variant:
        raise UsageError(f"shape variant {text!r} names no input", hint="for example image=f32[1,256,256,3]")
    return variant


def _split(sizes: str) -> list[str]:
    return [part.strip() for part in sizes.split(",")] if sizes.strip() else []


def _size(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise UsageError(f"input {name!r}: axis size {text!r} is not a positive integer")
    return int(text)
