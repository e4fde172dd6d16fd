"""What a model wants of one input, and whether what people give is that: dtypes, shapes, the axis of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rsrv.client.shapes import fits
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest, UsageError

if TYPE_CHECKING:
    from rsrv.cli.infer.rows import Rows
    from rsrv.client.server import TensorMeta


_FLOATS = {dtype.numpy for dtype in (DType.F16, DType.F32, DType.F64, DType.BF16)}


@dataclass(frozen=True, slots=True)
class Wanted:
    """An input of a model. `dtype` and `shape` (wire order, -1 for open axes) are None where a server does not tell.

    `rows` says whether axis 0 counts the items of a batch.
    """

    name: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    rows: bool = True

    @classmethod
    def of(cls, tensor: TensorMeta, *, rows: bool) -> Wanted:
        try:
            dtype = DType.from_wire(tensor.datatype).numpy
        except InvalidRequest as error:
            raise UsageError(f"input {tensor.describe()} cannot be sent: {error}") from None
        return cls(tensor.name, dtype, tensor.shape, rows)

    @property
    def item(self) -> tuple[int, ...] | None:
        """The shape of one item."""
        return self.shape[1:] if self.shape is not None and self.rows else self.shape

    def describe(self) -> str:
        datatype = "?" if self.dtype is None else DType.from_numpy(self.dtype).wire
        axes = "…" if self.shape is None else ",".join(map(str, self.shape))
        return f"{self.name} {datatype}[{axes}]"

    def refuse(self, why: str, *, hint: str | None = None) -> UsageError:
        return UsageError(f"input {self.name!r}: {why}", hint=hint)

    def checked(self, given: Rows, where: str) -> Rows:
        """`given`, converted between sizes of floats and wherever no value can change. Raises UsageError."""
        from rsrv.cli.infer.rows import Converted, converted

        self._require_shape(given.shape, where)
        if self.dtype is None or given.dtype == self.dtype:
            return given
        raw = given.dtype.kind == "V" and given.dtype.names is None and given.dtype.itemsize == self.dtype.itemsize
        if raw and self.dtype.kind == "V" and isinstance(given, np.ndarray):
            return given.view(self.dtype)  # numpy writes bfloat16 as raw bytes
        if np.can_cast(given.dtype, self.dtype, "safe") or {given.dtype, self.dtype} <= _FLOATS:
            what = f"input {self.name!r}: {where}"
            return Converted(given, self.dtype, what) if given.shape else converted(np.asarray(given), self.dtype, what)
        raise self.refuse(
            f"{where} holds {given.dtype}; wanted {self.describe()}",
            hint=f"convert it first, with .astype({self.dtype.name!r})",
        )

    def numbers(self, parsed: np.ndarray, where: str) -> np.ndarray:
        """Numbers that somebody wrote down, in the model's dtype; raises UsageError rather than round integers, or make
        a number infinite."""
        if parsed.dtype.kind not in "biuf":
            raise self.refuse(f"{where} must hold numbers or booleans, nested like the tensor")
        if self.dtype is None:
            return parsed
        with np.errstate(over="ignore", invalid="ignore"):
            array = parsed.astype(self.dtype)
        lost = array != parsed if self.dtype.kind in "biu" else np.isinf(array) & np.isfinite(parsed)
        if lost.any():
            (at, *_) = np.argwhere(lost).tolist()
            datatype = DType.from_numpy(self.dtype).wire
            raise self.refuse(f"{where}: the value {parsed[tuple(at)]} at {at} is not a {datatype}")
        return array

    def _require_shape(self, shape: Sequence[int], where: str) -> None:
        if self.shape is None or fits(self.shape, shape):
            return
        hint = None
        if fits(self.shape, (1, *shape)):
            hint = "the first axis counts the rows: one item needs it, too, as a leading 1"
        elif fits(self.shape, shape[::-1]):
            hint = "the order of its axes looks reversed"
        raise self.refuse(f"{where} has the shape {list(shape)}; wanted {self.describe()}", hint=hint)
