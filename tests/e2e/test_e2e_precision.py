"""16-bit models, and models that compute with 8-bit floats inside, from the export to a real server's answers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.server import ServerProcess

from rsrv.audit import check_bundle
from rsrv.bundle import IOSpec, open_bundle, read_header
from rsrv.client import KServeModel
from rsrv.core.errors import ManifestError
from rsrv.export import export_bundle

triton = pytest.importorskip("tritonclient.grpc")

BF16, E4M3, E5M2 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
HALVES = {"bf16": BF16, "f16": F16}
MODES = ["off", "on"]

FP8_HOOKS = """
import ml_dtypes
import numpy as np

def preprocess(inputs):
    return {"x": inputs["x"].astype(ml_dtypes.float8_e4m3fn)}

def postprocess(outputs):
    return {"y": outputs["y"].astype(np.float32)}
"""


def weights(dtype):
    source = np.random.default_rng(5)
    return {
        "w": (source.standard_normal((24, 16)) / 4).astype(dtype),
        "b": source.standard_normal(16).astype(dtype),
        "v": (source.standard_normal((16, 8)) / 4).astype(dtype),
    }


def mlp(params, x):
    return {"y": jax.nn.gelu(x @ params["w"] + params["b"]) @ params["v"]}


def eight_bit(params, x):
    """f32 outside; inside weights of both 8-bit types and activations that are rounded to 8 bits."""
    hidden = (x @ params["w"].astype(jnp.float32)).astype(ml_dtypes.float8_e5m2).astype(jnp.float32)
    return {"y": hidden @ params["v"].astype(jnp.float32)}


def rounded(params, x):
    """f8_e4m3 in, f8_e5m2 out: only hooks can serve this."""
    return {"y": (x.astype(jnp.float32) * params["s"]).astype(ml_dtypes.float8_e5m2)}


EIGHT_BIT = {"w": weights(E4M3)["w"], "v": weights(E5M2)["v"]}


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    common = {"batch_sizes": (1, 4), "collect_git": False}
    for name, dtype in HALVES.items():
        export_bundle("jax", mlp, weights(dtype), f"x={name}[1,24]", dir=repo / name, **common)
    export_bundle("jax", eight_bit, EIGHT_BIT, "x=f32[1,24]", dir=repo / "fp8", **common)
    tensors = {"client_inputs": [IOSpec("x", F32, (1, 24), batch_axis=0)]}
    tensors["client_outputs"] = [IOSpec("y", F32, (1, 24), batch_axis=0)]
    params = {"s": np.float32(2) * np.ones(24, F32)}
    export_bundle("jax", rounded, params, "x=f8_e4m3[1,24]", dir=repo / "rounded", hooks=FP8_HOOKS, **tensors, **common)
    return repo


@pytest.fixture(scope="module")
def server(repo):
    with ServerProcess(repo) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def rows(count, dtype):
    return np.random.default_rng(count).standard_normal((count, 24)).astype(dtype)


def require_close(found, wanted, rel):
    assert found.dtype == wanted.dtype
    found, wanted = found.astype(np.float64), np.asarray(wanted).astype(np.float64)
    assert np.abs(found - wanted).max() <= rel * np.abs(wanted).max()
    assert np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "rel"), [("bf16", 1e-2), ("f16", 2e-3)])
def test_a_16_bit_model_gives_what_jax_gives(server, name, rel, mode):
    dtype = HALVES[name]
    with KServeModel(server.url, name, shared_memory=mode) as model:
        for count in (1, 3, 4):
            x = rows(count, dtype)
            require_close(model.infer({"x": x})["y"], np.asarray(jax.jit(mlp)(weights(dtype), x)["y"]), rel)


def test_a_16_bit_model_answers_tritonclient(server):
    x = rows(2, F16)
    with triton.InferenceServerClient(server.url) as client:
        tensor = triton.InferInput("x", x.shape, "FP16")
        tensor.set_data_from_numpy(x)
        answer = client.infer("f16", [tensor]).as_numpy("y")
        require_close(answer, np.asarray(jax.jit(mlp)(weights(F16), x)["y"]), 2e-3)
        tensor = triton.InferInput("x", x.shape, "BF16")
        tensor.set_data_from_numpy(rows(2, BF16))
        answer = client.infer("bf16", [tensor]).as_numpy("y")
        wanted = np.asarray(jax.jit(mlp)(weights(BF16), rows(2, BF16))["y"])
        require_close(answer, wanted.astype(answer.dtype), 1e-2)


@pytest.mark.parametrize("name", list(HALVES))
def test_weights_stay_16_bit_in_the_bundle(repo, name):
    entries = read_header(repo / name / "weights.safetensors").tensors.values()
    assert {entry.dtype.value for entry in entries} == {name}
    assert check_bundle(repo / name).passed(strict=True)


@pytest.mark.parametrize("mode", MODES)
def test_8_bit_floats_inside_a_program(server, repo, mode):
    entries = read_header(repo / "fp8" / "weights.safetensors").tensors
    assert {name: entry.dtype.value for name, entry in entries.items()} == {"w": "f8_e4m3", "v": "f8_e5m2"}
    x = rows(3, F32)
    with KServeModel(server.url, "fp8", shared_memory=mode) as model:
        require_close(model.infer({"x": x})["y"], np.asarray(jax.jit(eight_bit)(EIGHT_BIT, x)["y"]), 1e-5)


def test_8_bit_floats_at_the_programs_edge_are_served_through_hooks(server, repo):
    manifest = open_bundle(repo / "rounded").manifest
    assert [spec.describe() for spec in (*manifest.executable_inputs, *manifest.executable_outputs)] == [
        "f8_e4m3[n,24]",
        "f8_e5m2[n,24]",
    ]
    x = rows(3, F32)
    with KServeModel(server.url, "rounded") as model:
        answer = model.infer({"x": x})["y"]
    np.testing.assert_array_equal(answer, (x.astype(E4M3).astype(F32) * 2).astype(E5M2).astype(F32))


def test_8_bit_floats_that_clients_would_see_are_refused_at_export(tmp_path):
    with pytest.raises(ManifestError, match="f8_e4m3 has no KServe datatype"):
        export_bundle("jax", rounded, {"s": np.ones(24, F32)}, "x=f8_e4m3[1,24]", dir=tmp_path / "net")
