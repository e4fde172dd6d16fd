"""Input-shape variants: the variable axes of the executable inputs, and the sizes that programs exist for (§1.7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rsrv.bundle.problems import KeyPath, Problems
from rsrv.core.shapes import is_extent, is_letter
from rsrv.core.tensors import TensorSpec

VariantKey = tuple[int, ...]
"""Sizes of the variable axes in (input, axis) order; ``()`` for a model without variable axes."""


@dataclass(frozen=True, slots=True)
class VariableAxis:
    """One ``-1`` axis of an executable input; `axis` is 0-based, row-major."""

    input: str
    axis: int
    letter: str

    @property
    def qualified(self) -> str:
        return f"{self.input}.{self.letter}"


def variable_axes(inputs: Sequence[TensorSpec]) -> tuple[VariableAxis, ...]:
    """All variable axes in (input, axis) order, which is the order of a variant's key (B-43)."""
    return tuple(VariableAxis(spec.name, axis, spec.letters[axis]) for spec in inputs for axis in spec.variable_axes)


def read_variants(value: object, axes: Sequence[VariableAxis], problems: Problems) -> tuple[VariantKey, ...]:
    """``input_shapes`` as canonical keys, in file order (B-44, B-48)."""
    at: KeyPath = ("input_shapes",)
    if not isinstance(value, list):
        problems.add("B-44", f"input_shapes must be a list of mappings letter → size, got {value!r}", at=at)
        return ()
    if not axes:
        problems.add(
            "B-44",
            "input_shapes is there, but no executable input has a variable axis",
            at=at,
            hint="give the axes that vary the size -1 in dims, or remove input_shapes",
        )
        return ()
    keys: dict[VariantKey, int] = {}
    for i, entry in enumerate(value):
        key = _read_variant(entry, i, axes, problems)
        if key is None:
            continue
        if key in keys:
            problems.add(
                "B-44", f"input_shapes[{i}] has the sizes of input_shapes[{keys[key]}], {list(key)}", at=(*at, i)
            )
        else:
            keys[key] = i
    return tuple(keys)


def _read_variant(entry: object, index: int, axes: Sequence[VariableAxis], problems: Problems) -> VariantKey | None:
    at: KeyPath = ("input_shapes", index)
    where = f"input_shapes[{index}]"
    if not isinstance(entry, dict):
        problems.add("B-44", f"{where} must be a mapping letter → size, got {entry!r}", at=at)
        return None
    bare: dict[str, int] = {}
    exact: dict[str, int] = {}
    broken = False
    for key, size in entry.items():
        trouble = _key_trouble(key, axes)
        if trouble is None and not is_extent(size):
            trouble = f"gives {key!r} the size {size!r}, want an integer above 0"
        if trouble is not None:
            problems.add("B-44", f"{where} {trouble}", at=at)
            broken = True
        else:
            (bare if is_letter(key) else exact)[key] = size
    for axis in axes:
        if axis.letter not in bare and axis.qualified not in exact and not broken:
            problems.add("B-44", f"{where} has no size for the variable axis {axis.qualified!r}", at=at)
            broken = True
    if broken:
        return None
    return tuple(exact[axis.qualified] if axis.qualified in exact else bare[axis.letter] for axis in axes)


def _key_trouble(key: object, axes: Sequence[VariableAxis]) -> str | None:
    letter = key.rpartition(".")[2] if isinstance(key, str) else ""
    if not is_letter(letter):
        return f"has the key {key!r}, want one ASCII letter or 'INPUT.letter'"
    known = [axis.letter for axis in axes] + [axis.qualified for axis in axes]
    if key in known:
        return None
    variable = ", ".join(dict.fromkeys(axis.qualified for axis in axes))
    return f"names {key!r}, which is no variable axis; the variable axes are {variable}"


def variant_entries(keys: Sequence[VariantKey], axes: Sequence[VariableAxis]) -> list[dict[str, int]]:
    """`keys` as ``input_shapes`` is written: bare letters, qualified where a letter varies in two inputs (B-48)."""
    uses = Counter(axis.letter for axis in axes)
    names = [axis.letter if uses[axis.letter] == 1 else axis.qualified for axis in axes]
    return [dict(zip(names, key, strict=True)) for key in keys]
