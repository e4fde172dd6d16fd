"""Does a shape fit that of a model, and if not, which slip would explain it? Shapes are row-major."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Shape = tuple[int, ...]


def fits(model: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the rank and every extent are the same; a negative extent of the `model` takes any."""
    return len(model) == len(shape) and all(want in (-1, got) for want, got in zip(model, shape, strict=True))


def slip(model: Sequence[int], shape: Sequence[int]) -> str | None:
    """What may have gone wrong with a `shape` that does not fit, as a hint."""
    model, shape = tuple(model), tuple(shape)
    if len(shape) >= 2:
        if fits(model, shape[::-1]):
            return f"the axis order looks reversed: {text(shape[::-1])} fits; axes are row-major, as in NumPy"
        for start, end in ((0, -1), (-1, 0), (0, 1), (1, 0), (1, -1), (-1, 1)):
            moved = list(shape)
            moved.insert(end % len(shape), moved.pop(start))
            if fits(model, moved):
                return f"with axis {start % len(shape)} moved to position {end % len(shape)} it would fit"
    if fits(model, (1, *shape)):
        return "the row axis seems to be missing: shapes include it, with 1 for a single item"
    if shape[:1] == (1,) and fits(model, shape[1:]):
        return "there seems to be one axis too many at the front"
    # With the rows left alone, when it is they that may be any.
    model, shape = (model[1:], shape[1:]) if model[:1] == (-1,) else (model, shape)
    if all(extent >= 0 for extent in model) and prod(model) == prod(shape):
        return "the number of elements is right: reshape it"
    return None


def without(axis: int | None, shape: Shape) -> Shape:
    """What is left of `shape` for one row, when `axis` counts the rows."""
    return shape if axis is None else shape[:axis] + shape[axis + 1 :]


def synthetic(model: Shape, axis: int | None, rows: int, per_item: Shape | None) -> Shape:
    """A shape in which a server may answer `rows` rows, which `axis` counts.

    Where the `model` leaves an extent open, it is that of `per_item`, which the IO declares for one row; else 1.
    """
    given = per_item if per_item is not None else ()
    if axis is not None and len(given) == len(model) - 1:
        given = (*given[:axis], rows, *given[axis:])
    if len(given) != len(model):
        given = (1,) * len(model)
    extents = enumerate(zip(model, given, strict=True))
    return tuple(rows if i == axis else want if want >= 0 else got for i, (want, got) in extents)


def text(shape: Sequence[int]) -> str:
    """``[-1,3]``"""
    return f"[{','.join(map(str, shape))}]"
