"""What people give as a tensor (arrays, lists of numbers, tensors of other libraries) as an array of NumPy.

What an array cannot say is refused here, rather than dropped: masks, and numbers that another dtype does not hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from rsrv.core.errors import UsageError

_PLAIN = frozenset({bool, int, float})
_MOST_AXES = 64
"""Of an array of NumPy. A list that holds itself has no end."""


def array_of(what: str, value: Any) -> np.ndarray:
    """`value` as an array; `what` says in messages whose it is.

    Raises UsageError for masked arrays, also in a list, ValueError for nested sequences that make no array, and
    TypeError for what does not give its elements, as a tensor of another library on another device.
    """
    if type(value) is np.ndarray:
        return value
    _refuse_masks(what, value)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{what} is no array: {error}") from None
    except Exception as error:  # of somebody's __array__, whatever it raises
        raise TypeError(f"{what} is no array: {error}") from error


def is_of_python(value: Any) -> bool:
    """Whether `value` is a number of Python, or lists of such, which have no width of their own."""
    return _kinds((value,)) <= _PLAIN


def fitted(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """`array`, made of numbers of Python, as `dtype`; None unless that holds them.

    Integers have to stay what they are. Floats are rounded, but stay finite, and never become integers.
    """
    if not array.size:
        return array.astype(dtype)
    if not _may_become(array.dtype.kind, dtype):
        return None
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    if array.dtype.kind == "f":
        return cast if np.array_equal(np.isfinite(array), np.isfinite(cast)) else None
    # As numbers of Python, which alone compare exactly whatever their types are.
    back = cast if dtype.kind in "biu" else cast.astype(np.float64)
    return cast if back.tolist() == array.tolist() else None


def _may_become(kind: str, dtype: np.dtype[Any]) -> bool:
    if kind in "iu" and dtype.kind in "iu":
        return True  # whether they fit is looked at
    return bool(np.can_cast(np.dtype({"b": "?", "i": "i8", "u": "u8", "f": "f8"}.get(kind, "O")), dtype, "same_kind"))


def _refuse_masks(what: str, value: Any) -> None:
    masks = sys.modules.get("numpy.ma")  # who never imported it has none
    if masks is None or not any(issubclass(kind, masks.MaskedArray) for kind in _kinds((value,))):
        return
    raise UsageError(
        f"{what} is a masked array, and requests have no masks: masked elements would be sent like all others",
        hint="say what to send in their place: array.filled(value)",
    )


def _kinds(values: Iterable[Any], depth: int = _MOST_AXES) -> set[type]:
    """The types of all elements of nested lists and tuples; of deeper ones than an array can be, not of all."""
    kinds = set(map(type, values))
    if not depth:
        return kinds
    nested = {kind for kind in kinds if issubclass(kind, (list, tuple))}
    for kind in nested:
        kinds.discard(kind)
    if nested:
        for value in values:
            if isinstance(value, (list, tuple)):
                kinds |= _kinds(value, depth - 1)
    return kinds
