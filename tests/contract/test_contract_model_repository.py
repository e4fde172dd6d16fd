"""Triton's own client loads, reloads and unloads models of a real server (the model repository extension of V2)."""

import shutil

import numpy as np
import pytest
from support.bundles import N, write_model
from support.server import ServerProcess

triton = pytest.importorskip("tritonclient.grpc")
from tritonclient.utils import InferenceServerException  # noqa: E402

ROW = ((N, 4), np.float32)


def write(directory, factor):
    return write_model(directory, lambda x: (x * factor,), {"x": ROW}, {"y": ROW}, batch_sizes=(1, 2))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write(repo / "first", 2.0)
    with ServerProcess(repo, env={"RSRV_WORKER_MODEL_CONTROL_MODE": "explicit"}) as server:
        server.repo = repo
        server.wait_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.url) as client:
        yield client


def infer(client, name):
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(x)
    return client.infer(name, [tensor]).as_numpy("y")[0].tolist()


def index(client):
    rows = client.get_model_repository_index(as_json=True).get("models", [])
    return {row["name"]: (row["state"], row.get("reason", "")) for row in rows}


def test_the_server_says_that_it_can(client):
    extensions = client.get_server_metadata().extensions
    assert {"model_repository", "rsrv_admin"} <= set(extensions)


def test_a_model_is_loaded_reloaded_with_new_files_and_unloaded(server, client):
    write(server.repo / "second", 3.0)
    assert "second" not in index(client)
    client.load_model("second")
    assert client.is_model_ready("second")
    assert infer(client, "second") == [0, 3, 6, 9]

    shutil.rmtree(server.repo / "second")
    write(server.repo / "second", 5.0)
    assert infer(client, "second") == [0, 3, 6, 9]
    client.load_model("second")
    assert infer(client, "second") == [0, 5, 10, 15]
    assert infer(client, "first") == [0, 2, 4, 6]

    client.unload_model("second")
    assert not client.is_model_ready("second")
    assert "second" not in index(client)
    with pytest.raises(InferenceServerException, match="unknown model") as raised:
        infer(client, "second")
    assert raised.value.status() == "StatusCode.NOT_FOUND"
    client.load_model("second")
    assert infer(client, "second") == [0, 5, 10, 15]
    client.unload_model("second", unload_dependents=True)


def test_a_broken_model_is_reported_by_every_load_until_it_is_mended(server, client):
    directory = write(server.repo / "broken", 1.0)
    sound = (directory / "manifest.yaml").read_text()
    (directory / "manifest.yaml").write_text("format_version: '3.0'\n")
    said = []
    for _ in range(2):
        with pytest.raises(InferenceServerException) as raised:
            client.load_model("broken")
        said.append(raised.value.message())
    assert said[0] == said[1]
    assert "broken" in said[0]
    state, reason = index(client)["broken"]
    assert state == "UNAVAILABLE"
    assert "manifest" in reason
    (directory / "manifest.yaml").write_text(sound)
    client.load_model("broken")
    assert infer(client, "broken") == [0, 1, 2, 3]
    client.unload_model("broken")
    assert "broken" not in index(client)


def test_a_reload_that_fails_says_why_and_the_old_version_serves_on(server, client):
    directory = write(server.repo / "old", 4.0)
    client.load_model("old")
    sound = (directory / "manifest.yaml").read_text()
    (directory / "manifest.yaml").write_text("nonsense: [")
    with pytest.raises(InferenceServerException, match=r"manifest\.yaml: line 1"):
        client.load_model("old")
    assert client.is_model_ready("old")
    assert infer(client, "old") == [0, 4, 8, 12]
    assert "reload failed" in index(client)["old"][1]
    (directory / "manifest.yaml").write_text(sound)
    client.load_model("old")
    assert index(client)["old"] == ("READY", "")
    client.unload_model("old")


def test_what_cannot_be_is_refused_with_its_status(server, client):
    for call, status in (
        (lambda: client.load_model("nobody"), "StatusCode.NOT_FOUND"),
        (lambda: client.unload_model("nobody"), "StatusCode.NOT_FOUND"),
        (lambda: client.load_model("../repo"), "StatusCode.INVALID_ARGUMENT"),
        (lambda: client.load_model("first", config="{}"), "StatusCode.INVALID_ARGUMENT"),
        (lambda: client.load_model("first", files={"file:1/model.mlir": b"x"}), "StatusCode.INVALID_ARGUMENT"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            call()
        assert raised.value.status() == status
    assert infer(client, "first") == [0, 2, 4, 6]
