"""The model of ``rsrv demo``, as the file that a user would write. It is text: nothing here imports JAX."""

SOURCE = '''"""Reads a digit in a noisy 8x8 image: random features and a readout fitted by ridge regression."""

import jax
import jax.numpy as jnp
import numpy as np

GLYPHS = [  # 3x5 pixels, row by row
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001010010010", "111101111101111", "111101111001111",
]
FEATURES = 512


def images(count, seed):
    """`count` images f32[count,8,8] and the digits i32[count] that are drawn in them."""
    random = np.random.default_rng(seed)
    digits = random.integers(0, 10, count).astype(np.int32)
    canvas = 0.1 * random.standard_normal((count, 8, 8))
    for image, digit in zip(canvas, digits):
        top, left = random.integers(0, 3, 2)
        image[top : top + 5, left : left + 3] += np.array([int(bit) for bit in GLYPHS[digit]]).reshape(5, 3)
    return canvas.astype(np.float32), digits


def train():
    random = np.random.default_rng(0)
    kernel = (random.standard_normal((64, FEATURES)) / 4).astype(np.float32)
    bias = random.uniform(-1, 1, FEATURES).astype(np.float32)
    examples, digits = images(4000, seed=1)
    hidden = np.tanh(examples.reshape(-1, 64) @ kernel + bias).astype(np.float64)
    gram = hidden.T @ hidden + 0.1 * np.eye(FEATURES)
    readout = np.linalg.solve(gram, hidden.T @ (10.0 * np.eye(10)[digits]))
    return {"features": {"kernel": kernel, "bias": bias}, "readout": {"kernel": readout.astype(np.float32)}}


def predict(params, image):
    flat = image.reshape(image.shape[0], 64)
    hidden = jnp.tanh(flat @ params["features"]["kernel"] + params["features"]["bias"])
    scores = hidden @ params["readout"]["kernel"]
    return {"probability": jax.nn.softmax(scores), "digit": jnp.argmax(scores, axis=-1).astype(jnp.int32)}


def make():
    """What `rsrv export jax digits.py:make` calls: the function, its parameters, example inputs."""
    return {"fn": predict, "params": train(), "inputs": {"image": images(1, seed=2)[0]}}


def reference(image):
    """The same model without rsrv, for comparison."""
    return {name: np.asarray(value) for name, value in jax.jit(predict)(train(), image).items()}
'''
