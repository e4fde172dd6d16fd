"""The axes of outputs, found by comparing shapes at several batch sizes and input shapes, never assumed.

Nothing here knows a framework: every front end traces its model, and has the results declared here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsrv.bundle.iospec import IOSpec
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.options import ExportOptions

log = logging.getLogger(__name__)

VARIABLE = -1
"""Stands for the size of an axis that differs between shape variants, as in a manifest."""


@dataclass(frozen=True)
class Output:
    """One result of a traced function."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


Traced = Mapping[int, tuple[Output, ...]]
"""Outputs by batch size, for two sizes at least; ``{0: outputs}`` for a program without a batch axis."""


class Undeclared:
    """The type of `UNDECLARED`: the caller said nothing about an output's batch axis."""


UNDECLARED = Undeclared()


def output_batch_axis(
    name: str, shapes: Mapping[int, tuple[int, ...]], declared: int | Undeclared | None = UNDECLARED
) -> int | None:
    """The one axis that follows the batch size, or None when the shape does not depend on it.

    Args:
        name: the output's name, for errors.
        shapes: batch size → shape, for at least two sizes.
        declared: the axis that the caller expects (negative counts from the end), None for an unbatched output.

    Raises ExportError when more than one axis changes, when an extent is not the batch size itself, and when the shapes
    contradict `declared`.
    """
    seen = ", ".join(f"{list(shape)} at {size}" for size, shape in sorted(shapes.items()))
    ranks = {len(shape) for shape in shapes.values()}
    if len(ranks) > 1:
        raise ExportError(f"output {name!r} changes its rank with the batch size: {seen}")
    (rank,) = ranks
    changing = [axis for axis in range(rank) if len({shape[axis] for shape in shapes.values()}) > 1]
    if len(changing) > 1:
        raise ExportError(f"output {name!r} has {len(changing)} axes that change with the batch size, want one: {seen}")
    axis = changing[0] if changing else None
    if axis is not None and any(shape[axis] != size for size, shape in shapes.items()):
        raise ExportError(f"axis {axis} of output {name!r} is not the batch size itself: {seen}")
    if not isinstance(declared, Undeclared):
        _compare(name, axis, declared, rank, seen)
    return axis


def _compare(name: str, axis: int | None, declared: int | None, rank: int, seen: str) -> None:
    if declared is not None and not -rank <= declared < rank:
        raise ExportError(f"output {name!r} has rank {rank} and no axis {declared}")
    expected = None if declared is None else declared % rank
    if axis == expected:
        return
    found = "no axis changes" if axis is None else f"axis {axis} changes"
    wanted = "no batch axis" if expected is None else f"batch axis {expected}"
    raise ExportError(f"output {name!r} is declared with {wanted}, but {found} with the batch size: {seen}")


def output_specs(traced: Sequence[Traced], options: ExportOptions) -> list[IOSpec]:
    """Names, dtypes, verified batch axes and variable axes of the outputs; `traced` has one item per shape variant.

    Raises ExportError when something else than sizes depends on the batch size or the variant.
    """
    first = next(iter(traced[0].values()))
    axes = _batch_axes(traced, options)
    specs = []
    for i, (output, axis) in enumerate(zip(first, axes, strict=True)):
        shapes = [next(iter(variant.values()))[i].shape for variant in traced]
        if len({len(shape) for shape in shapes}) > 1:
            listed = ", ".join(f"{list(shape)} in variant {number}" for number, shape in enumerate(shapes))
            raise ExportError(f"output {output.name!r} changes its rank with the shapes of the inputs: {listed}")
        letters = options.axis_letters.get(output.name)
        shape = merged_shape(shapes, axis)
        specs.append(IOSpec(output.name, output.dtype, shape, batch_axis=axis, letters=letters))
    return specs


def merged_shape(shapes: Sequence[tuple[int, ...]], batch_axis: int | None) -> tuple[int, ...]:
    """The shape that describes all of `shapes`, which have one rank: -1 where they differ, but not at `batch_axis`."""
    return tuple(
        sizes[0] if axis == batch_axis or len(set(sizes)) == 1 else VARIABLE
        for axis, sizes in enumerate(zip(*shapes, strict=True))
    )


def _batch_axes(traced: Sequence[Traced], options: ExportOptions) -> list[int | None]:
    first = next(iter(traced[0].values()))
    for number, variant in enumerate(traced):
        for size, outputs in variant.items():
            where = f"batch size {size}" if len(traced) == 1 else f"shape variant {number}, batch size {size}"
            _require_same_form(first, outputs, where)
    if options.batch_sizes is None:
        if options.output_batch_axes is not None:
            raise ExportError("output_batch_axes has no meaning with batch_sizes=None: nothing is batched")
        return [None] * len(first)
    declared = _declared_axes([output.name for output in first], options)
    axes: list[int | None] = []
    for i, output in enumerate(first):
        found = [
            output_batch_axis(output.name, {size: outputs[i].shape for size, outputs in variant.items()}, declared[i])
            for variant in traced
        ]
        if len(set(found)) > 1:
            listed = ", ".join(f"{axis} in variant {number}" for number, axis in enumerate(found))
            raise ExportError(f"output {output.name!r} has another batch axis in another shape variant: {listed}")
        axes.append(found[0])
        if found[0] is None:
            log.warning(
                "output does not follow the batch size, so requests to this model are never merged model=%s output=%s",
                options.name,
                output.name,
            )
    return axes


def _require_same_form(first: Sequence[Output], found: Sequence[Output], where: str) -> None:
    if [(output.name, output.dtype) for output in found] != [(output.name, output.dtype) for output in first]:
        got = ", ".join(f"{output.name} {output.dtype.value}" for output in found)
        raise ExportError(f"the function returns other outputs at {where}: {got}")


def _declared_axes(names: Sequence[str], options: ExportOptions) -> list[int | Undeclared | None]:
    declared = options.output_batch_axes
    if declared is None:
        return [UNDECLARED] * len(names)
    if isinstance(declared, Mapping):
        if unknown := sorted(set(declared) - set(names)):
            raise ExportError(f"output_batch_axes names {unknown[0]!r}; the outputs are {', '.join(names)}")
        return [declared.get(name, UNDECLARED) for name in names]
    if len(declared) != len(names):
        raise ExportError(f"output_batch_axes has {len(declared)} entries for {len(names)} outputs")
    return list(declared)
