"""A small convolutional network with batch normalisation in flax linen, exported in inference mode.

rsrv export jax examples/models/flax_cnn.py:make --out models/flax_cnn --batch-sizes 1,4,8
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class CNN(nn.Module):
    """Images f32[n,28,28,1] → logits f32[n,10]. `train` decides whose statistics batch normalisation uses."""

    @nn.compact
    def __call__(self, images, train=False):
        x = images
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.avg_pool(nn.relu(x), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(32)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def checkpoint(example):
    """Stands in for trained variables: random kernels, and running statistics that are not zeros and ones."""
    draw = np.random.default_rng(0)

    def leaf(path, shape):
        value = draw.normal(0, 1, shape.shape) / max(1, np.prod(shape.shape[:-1])) ** 0.5
        return jnp.asarray(value**2 + 0.5 if path[-1].key in ("var", "scale") else value, jnp.float32)

    shapes = jax.eval_shape(CNN().init, jax.random.key(0), example)
    return jax.tree_util.tree_map_with_path(leaf, shapes)


def make():
    """``image`` f32[n,28,28,1] → ``logits`` f32[n,10]."""

    def forward(variables, image):
        return {"logits": CNN().apply(variables, image)}

    example = jax.ShapeDtypeStruct((1, 28, 28, 1), jnp.float32)
    return {"fn": forward, "params": checkpoint(example), "inputs": {"image": example}}
