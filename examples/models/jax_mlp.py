"""A multi-layer perceptron in plain JAX: parameters are a list of dicts.

rsrv export jax examples/models/jax_mlp.py:make --out models/jax_mlp --batch-sizes 1,8
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

SIZES = (16, 32, 32, 4)


def forward(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.gelu(x @ layer["kernel"] + layer["bias"])
    return jax.nn.softmax(x @ layers[-1]["kernel"] + layers[-1]["bias"])


def make():
    """Classifier of 16 features into 4 classes: ``x`` f32[n,16] → ``probabilities`` f32[n,4]."""
    draw = np.random.default_rng(0)
    layers = [
        {
            "kernel": jnp.asarray(draw.normal(0, n_in**-0.5, (n_in, n_out)), jnp.float32),
            "bias": jnp.asarray(draw.normal(0, 0.1, n_out), jnp.float32),
        }
        for n_in, n_out in itertools.pairwise(SIZES)
    ]
    return {
        "fn": forward,
        "params": layers,
        "inputs": {"x": jax.ShapeDtypeStruct((1, SIZES[0]), jnp.float32)},
        "output_names": ["probabilities"],
    }
