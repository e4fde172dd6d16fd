"""Which share of a picture has which colour, in plain JAX.

rsrv export jax examples/dataset/model.py:make --out models/colours --batch-sizes 1,64 --golden 2
"""

import jax
import jax.numpy as jnp
from pictures import COLOURS, SIZE


def shares(colours, image):
    """``image`` u8[n,h,w,3] → ``share`` f32[n,6]: of the pixels, by the colour that is nearest to each."""
    pixels = image.astype(jnp.float32)
    distances = (jnp.square(colours).sum(1) - 2 * pixels @ colours.T) / 255  # |pixel|² is the same for all colours
    return {"share": jax.nn.one_hot(distances.argmin(-1), len(colours)).mean((1, 2))}


def make():
    example = jax.ShapeDtypeStruct((1, SIZE, SIZE, 3), jnp.uint8)
    return {"fn": shares, "params": jnp.asarray(COLOURS), "inputs": {"image": example}}
