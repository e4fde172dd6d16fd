"""Tensor entries of a manifest: ``{name, dtype, shape, dims}`` to `TensorSpec` (B-16 … B-28)."""

from __future__ import annotations

import re

from rsrv.bundle.problems import Problems
from rsrv.core.dtypes import DType
from rsrv.core.errors import ManifestError
from rsrv.core.shapes import letter_problems, parse_letters
from rsrv.core.tensors import TensorSpec

ENTRY_KEYS = ("name", "dtype", "shape", "dims")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_ALIASES = (
    {dtype.numpy.name: dtype for dtype in DType}
    | {dtype.wire.lower(): dtype for dtype in DType if dtype.wire is not None}
    | {dtype.stablehlo.lower(): dtype for dtype in DType}
    | {
        "float": DType.F32,
        "double": DType.F64,
        "half": DType.F16,
        "int": DType.I32,
        "long": DType.I64,
        "pred": DType.BOOL,
    }
)


def dtype_of_token(token: str) -> DType:
    """The dtype that `token` names. Raises ManifestError (B-56) for any other spelling, with the one that was meant."""
    try:
        return DType(token)
    except ValueError:
        meant = _ALIASES.get(token.lower())
        raise ManifestError(
            f"{token!r} is not a dtype; known: {', '.join(dtype.value for dtype in DType)}",
            rule="B-56",
            hint=None if meant is None else f"did you mean {meant.value!r}?",
        ) from None


def read_entries(value: object, key: str, problems: Problems, *, row_major: bool) -> tuple[TensorSpec, ...]:
    """The specs of one of the four lists, axes row-major; entries that cannot be read are left out and noted.

    `row_major` is False for letters that were written in column-major order.
    """
    if not isinstance(value, list):
        problems.add("B-25", f"{key} must be a list of tensor entries, got {value!r}", at=(key,))
        return ()
    specs = (_read_entry(entry, key, i, problems, row_major) for i, entry in enumerate(value))
    return tuple(spec for spec in specs if spec is not None)


def _read_entry(entry: object, key: str, index: int, problems: Problems, row_major: bool) -> TensorSpec | None:
    at = (key, index)
    where = f"{key}[{index}]"
    if not isinstance(entry, dict):
        problems.add("B-25", f"{where} must be a mapping with name, dtype and shape, got {entry!r}", at=at)
        return None
    label = f"{where} {entry['name']!r}" if isinstance(entry.get("name"), str) else where
    problems.unknown_keys(entry, ENTRY_KEYS, at=at)
    broken = False
    for field in ("name", "dtype", "shape"):
        text = entry.get(field)
        if field not in entry:
            problems.add("B-25", f"{label}: {field} is missing", at=at)
        elif not isinstance(text, str):
            problems.add("B-25", f"{label}: {field} must be a string, got {text!r}", at=(*at, field))
        elif field == "name" and (not text or _CONTROL.search(text)):
            trouble = "contains a control character" if text else "is empty"
            problems.add("B-25", f"{label}: name {text!r} {trouble}", at=(*at, field))
        else:
            continue
        broken = True
    if broken:
        return None
    name, letters, dims = entry["name"], entry["shape"], entry.get("dims", {})
    dtype = None
    try:
        dtype = dtype_of_token(entry["dtype"])
    except ManifestError as error:
        problems.add("B-56", f"tensor {name!r}: {error.message}", at=(*at, "dtype"), hint=error.hint)
    trouble_with_letters = list(letter_problems(name, letters, dims, row_major=row_major))
    problems.take(trouble_with_letters, at=(*at, "shape"))
    if dtype is None or trouble_with_letters:
        return None
    axes, batch_axis = parse_letters(letters, dims, tensor=name, row_major=row_major)
    spec = TensorSpec(name, dtype, axes, letters, batch_axis)
    return spec if row_major else spec.reversed()
