"""Our client and its commands against a real ``rsrv serve``: every dtype, inline and through shared memory."""

import json
import threading

import ml_dtypes
import numpy as np
import pytest
from support.bundles import N, write_affine, write_identity, write_model
from support.server import ServerProcess

from rsrv.cli.main import main
from rsrv.client import InferInput, InferOutput, KServeModel, Server, infer_sync
from rsrv.core.dtypes import DType
from rsrv.core.errors import DeadlineExceeded, InvalidRequest, ModelFailed, UnknownModel

DTYPES = [dtype.numpy for dtype in DType if dtype.wire is not None]
MODES = ["off", "on"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    write_affine(repo / "affine", features=4)
    write_model(
        repo / "every",
        lambda *xs: tuple(x[:, ::-1] for x in xs),
        {f"in_{d.name}": ((N, 5), d) for d in DTYPES},
        {f"out_{d.name}": ((N, 5), d) for d in DTYPES},
        batch_sizes=(1, 4),
    )
    write_model(
        repo / "fixed",
        lambda x, s: (x * s, x.sum()),
        {"x": ((2, 3), np.float32), "s": ((), np.float32)},
        {"y": ((2, 3), np.float32), "total": ((), np.float32)},
        batch_sizes=None,
    )
    write_identity(repo / "wide", (N, 200_000), batch_sizes=(8,))
    write_affine(repo / "broken", features=2)
    (repo / "broken" / "weights.safetensors").unlink()
    with ServerProcess(repo, env={"RSRV_WORKER_STARTUP_READY_WHEN": "any"}) as server:
        server.wait_settled()
        yield server
        assert server.stop() == 0


def random_array(dtype, shape):
    source = np.random.default_rng(7)
    if dtype.kind == "b":
        return source.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return source.integers(info.min, info.max, shape, dtype, endpoint=True)
    return source.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_every_dtype_comes_back_bit_for_bit(server, mode, rows):
    inputs = {f"in_{d.name}": random_array(d, (rows, 5)) for d in DTYPES}
    with KServeModel(server.url, "every", shared_memory=mode) as model:
        outputs = model.infer(inputs)
        assert model.transport == ("shared memory" if mode == "on" else "inline")  # few bytes, where we choose
    assert len(outputs) == 13
    for dtype in DTYPES:
        answer = outputs[f"out_{dtype.name}"]
        assert answer.dtype == dtype
        assert answer.tobytes() == np.ascontiguousarray(inputs[f"in_{dtype.name}"][:, ::-1]).tobytes()
    assert outputs["out_bfloat16"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_scalars_and_unbatched_tensors(server, mode):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with KServeModel(server.url, "fixed", shared_memory=mode) as model:
        outputs = model.infer({"x": x, "s": np.float32(3)})
    np.testing.assert_array_equal(outputs["y"], 3 * x)
    assert outputs["total"].shape == ()
    assert outputs["total"] == 15


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_concurrent_callers_of_one_handle_get_exactly_their_rows(server, mode):
    wrong = []

    def call(model, number):
        for step in range(20):
            x = np.full((1 + (number + step) % 6, 4), number * 100 + step, np.float32)
            if not np.array_equal(model.infer({"x": x})["y"], 2 * x + 1):
                wrong.append((number, step))

    with KServeModel(server.url, "affine", shared_memory=mode, deadline=60) as model:
        threads = [threading.Thread(target=call, args=(model, n)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert model.transport == ("shared memory" if mode == "on" else "inline")  # few bytes, where we choose
    assert wrong == []


def test_regions_are_unregistered_when_the_handle_closes(server):
    def registered():
        return server.metric("rsrv_worker_shm_regions")

    before = registered()
    with KServeModel(server.url, "affine", shared_memory="on") as model:
        model.infer({"x": np.ones((1, 4), np.float32)})
        assert registered() == before + 1
    assert registered() == before


@pytest.mark.parametrize("mode", MODES)
def test_more_than_grpcs_default_message_size_passes_both_ways(server, mode):
    x = np.random.default_rng(3).standard_normal((8, 200_000), np.float32)
    assert x.nbytes > 4 << 20
    with KServeModel(server.url, "wide", shared_memory=mode) as model:
        np.testing.assert_array_equal(model.infer({"x": x})["y"], x)


@pytest.mark.parametrize("mode", MODES)
def test_errors_of_the_server_arrive_as_their_kind(server, mode):
    with KServeModel(server.url, "affine", shared_memory=mode) as model:
        with pytest.raises(InvalidRequest, match="'x'") as caught:
            model.infer({"x": np.ones((1, 5), np.float32)})
        assert caught.value.reason == "invalid"
        with pytest.raises(InvalidRequest, match="nothing"):
            model.infer({"x": np.ones((1, 4), np.float32)}, ["nothing"])
        with pytest.raises(InvalidRequest, match="'x'"):
            model.infer({"x": np.ones((1, 4), np.float64)})
        np.testing.assert_array_equal(model.infer({"x": np.ones((1, 4), np.float32)})["y"], [[3, 3, 3, 3]])
    with KServeModel(server.url, "nobody", shared_memory=mode) as model, pytest.raises(UnknownModel, match="nobody"):
        model.infer({"x": np.ones((1, 4), np.float32)})
    with KServeModel(server.url, "broken", shared_memory=mode) as model, pytest.raises(ModelFailed):
        model.infer({"x": np.ones((1, 2), np.float32)})


def test_a_deadline_that_has_no_chance_is_told(server):
    with (
        KServeModel(server.url, "affine", shared_memory="off", deadline=1e-6) as model,
        pytest.raises(DeadlineExceeded),
    ):
        model.infer({"x": np.ones((1, 4), np.float32)})


def test_infer_sync_with_explicit_tensors(server):
    with KServeModel.at("127.0.0.1", server.grpc_port, "affine") as model:
        response = infer_sync(model, [InferInput("x", (2, 4), np.arange(8, dtype=np.float32))], ["y"], id="a-1")
    assert (response.id, response.model_name, response.names) == ("a-1", "affine", ["y"])
    np.testing.assert_array_equal(InferOutput("y", response, np.float32), 2 * np.arange(8).reshape(2, 4) + 1)


def test_what_the_server_says_about_itself(server):
    with Server(server.url) as asked:
        assert asked.live()
        assert asked.ready()
        assert asked.metadata().name == "rsrv"
        assert "system_shared_memory" in asked.metadata().extensions
        entries = {entry.name: entry for entry in asked.models()}
        assert [name for name, entry in entries.items() if entry.state == "READY"] == [
            "affine",
            "every",
            "fixed",
            "wide",
        ]
        assert "weights" in entries["broken"].reason
        meta = asked.model_metadata("affine")
        assert [t.describe() for t in (*meta.inputs, *meta.outputs)] == ["x FP32[-1,4]", "y FP32[-1,4]"]
        assert asked.model_counts("affine").rows > 0


def test_the_commands_against_a_real_server(server, tmp_path, capsys):
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    np.save(tmp_path / "x.npy", x)
    arguments = ["--input", f"x=@{tmp_path}/x.npy", "--batch", "4", "--output-dir", str(tmp_path / "out"), "--shm"]
    assert main(["infer", "affine", "--url", server.url, *arguments]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "y.npy"), 2 * x + 1)
    capsys.readouterr()
    assert main(["models", "--url", server.url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(m["name"], m["state"]) for m in listed] == [
        ("affine", "READY"),
        ("broken", "UNAVAILABLE"),
        ("every", "READY"),
        ("fixed", "READY"),
        ("wide", "READY"),
    ]
    assert main(["infer", "broken", "--url", server.url, "--input", "x=zeros"]) == 1
    assert "error:" in capsys.readouterr().err
