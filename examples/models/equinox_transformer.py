"""A small transformer encoder in equinox: token ids and a mask in, one embedding per sequence out.

rsrv export jax examples/models/equinox_transformer.py:make --out models/encoder --batch-sizes 1,4,8
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, LENGTH, WIDTH, HEADS = 100, 12, 32, 4


class Block(eqx.Module):
    """Pre-norm attention and feed-forward layer on one sequence f32[LENGTH,WIDTH]."""

    norm_1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm_2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norm_1 = eqx.nn.LayerNorm(WIDTH, dtype=jnp.float32)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, dtype=jnp.float32, key=keys[0])
        self.norm_2 = eqx.nn.LayerNorm(WIDTH, dtype=jnp.float32)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, dtype=jnp.float32, key=keys[1])
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, dtype=jnp.float32, key=keys[2])

    def __call__(self, x, attend):
        y = jax.vmap(self.norm_1)(x)
        x = x + self.attention(y, y, y, mask=attend)
        return x + jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(self.norm_2(row)))))(x)


class Encoder(eqx.Module):
    """One sequence: ids i32[LENGTH], mask i32[LENGTH] → embedding f32[WIDTH] of unit length."""

    tokens: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(VOCABULARY, WIDTH, dtype=jnp.float32, key=keys[0])
        self.positions = 0.1 * jax.random.normal(keys[1], (LENGTH, WIDTH), jnp.float32)
        self.blocks = [Block(key) for key in keys[2:]]

    def __call__(self, ids, mask):
        x = jax.vmap(self.tokens)(ids) + self.positions
        attend = jnp.broadcast_to(mask.astype(bool), (LENGTH, LENGTH))
        for block in self.blocks:
            x = block(x, attend)
        weight = mask.astype(jnp.float32)[:, None]
        mean = (x * weight).sum(0) / jnp.maximum(weight.sum(), 1.0)
        return mean * jax.lax.rsqrt((mean * mean).sum() + 1e-6)


def checkpoint():
    """Stands in for trained parameters: random numbers of a sensible size in every array."""
    draw = np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(Encoder, jax.random.key(0))
    return jax.tree.map(
        lambda s: jnp.asarray(draw.normal(0, s.shape[-1] ** -0.5, s.shape), s.dtype) if hasattr(s, "shape") else s,
        shapes,
    )


def make():
    """``ids`` i32[n,12], ``mask`` i32[n,12] → ``embedding`` f32[n,32]."""
    arrays, rest = eqx.partition(checkpoint(), eqx.is_array)

    def forward(arrays, ids, mask):
        return jax.vmap(eqx.combine(arrays, rest))(ids, mask)

    sequence = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    return {
        "fn": forward,
        "params": arrays,
        "inputs": {"ids": sequence, "mask": sequence},
        "output_names": ["embedding"],
    }
