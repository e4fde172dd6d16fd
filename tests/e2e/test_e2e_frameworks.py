"""Models of every JAX framework, exported by the command, served by the real server: answers are those of jax.jit."""

from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from support.server import ServerProcess

from rsrv.bundle import load_manifest
from rsrv.cli.main import main
from rsrv.client import KServeModel
from rsrv.core.dtypes import DType
from rsrv.export import call_factory

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
MODELS = ("jax_mlp", "flax_cnn", "nnx_mlp", "equinox_transformer")
SIZES = (1, 4, 8)


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("frameworks")
    for model in MODELS:
        arguments = ["--out", str(repo / model), "--batch-sizes", ",".join(map(str, SIZES)), "--no-diff"]
        assert main(["--quiet", "export", "jax", f"{EXAMPLES / model}.py:make", *arguments]) == 0
    return repo


@pytest.fixture(scope="module")
def server(repo):
    with ServerProcess(repo) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def rows(repo, model, count):
    """Input rows that are all different; the first ones do not depend on `count`."""
    draw = np.random.default_rng(5)
    inputs = {}
    for spec in load_manifest(repo / model).executable_inputs:
        shape = spec.concrete_shape(max(SIZES))
        if spec.dtype is not DType.I32:
            values = draw.normal(0, 1, shape)
        elif spec.name == "mask":
            values = np.arange(shape[1]) <= draw.integers(1, shape[1], (shape[0], 1))
        else:
            values = draw.integers(0, 100, shape)
        inputs[spec.name] = values.astype(spec.dtype.numpy)[:count]
    return inputs


@cache
def jit_of(model):
    made = call_factory(f"{EXAMPLES / model}.py:make")
    return partial(jax.jit(made.fn), made.params)


def jitted(model, inputs):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jit_of(model)(*inputs.values()))]


@pytest.mark.parametrize("shared_memory", ["off", "on"])
@pytest.mark.parametrize("model", MODELS)
def test_served_answers_are_those_of_jit_bit_by_bit_at_each_compiled_size(server, repo, model, shared_memory):
    with KServeModel(server.url, model, shared_memory=shared_memory) as client:
        for size in SIZES:
            inputs = rows(repo, model, size)
            answers, expected = list(client.infer(inputs).values()), jitted(model, inputs)
            assert len(answers) == len(expected)
            for answer, reference in zip(answers, expected, strict=True):
                np.testing.assert_array_equal(answer, reference, strict=True)
                assert size == 1 or np.ptp(answer, axis=0).max() > 0.01 * np.abs(answer).max()


@pytest.mark.parametrize("model", MODELS)
def test_served_answers_of_padded_row_counts_are_those_of_jit_within_1e_4(server, repo, model):
    with KServeModel(server.url, model) as client:
        for count in (3, 7):
            inputs = rows(repo, model, count)
            for answer, reference in zip(client.infer(inputs).values(), jitted(model, inputs), strict=True):
                assert answer.shape == reference.shape
                assert np.abs(answer - reference).max() / np.abs(reference).max() <= 1e-4
