"""Tensors of one value. torchax's lowering does not take the layout that traced TorchScript always gives."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rsrv.export.torch.dtypes import numpy_dtype
from rsrv.export.torch.lowerings.table import aten, lowering


@lowering(aten.full_like.default)
def full_like(x: Any, value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """A tensor of x's shape; layout, device, pinning and memory format mean nothing to a program."""
    return jnp.full(x.shape, value, x.dtype if dtype is None else numpy_dtype(dtype))


@lowering(aten.fill.Scalar, aten.fill.Tensor)
def fill(x: Any, value: Any, **_: Any) -> Any:
    """x with every element replaced by `value`, a number or a tensor of rank 0."""
    return jnp.full(x.shape, jnp.asarray(value).reshape(()), x.dtype)
