"""Adaptive max pooling (missing in torchax) and bags of embeddings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rsrv.export.torch.lowerings.table import aten, lowering


@lowering(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(x: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """x[…,*space] → the maximum of each window, and its position in the flattened space (int64)."""
    sizes = x.shape[x.ndim - len(output_size) :]
    lead = x.shape[: x.ndim - len(output_size)]
    values, places = [], []
    for cell in itertools.product(*(range(out) for out in output_size)):
        bounds = [
            (index * size // out, -(-(index + 1) * size // out))
            for index, size, out in zip(cell, sizes, output_size, strict=True)
        ]
        window = x[(..., *(slice(low, high) for low, high in bounds))]
        flat = window.reshape(*lead, math.prod(window.shape[len(lead) :]))
        inside = jnp.unravel_index(flat.argmax(-1), window.shape[len(lead) :])
        place: Any = 0
        for offset, (low, _), size in zip(inside, bounds, sizes, strict=True):
            place = place * size + offset + low
        values.append(flat.max(-1))
        places.append(place)
    shape = (*lead, *output_size)
    return jnp.stack(values, -1).reshape(shape), jnp.stack(places, -1).reshape(shape)


_SUM, _MEAN, _MAX = 0, 1, 2


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, Any, Any, Any]:
    """weight[rows,width], indices[count], offsets[bags] → the bags [bags,width]; the rest is bookkeeping."""
    bags = offsets.shape[0] - include_last_offset
    bag = (jnp.arange(indices.shape[0])[:, None] >= offsets[None, :]).sum(1) - 1
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counted = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)
    sizes = jax.ops.segment_sum(counted.astype(indices.dtype), bag, bags)
    if mode == _MAX:
        out = jax.ops.segment_max(jnp.where(counted[:, None], rows, -jnp.inf), bag, bags)
        out = jnp.where(sizes[:, None] > 0, out, 0)
    else:
        out = jax.ops.segment_sum(jnp.where(counted[:, None], rows, 0), bag, bags)
        if mode == _MEAN:
            out = out / jnp.maximum(sizes, 1)[:, None]
    return out.astype(weight.dtype), bag, sizes, jnp.zeros(bags, indices.dtype)
