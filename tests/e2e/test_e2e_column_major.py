"""Bundles of the older column-major format behind a real server, beside the same models in ours."""

import numpy as np
import pytest
from support.bundles import N, write_model
from support.column_major import write_column_major
from support.server import ServerProcess

from rsrv.audit import convert_bundle
from rsrv.client import KServeModel, Server
from rsrv.core.errors import ModelFailed

SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)
CUBE = np.random.default_rng(2).integers(-9, 9, (3, 3, 3)).astype(np.float32)
HOOKS = "def postprocess(outputs):\n    return {'y': outputs['y'][..., ::-1].copy()}\n"


def contraction(x, square, cube):
    """f32[n,2,3] → f32[n,2,3,3]. Every weight is square, so only the right transposition gives the right numbers."""
    return (((x @ square)[..., None, None] * cube).sum(2),)


def expected(x):
    return contraction(x, SQUARE, CUBE)[0]


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    base = tmp_path_factory.mktemp("bundles")
    tensors = {"x": ((N, 2, 3), np.float32)}, {"y": ((N, 2, 3, 3), np.float32)}
    weights = {"square": SQUARE, "cube": CUBE}
    new = write_model(base / "new" / "net", contraction, *tensors, weights=weights, batch_sizes=(1, 4))
    hooked = write_model(
        base / "new" / "hooked",
        contraction,
        *tensors,
        weights=weights,
        batch_sizes=(1, 4),
        hooks=HOOKS,
        client_outputs={"y": ((N, 2, 3, 3), np.float32)},
    )
    repo = base / "repo"
    repo.mkdir()
    write_column_major(new, repo / "older")
    write_column_major(hooked, repo / "hooked")
    for name in ("unported", "unhooked"):
        write_column_major(hooked, repo / name)
        (repo / name / "model.py").rename(repo / name / "model.jl")
    convert_bundle(repo / "older", repo / "converted")
    convert_bundle(repo / "converted", repo / "again", to="2.0")
    return repo


@pytest.fixture(scope="module")
def server(repo):
    env = {"RSRV_WORKER_ALLOW_UNHOOKED": "unhooked", "RSRV_WORKER_STARTUP_READY_WHEN": "any"}
    with ServerProcess(repo, env=env) as server:
        server.wait_settled()
        yield server
        assert server.stop() == 0


@pytest.mark.parametrize("name", ["older", "converted", "again", "unhooked"])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_same_numbers_come_out_of_either_format(server, name, rows):
    x = np.random.default_rng(rows).integers(-9, 9, (rows, 2, 3)).astype(np.float32)
    with KServeModel(server.url, name) as model:
        np.testing.assert_array_equal(model.infer({"x": x})["y"], expected(x))


def test_python_hooks_get_row_major_arrays(server):
    x = np.random.default_rng(7).integers(-9, 9, (2, 2, 3)).astype(np.float32)
    with KServeModel(server.url, "hooked") as model:
        np.testing.assert_array_equal(model.infer({"x": x})["y"], expected(x)[..., ::-1])


def test_metadata_is_row_major(server):
    with Server(server.url) as asked:
        for name in ("older", "converted"):
            meta = asked.model_metadata(name)
            shown = [tensor.describe() for tensor in (*meta.inputs, *meta.outputs)]
            assert shown == ["x FP32[-1,2,3]", "y FP32[-1,2,3,3]"]


def test_hooks_that_cannot_run_fail_their_model_alone_and_say_what_to_do(server):
    with Server(server.url) as asked:
        reasons = {entry.name: entry.reason for entry in asked.models() if entry.state != "READY"}
    assert list(reasons) == ["unported"]
    assert "needs a Python port of its hooks" in reasons["unported"]
    with KServeModel(server.url, "unported") as model, pytest.raises(ModelFailed):
        model.infer({"x": np.zeros((1, 2, 3), np.float32)})
