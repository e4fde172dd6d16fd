"""What callers of a model send and receive: asked from a server, and read from a bundle, with the same result."""

import asyncio
import subprocess
import sys

import grpc
import numpy as np
import pytest
from support.bundles import N, write_affine, write_model
from support.client_stub import StubServer
from support.column_major import write_column_major

from rsrv.client import AsyncKServeModel, KServeModel, ModelIOSpec, TensorMeta, manifest_io_spec, model_io_spec
from rsrv.core.config import EndpointsConfig, RuntimeConfig, ServerConfig
from rsrv.core.errors import ManifestError, ServerUnreachable, Unimplemented, UnknownModel, UsageError

HOOKS = """\
import numpy as np

def preprocess(inputs):
    return {"x": np.repeat(inputs["words"][:, None], 3, 1).astype(np.float32)}
"""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Bundles whose tensors differ in what a specification can say."""
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine")
    write_affine(repo / "words", hooks=HOOKS, client_inputs={"words": ((N,), np.int64)})
    write_column_major(repo / "affine", repo / "older")
    image = ((2, N), np.float32)
    write_model(
        repo / "rows-last",
        lambda image: (image + 1, image.sum(1).astype(np.float16)),
        {"image": image},
        {"bright": image, "sum": ((2,), np.float16)},
        batch_sizes=(2,),
    )
    write_model(repo / "single", lambda x: (x,), {"x": ((2, 3), np.int8)}, {"y": ((2, 3), np.int8)}, batch_sizes=None)
    return repo


@pytest.fixture(scope="module")
def real(bundles):
    from rsrv.serve import serve

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RSRV_ALLOW_FAKE", "1")
        server = serve(
            ServerConfig(
                model_dirs=[str(bundles)],
                model_control_mode="static",
                runtime=RuntimeConfig(backend="fake"),
                endpoints=EndpointsConfig(grpc_port=0, http_port=None),
            ),
            blocking=False,
        )
        yield f"127.0.0.1:{server.grpc_port}"
        server.stop()


EXPECTED = {
    "affine": (
        {"x": TensorMeta("x", "FP32", (-1, 3), 0)},
        {"y": TensorMeta("y", "FP32", (-1, 3), 0)},
        (1, 4, 8),
    ),
    "older": (
        {"x": TensorMeta("x", "FP32", (-1, 3), 0)},
        {"y": TensorMeta("y", "FP32", (-1, 3), 0)},
        (1, 4, 8),
    ),
    "words": (
        {"words": TensorMeta("words", "INT64", (-1,), 0)},
        {"y": TensorMeta("y", "FP32", (-1, 3), 0)},
        (1, 4, 8),
    ),
    "rows-last": (
        {"image": TensorMeta("image", "FP32", (2, -1), 1)},
        {"bright": TensorMeta("bright", "FP32", (2, -1), 1), "sum": TensorMeta("sum", "FP16", (2,))},
        (2,),
    ),
    "single": ({"x": TensorMeta("x", "INT8", (2, 3))}, {"y": TensorMeta("y", "INT8", (2, 3))}, ()),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_server_and_the_bundle_that_it_serves_give_the_same_record(name, real, bundles):
    inputs, outputs, batch_sizes = EXPECTED[name]
    with KServeModel(real, name) as model:
        asked = model_io_spec(model)
        assert model.metadata().batch_sizes == batch_sizes
    assert asked == ModelIOSpec(name, inputs, outputs)
    assert (asked.input_order, asked.output_order) == (tuple(inputs), tuple(outputs))
    assert manifest_io_spec(bundles / name) == asked
    assert manifest_io_spec(str(bundles / name / "manifest.yaml")) == asked


def test_a_record_cannot_be_changed(bundles):
    spec = manifest_io_spec(bundles / "affine")
    with pytest.raises(TypeError):
        spec.inputs["z"] = spec.inputs["x"]
    with pytest.raises(AttributeError):
        spec.name = "other"


def test_a_server_that_knows_no_axes_gives_a_record_without_them():
    with StubServer() as server, KServeModel(server.url, "twice") as model:
        spec = model_io_spec(model)
    assert spec.inputs == {"x": TensorMeta("x", "FP32", (-1, 4), None)}
    assert spec.output_order == ("y", "total")


def test_a_model_that_cannot_be_asked_is_an_error():
    with StubServer() as server:
        with KServeModel(server.url, "nobody") as model, pytest.raises(UnknownModel, match="nobody"):
            model_io_spec(model)
        server.refuse["ModelMetadata"] = (grpc.StatusCode.UNIMPLEMENTED, "no such method", "")
        with KServeModel(server.url, "twice") as model, pytest.raises(Unimplemented):
            model_io_spec(model)
        url = server.url
    with KServeModel(url, "twice", deadline=2) as model, pytest.raises(ServerUnreachable):
        model_io_spec(model)


def test_a_handle_for_event_loops_is_asked_with_await():
    async def ask(url):
        async with AsyncKServeModel(url, "twice") as model:
            with pytest.raises(UsageError, match="AsyncKServeModel has to be awaited") as caught:
                model_io_spec(model)
            assert "model.model" in caught.value.hint
            assert model_io_spec(model.model) == ModelIOSpec.of(await model.metadata())

    with StubServer() as server:
        asyncio.run(ask(server.url))


def test_a_manifest_that_no_server_would_load_is_refused(bundles, tmp_path):
    with pytest.raises(ManifestError, match=r"manifest\.yaml"):
        manifest_io_spec(tmp_path)
    text = (bundles / "affine" / "manifest.yaml").read_text()
    (tmp_path / "manifest.yaml").write_text(text.replace("f32", "float32", 1))
    with pytest.raises(ManifestError, match="float32"):
        manifest_io_spec(tmp_path)


def test_only_reading_a_manifest_needs_yaml():
    code = (
        "import sys, rsrv.client as c; c.model_io_spec, c.manifest_io_spec, c.validate_io; print('yaml' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"
