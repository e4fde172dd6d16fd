"""Programs through artifact, device and serialised executable give the bits that `jax.jit` gives."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rsrv.runtime import execute
from rsrv.stablehlo import serialize

RANDOM = np.random.default_rng(7)


def floats(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def positive_definite(n):
    a = floats(n, n)
    return a @ a.T + n * np.eye(n, dtype=np.float32)


CASES = {
    "matmul": (lambda x, w: x @ w, [floats(8, 64), floats(64, 32)]),
    "convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")),
        [floats(2, 3, 16, 16), floats(8, 3, 3, 3)],
    ),
    "softmax": (lambda x: jax.nn.softmax(x, axis=-1), [floats(4, 33)]),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), [floats(4, 33)]),
    "layer norm": (
        lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
        [floats(4, 9)],
    ),
    "bf16": (lambda x, w: x @ w, [floats(8, 16, dtype=ml_dtypes.bfloat16), floats(16, 8, dtype=ml_dtypes.bfloat16)]),
    "f16": (lambda x: jnp.exp(x), [floats(8, 16, dtype=np.float16)]),
    "int64": (lambda x: x * 3 + 2**40, [RANDOM.integers(-(2**50), 2**50, (5,))]),
    "float64": (lambda x: jnp.sin(x) / 3, [RANDOM.standard_normal((5,))]),
    "uint8 and bool": (lambda x: (x + 200, x > 3), [np.arange(10, dtype=np.uint8)]),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x)), [floats(3, 50)]),
    "top k": (lambda x: jax.lax.top_k(x, 5), [floats(3, 50)]),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), [floats(3, 50)]),
    "cholesky": (jnp.linalg.cholesky, [positive_definite(6)]),
    "qr": (lambda a: jnp.linalg.qr(a), [floats(6, 4)]),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), [floats(32)]),
    "zero-size": (lambda x: (x + 1, x.sum()), [floats(0, 4)]),
    "rank 0": (lambda x, y: x * y, [np.array(1.5, np.float32), np.array(-2.25, np.float32)]),
    "scan": (lambda x: jax.lax.scan(lambda c, v: (c * 0.5 + v, c), jnp.zeros(4), x), [floats(7, 4)]),
    "gather": (lambda x, i: x[i], [floats(9, 4), np.array([3, 8, 0], np.int32)]),
    "random": (lambda key: jax.random.normal(key, (5,)), [np.array([1, 2], np.uint32)]),
}


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", CASES)
def test_outputs_have_the_bits_of_jax_jit(cpu, name):
    fn, arguments = CASES[name]
    jitted = jax.jit(fn, keep_unused=True)
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jitted(*arguments))]
    artifact = serialize(jitted.lower(*arguments).compiler_ir("stablehlo"))

    executable = cpu.compile(artifact)
    blob = cpu.serialize(executable)
    assert blob is not None
    loaded = cpu.load(blob, executable.signature)
    for outputs in (execute(cpu, executable, arguments), execute(cpu, loaded, arguments)):
        assert len(outputs) == len(expected)
        for output, reference in zip(outputs, expected, strict=True):
            assert (output.dtype, output.shape) == (reference.dtype, reference.shape)
            assert output.tobytes() == reference.tobytes()
