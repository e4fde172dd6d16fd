"""A multi-layer perceptron with dropout and batch normalisation in flax nnx, exported in inference mode.

rsrv export jax examples/models/nnx_mlp.py:make --out models/nnx_mlp --batch-sizes 1,8
"""

import jax
import jax.numpy as jnp
from flax import nnx


class MLP(nnx.Module):
    """f32[n,8] → f32[n,3]."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


@nnx.jit
def trained(features):
    """A model as training would leave it: one step moves the running statistics."""
    model = MLP(nnx.Rngs(0))
    model(features)
    return model


def make():
    """``x`` f32[n,8] → ``y`` f32[n,3]."""
    model = trained(jax.random.normal(jax.random.key(1), (64, 8), jnp.float32))
    model.eval()
    graph, state = nnx.split(model)

    def forward(state, x):
        return nnx.merge(graph, state)(x)

    return {
        "fn": forward,
        "params": state,
        "inputs": {"x": jax.ShapeDtypeStruct((1, 8), jnp.float32)},
        "output_names": ["y"],
    }
