"""Attention as one operator: torch's own decomposition fails on some strides, and takes a detour for masks."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from rsrv.export.torch.lowerings.table import aten, lowering


@lowering(aten.scaled_dot_product_attention.default, keep=True)
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """query[…,l,e], key[…,s,e], value[…,s,v], mask broadcastable to […,l,s] → […,l,v].

    Rows whose every key is masked give zeros. Scores and the softmax are in float32 for 16-bit tensors.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    if enable_gqa:
        key = jnp.repeat(key, query.shape[-3] // key.shape[-3], -3)
        value = jnp.repeat(value, query.shape[-3] // value.shape[-3], -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...le,...se->...ls", query, key, preferred_element_type=wide) * factor
    hidden = None
    if is_causal:
        hidden = ~jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool)
    if attn_mask is not None and attn_mask.dtype == bool:
        hidden = ~attn_mask if hidden is None else hidden | ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.astype(wide)
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    highest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0, highest))
    total = weights.sum(-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(value.dtype)
    return jnp.einsum("...ls,...sv->...lv", weights, value, preferred_element_type=wide).astype(query.dtype)
