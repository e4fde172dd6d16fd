"""Assignments through masks, and numbers taken out of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from rsrv.export.torch.lowerings.table import aten, lowering


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """``x[indices] = values``, or ``+=`` with `accumulate`. A mask takes one value: how many it selects is unknown."""
    if any(index is not None and index.dtype == bool for index in indices):
        return _masked_put(x, indices, values, accumulate)
    place = tuple(slice(None) if index is None else index for index in indices)
    # torch broadcasts the indices together and keeps them in place when they are adjacent, like NumPy.
    return x.at[place].add(values) if accumulate else x.at[place].set(values)


def _masked_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    if values.size != 1:
        raise NotImplementedError("more than one value is assigned through a boolean mask")
    mask = jnp.ones((), bool)
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
            continue
        if index.dtype != bool:
            raise NotImplementedError("a boolean mask beside integer indices")
        mask = mask & jnp.expand_dims(index, tuple(a for a in range(x.ndim) if not axis <= a < axis + index.ndim))
        axis += index.ndim
    value = values.reshape(()).astype(x.dtype)
    return jnp.where(mask, x + value if accumulate else value, x)


@lowering(aten._local_scalar_dense.default, aten.item.default)
def item(x: Any) -> Any:
    """A number that stays on the device: good for arithmetic, not for sizes and branches."""
    return jnp.reshape(x, ())
