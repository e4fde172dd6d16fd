"""What a tensor is declared to be (`TensorSpec`) and what it is (`NamedTensor`). Axes are row-major."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np

from rsrv.core.dtypes import DType


class DimKind(Enum):
    FIXED = "fixed"
    BATCH = "batch"
    VARIABLE = "variable"


@dataclass(frozen=True, slots=True)
class Dim:
    """One axis. `size` has a meaning for FIXED axes only and is 0 for the others."""

    kind: DimKind
    size: int = 0


BATCH = Dim(DimKind.BATCH)
VARIABLE = Dim(DimKind.VARIABLE)


@dataclass(frozen=True)
class TensorSpec:
    """A declared tensor: `letters` names its axes in row-major order (``nchw``), `batch_axis` is 0-based or None."""

    name: str
    dtype: DType
    dims: tuple[Dim, ...]
    letters: str
    batch_axis: int | None = None

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def wire_shape(self) -> tuple[int, ...]:
        """Sizes in row-major order, -1 for batch and variable axes."""
        return tuple(d.size if d.kind is DimKind.FIXED else -1 for d in self.dims)

    @cached_property
    def variable_axes(self) -> tuple[int, ...]:
        return tuple(i for i, d in enumerate(self.dims) if d.kind is DimKind.VARIABLE)

    def concrete_shape(self, batch: int, variable: Sequence[int] = ()) -> tuple[int, ...]:
        """The shape with `batch` at the batch axis and `variable` at the variable axes, in axis order."""
        sizes = iter(variable)
        return tuple(
            d.size if d.kind is DimKind.FIXED else batch if d.kind is DimKind.BATCH else next(sizes) for d in self.dims
        )

    def reversed(self) -> TensorSpec:
        """The tensor with its axes in the opposite order, as column-major bundles write it."""
        axis = None if self.batch_axis is None else self.rank - 1 - self.batch_axis
        return TensorSpec(self.name, self.dtype, self.dims[::-1], self.letters[::-1], axis)

    def describe(self) -> str:
        """``f32[n,3,224,224]``: fixed sizes, ``n`` for batch, ``?`` for variable."""
        axes = (
            "n" if d.kind is DimKind.BATCH else "?" if d.kind is DimKind.VARIABLE else str(d.size) for d in self.dims
        )
        return f"{self.dtype.value}[{','.join(axes)}]"


@dataclass(slots=True, eq=False)
class NamedTensor:
    """A tensor of a request or reply inside the server; dtype and shape follow the array (C order)."""

    name: str
    data: np.ndarray

    @property
    def dtype(self) -> DType:
        return DType.from_numpy(self.data.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """Where a requested output goes: `byte_size` bytes at `offset` of the shared-memory region `region`."""

    region: str
    offset: int
    byte_size: int


@dataclass(slots=True, eq=False)
class InferRequest:
    """A decoded request. `deadline_ns` is absolute on ``time.monotonic_ns()``, 0 = none."""

    model_name: str
    inputs: list[NamedTensor]
    requested_outputs: list[str] = field(default_factory=list)
    deadline_ns: int = 0
