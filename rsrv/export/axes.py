"""Which axis of an output is its batch axis: found by comparing shapes at several batch sizes, never assumed."""

from __future__ import annotations

from collections.abc import Mapping

from rsrv.core.errors import ExportError


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
