"""`IOSpec`: how an exporter declares a tensor, and how that is written into a manifest (X-1 … X-4)."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsrv.bundle.entries import dtype_of_token
from rsrv.bundle.problems import violation
from rsrv.core.dtypes import DType
from rsrv.core.errors import ManifestError
from rsrv.core.shapes import BATCH_LETTERS, auto_letters, is_extent, is_letter
from rsrv.core.tensors import BATCH, VARIABLE, Dim, DimKind, TensorSpec


@dataclass(frozen=True, init=False)
class IOSpec:
    """A tensor of a program or of its clients.

    Attributes:
        dtype: given as a `DType`, a token (``"bf16"``) or anything numpy takes for a dtype.
        shape: numpy (row-major) sizes; -1 for a variable axis; what stands at `batch_axis` is not used.
        batch_axis: 0-based, -1 = last; None when not batched.
        letters: names of the non-batch axes in order; default: allocated (B-29).

    Raises ManifestError (X-1, X-2) that names the tensor.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    batch_axis: int | None
    letters: str

    def __init__(
        self,
        name: str,
        dtype: DType | str | np.dtype[Any] | type,
        shape: Iterable[int],
        *,
        batch_axis: int | None = None,
        letters: Iterable[str] | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise violation(ManifestError, "X-1", f"a tensor cannot be named {name!r}")
        axis, sizes = _shape(name, shape, batch_axis)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dtype", _dtype(name, dtype))
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "batch_axis", axis)
        object.__setattr__(self, "letters", _letters(name, letters, len(sizes) - (axis is not None)))

    @classmethod
    def parse(
        cls, letters: str, dtype: DType | str | np.dtype[Any] | type, *, name: str = "input", **sizes: int
    ) -> IOSpec:
        """From letters: ``IOSpec.parse("nchw", "f32", name="image", c=3, h=224, w=224)`` (X-4).

        ``n`` or ``b`` is the batch axis; every other letter needs a size, -1 for a variable axis.
        """
        markers = [i for i, letter in enumerate(letters) if letter in BATCH_LETTERS]
        if len(markers) > 1:
            raise violation(ManifestError, "X-4", f"tensor {name!r}: {letters!r} has more than one batch letter")
        named = [letter for letter in letters if letter not in BATCH_LETTERS]
        if set(named) != set(sizes):
            given = ", ".join(sorted(sizes)) or "none"
            raise violation(ManifestError, "X-4", f"tensor {name!r}: {letters!r} needs a size a letter, got {given}")
        shape = [sizes.get(letter, 1) for letter in letters]
        return cls(name, dtype, shape, batch_axis=markers[0] if markers else None, letters=named)

    @property
    def spec(self) -> TensorSpec:
        """As a reader of the manifest sees it."""
        dims = tuple(
            BATCH if axis == self.batch_axis else VARIABLE if size == -1 else Dim(DimKind.FIXED, size)
            for axis, size in enumerate(self.shape)
        )
        return TensorSpec(self.name, self.dtype, dims, self._all_letters, self.batch_axis)

    @property
    def _all_letters(self) -> str:
        if self.batch_axis is None:
            return self.letters
        return self.letters[: self.batch_axis] + "n" + self.letters[self.batch_axis :]

    def entry(self) -> dict[str, Any]:
        """The tensor entry of a manifest; the batch axis is always written ``n`` (X-3)."""
        sizes = [size for axis, size in enumerate(self.shape) if axis != self.batch_axis]
        entry: dict[str, Any] = {"name": self.name, "dtype": self.dtype.value, "shape": self._all_letters}
        if sizes:
            entry["dims"] = dict(zip(self.letters, sizes, strict=True))
        return entry


def _dtype(name: str, dtype: object) -> DType:
    if isinstance(dtype, DType):
        return dtype
    try:
        if isinstance(dtype, str):
            return dtype_of_token(dtype)
        return DType.from_numpy(np.dtype(dtype))  # type: ignore[call-overload]
    except ManifestError as error:
        raise violation(ManifestError, "X-1", f"tensor {name!r}: {error.message}", hint=error.hint) from None
    except TypeError as error:
        raise violation(ManifestError, "X-1", f"tensor {name!r}: {error}") from None


def _shape(name: str, shape: Iterable[int], batch_axis: int | None) -> tuple[int | None, tuple[int, ...]]:
    given = tuple(shape)
    axis = batch_axis
    if axis is not None:
        if isinstance(axis, bool) or not isinstance(axis, int) or not -len(given) <= axis < len(given):
            raise violation(ManifestError, "X-1", f"tensor {name!r}: shape {list(given)} has no batch axis {axis!r}")
        axis %= len(given)
    sizes = []
    for i, value in enumerate(given):
        try:
            size = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            size = None
        if size is None or (i != axis and size != -1 and not is_extent(size)):
            raise violation(
                ManifestError,
                "X-1",
                f"tensor {name!r}: axis {i} of shape {list(given)} is {value!r}, want a size above 0, or -1 (variable)",
            )
        sizes.append(size)
    return axis, tuple(sizes)


def _letters(name: str, letters: Iterable[str] | None, count: int) -> str:
    if letters is None:
        try:
            return auto_letters(count)
        except ManifestError as error:
            raise violation(ManifestError, "B-29", f"tensor {name!r}: {error.message}") from None
    chosen = list(letters)
    where = f"tensor {name!r}: letters {chosen}"
    if len(chosen) != count:
        raise violation(ManifestError, "X-2", f"{where}: {len(chosen)} for {count} non-batch axes")
    for letter in chosen:
        if not is_letter(letter):
            raise violation(ManifestError, "X-2", f"{where}: {letter!r} is not one ASCII letter")
        if letter.lower() in BATCH_LETTERS:
            raise violation(ManifestError, "X-2", f"{where}: {letter!r} is reserved for the batch axis")
        if chosen.count(letter) > 1:
            raise violation(ManifestError, "X-2", f"{where}: {letter!r} is there twice")
    return "".join(chosen)
