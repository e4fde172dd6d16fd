"""Input-shape variants of a model: several sets of examples that differ in the sizes of some axes (§1.7, X-17).

Every front end resolves its inputs here. A model with a single shape has one set, with the key ``()``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rsrv.bundle.variants import VariantKey
from rsrv.core.errors import ExportError
from rsrv.export.axes import VARIABLE, merged_shape
from rsrv.export.inputs import Example, resolve_examples
from rsrv.export.options import ExportOptions
from rsrv.export.specs import InputSpec


@dataclass(frozen=True)
class Variants:
    """The sets of examples that programs are made for, in the order of the bundle's ``input_shapes``.

    Every set has the same names, dtypes, ranks and batch axes.
    """

    sets: tuple[tuple[Example, ...], ...]

    @property
    def inputs(self) -> tuple[Example, ...]:
        """The inputs as the manifest declares them: -1 at the axes that differ between the sets."""
        return tuple(
            replace(column[0], shape=merged_shape([example.shape for example in column], column[0].batch_axis))
            for column in zip(*self.sets, strict=True)
        )

    def keys(self) -> tuple[VariantKey, ...]:
        """The key of each set: its sizes of the variable axes in (input, axis) order; ``((),)`` when none varies."""
        shared = self.inputs
        return tuple(
            tuple(
                size
                for example, declared in zip(examples, shared, strict=True)
                for size, known in zip(example.shape, declared.shape, strict=True)
                if known == VARIABLE
            )
            for examples in self.sets
        )

    def input_shapes(self) -> list[VariantKey] | None:
        """`keys` as `write_bundle` takes them; None for a single shape."""
        return [*self.keys()] if any(self.keys()) else None

    def only(self, names: Collection[str]) -> Variants:
        """The sets without the inputs that are not in `names`. Raises ExportError when two of them become equal."""
        kept = Variants(tuple(tuple(one for one in examples if one.name in names) for examples in self.sets))
        kept.require_distinct()
        return kept

    def require_distinct(self) -> None:
        keys = self.keys()
        for i, key in enumerate(keys):
            if (first := keys.index(key)) != i:
                raise ExportError(
                    f"shape variants {first} and {i} do not differ in any shape of {', '.join(self._names())}"
                )

    def _names(self) -> list[str]:
        return [example.name for example in self.sets[0]]


def resolve_variants(inputs: Any, options: ExportOptions) -> Variants:
    """The examples of every variant that `options` asks for; without ``shape_variants`` `inputs` is the only one.

    A variant is whatever `inputs` can be. As a mapping it may leave out inputs: these are as in `inputs`. `inputs` may
    be None when the variants say everything.

    Raises ExportError that names the variant and the input.
    """
    variants = options.shape_variants
    if variants is None:
        return Variants((_examples(inputs, options),))
    if isinstance(variants, (str, Mapping)) or not isinstance(variants, Sequence) or not variants:
        raise ExportError("shape_variants is not a list of sets of examples", hint='for example [{"x": …}, {"x": …}]')
    first = None if inputs is None else _examples(inputs, options)
    sets = [_numbered(i, variant, first, options) for i, variant in enumerate(variants)]
    for i, examples in enumerate(sets):
        _require_same_form(i, first or sets[0], examples)
    found = Variants(tuple(sets))
    found.require_distinct()
    return found


def _examples(inputs: Any, options: ExportOptions) -> tuple[Example, ...]:
    return resolve_examples(
        inputs,
        names=options.input_names,
        batch_axes=options.input_batch_axes,
        batched=options.batch_sizes is not None,
    )


def _numbered(
    number: int, variant: Any, first: tuple[Example, ...] | None, options: ExportOptions
) -> tuple[Example, ...]:
    try:
        return _examples(_completed(variant, first), options)
    except ExportError as error:
        raise ExportError(f"shape variant {number}: {error.message}", hint=error.hint) from error


def _completed(variant: Any, first: tuple[Example, ...] | None) -> Any:
    """`variant` with the inputs that it leaves out, in the order of `first`."""
    if first is None or not isinstance(variant, Mapping):
        return variant
    names = [example.name for example in first]
    if unknown := sorted(set(variant) - set(names)):
        raise ExportError(f"there is no input {unknown[0]!r}; the inputs are {', '.join(names)}")
    return {one.name: variant.get(one.name, InputSpec(one.name, one.dtype, one.shape)) for one in first}


def _require_same_form(number: int, first: Sequence[Example], found: Sequence[Example]) -> None:
    names = [example.name for example in first]
    if [example.name for example in found] != names:
        got = ", ".join(example.name for example in found)
        raise ExportError(f"shape variant {number} has the inputs {got}, want {', '.join(names)}")
    for wanted, example in zip(first, found, strict=True):
        same = (example.dtype, len(example.shape), example.batch_axis)
        if same != (wanted.dtype, len(wanted.shape), wanted.batch_axis):
            raise ExportError(
                f"shape variant {number}: input {example.name!r} is {example.dtype.value}{list(example.shape)}, "
                f"want the dtype and rank of {wanted.dtype.value}{list(wanted.shape)}: only sizes may differ"
            )
