"""The tensors of a model as weights of a bundle: each stored once, complex ones as pairs of reals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.lax
import numpy as np
import torch

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.torch.dtypes import bundle_dtype, short, to_numpy


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of the model; `shape` and `dtype` are those of the program's argument."""

    name: str
    tensor: torch.Tensor

    @property
    def is_complex(self) -> bool:
        return self.tensor.is_complex()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tensor.shape, 2) if self.is_complex else tuple(self.tensor.shape)

    @property
    def dtype(self) -> DType:
        dtype = bundle_dtype(self._real.dtype)
        assert dtype is not None  # checked when it was added
        return dtype

    @property
    def _real(self) -> torch.Tensor:
        return torch.view_as_real(self.tensor.detach().resolve_conj()) if self.is_complex else self.tensor

    def numpy(self) -> np.ndarray:
        return to_numpy(self._real)

    def value(self, argument: Any) -> Any:
        """What the graph computes with, from the argument of the program."""
        return jax.lax.complex(argument[..., 0], argument[..., 1]) if self.is_complex else argument


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same memory, seen in the same way: tied weights."""
    if tensor.layout != torch.strided or not tensor.numel():
        return (id(tensor),)
    place = tensor.untyped_storage().data_ptr()
    return (place, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Weights(Sequence[Weight]):
    """Weights in the order in which they were added; two names of one tensor (tied weights) are one weight."""

    def __init__(self) -> None:
        self._weights: list[Weight] = []
        self._places: dict[tuple[Any, ...], int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> int:
        """The position of `tensor`. Raises ExportError for what no bundle can hold."""
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ExportError(
                f"weight {name!r} is {'quantised' if tensor.is_quantized else tensor.layout}, want a plain tensor",
                hint="call .to_dense() or .dequantize() on it before the export",
            )
        if not tensor.is_complex() and bundle_dtype(tensor.dtype) is None:
            raise ExportError(f"weight {name!r} is {short(tensor.dtype)}, which no bundle can hold")
        key = identity(tensor)
        if key not in self._places:
            self._places[key] = len(self._weights)
            self._weights.append(Weight(name, tensor))
        return self._places[key]

    def __len__(self) -> int:
        return len(self._weights)

    def __iter__(self) -> Iterator[Weight]:
        return iter(self._weights)

    def __getitem__(self, index: Any) -> Any:
        return self._weights[index]
