"""Our client against mlserver, which shares no code with ours: no shared memory, no probe, no ModelConfig."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.ports import lasting_ports
from support.rows_io import Rows

from rsrv.client import (
    AsyncKServeModel,
    KServeModel,
    Server,
    infer_async,
    infer_sync,
    model_io_spec,
    validate_io,
)
from rsrv.core.errors import RsrvError, UnknownModel
from rsrv.core.wire import decode_response
from rsrv.protos import inference

MLSERVER = Path(__file__).parents[2] / ".venv-mlserver"
START_SECONDS = 90


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    if not (MLSERVER / ".ready").exists():
        if os.environ.get("RSRV_REQUIRE_CONTRACT_ENVS"):
            pytest.fail(f"{MLSERVER} is missing; `make test` creates it")
        pytest.skip(f"{MLSERVER} is missing; `make .venv-mlserver/.ready` creates it")
    folder = tmp_path_factory.mktemp("mlserver")
    http, grpc_port, metrics = lasting_ports(3)
    settings = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc_port, "metrics_port": metrics}
    settings |= {"parallel_workers": 0, "use_structured_logging": False}
    (folder / "settings.json").write_text(json.dumps(settings))
    model = {
        "name": "affine",
        "implementation": "mlserver_models.Affine",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "rows", "datatype": "INT32", "shape": [-1, 1]},
        ],
    }
    (folder / "affine").mkdir()
    (folder / "affine" / "model-settings.json").write_text(json.dumps(model))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(MLSERVER), str(Path(__file__).parent)])}
    log = folder / "log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "mlserver.cli.main", "start", str(folder)]
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, cwd=folder)
    try:
        url = f"127.0.0.1:{grpc_port}"
        wait_ready(url, process, log)
        yield url
    finally:
        process.kill()
        process.wait()


def wait_ready(url, process, log):
    until = time.monotonic() + START_SECONDS
    with Server(url) as server:
        while True:
            try:
                if server.ready() and server.model_ready("affine"):
                    return
            except RsrvError:
                pass
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"mlserver is not ready:\n{log.read_text()}")
            time.sleep(0.05)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.int16])
def test_one_call_inline_gives_bit_exact_answers(url, dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    with KServeModel(url, "affine") as model:
        outputs = model.infer({"x": x})
        assert model.transport == "inline"
    assert list(outputs) == ["y", "rows"]
    assert outputs["y"].dtype == dtype
    np.testing.assert_array_equal(outputs["y"], 2 * x + 1)
    np.testing.assert_array_equal(outputs["rows"], np.full((3, 1), 3))


def test_wanted_outputs_are_asked_for_by_name(url):
    with KServeModel(url, "affine") as model:
        assert list(model.infer({"x": np.zeros((2, 4), np.float32)}, outputs=["rows"])) == ["rows"]


def test_an_answer_with_typed_contents_is_read(url):
    """It answers as it is asked, and our client asks raw: this request is made by hand."""
    request = inference.ModelInferRequest(model_name="affine")
    tensor = request.inputs.add(name="x", datatype="INT64", shape=[2, 2])
    tensor.contents.int64_contents.extend([1, -2, 3, 1 << 40])
    with grpc.insecure_channel(url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = call(request.SerializeToString(), timeout=20)
    message = inference.ModelInferResponse.FromString(answer)
    assert not message.raw_output_contents
    y = decode_response(answer).arrays()["y"]
    assert y.dtype == np.int64
    np.testing.assert_array_equal(y, [[3, -3], [7, (1 << 41) + 1]])


def test_map_and_call_keep_the_form_of_what_they_are_given(url):
    x = np.arange(200, dtype=np.float32).reshape(50, 4)
    with KServeModel(url, "affine") as model:
        outputs = model.map({"x": x}, batch=8)
        assert model({"x": x[:3]})["rows"].tolist() == [[3]] * 3
        items = list(model.map(({"x": row} for row in x), batch=8))
    np.testing.assert_array_equal(outputs["y"], 2 * x + 1)
    assert outputs["rows"].max() <= 8
    assert len(outputs["rows"]) == 50
    np.testing.assert_array_equal(np.stack([item["y"] for item in items]), 2 * x + 1)


@pytest.mark.parametrize("drive", [infer_sync, infer_async])
def test_a_dataset_is_complete_and_in_the_size_that_was_asked_for(url, drive):
    data = Rows(100)
    done = []
    with KServeModel(url, "affine", max_batch_size=16) as model:
        drive(model, data, progress=lambda n, of: done.append((n, of)))
    np.testing.assert_array_equal(data.y, 2 * data.x + 1)
    assert sorted(data.requests) == [4] + [16] * 6
    assert done[-1] == (100, 100)


def test_a_server_that_does_not_tell_a_batch_size_gets_one_item_at_a_time(url):
    data = Rows(5)
    with KServeModel(url, "affine", max_batch_size="auto") as model:
        infer_async(model, data)
    np.testing.assert_array_equal(data.y, 2 * data.x + 1)
    assert data.requests == [1] * 5


def test_the_asyncio_face(url):
    x = np.arange(40, dtype=np.float32).reshape(10, 4)

    async def call():
        async with AsyncKServeModel(url, "affine") as model:
            one = await model.infer({"x": x})
            many = [item async for item in model.map(({"x": row} for row in x), batch=4)]
        return one, many

    one, many = asyncio.run(call())
    np.testing.assert_array_equal(one["y"], 2 * x + 1)
    np.testing.assert_array_equal(np.stack([item["y"] for item in many]), 2 * x + 1)


def test_metadata_and_the_check_of_a_dataset_need_nothing_of_ours(url):
    with Server(url) as server:
        assert server.metadata().name == "mlserver"
    with KServeModel(url, "affine") as model:
        spec = model_io_spec(model)
        assert spec.input_order == ("x",)
        assert spec.output_order == ("y", "rows")
        assert spec.inputs["x"].datatype == "FP32"
        assert spec.inputs["x"].shape == (-1, 4)
        assert model.metadata().batch_sizes == ()
        assert validate_io(model, Rows(3), items=2) == []


def test_shared_memory_that_was_insisted_on_is_an_error_that_says_so(url):
    with (
        KServeModel(url, "affine", shared_memory="on") as model,
        pytest.raises(RsrvError, match="shared memory") as caught,
    ):
        model.infer({"x": np.zeros((1, 4), np.float32)})
    assert "auto" in (caught.value.hint or "")


def test_a_model_that_it_does_not_have_is_an_unknown_model(url):
    with KServeModel(url, "nothing") as model, pytest.raises(UnknownModel, match="nothing"):
        model.infer({"x": np.zeros((1, 4), np.float32)})


def test_a_refused_request_is_an_error_of_its_own_and_the_next_one_passes(url):
    with KServeModel(url, "affine") as model:
        with pytest.raises(RsrvError):
            model.infer({})
        np.testing.assert_array_equal(model.infer({"x": np.ones((1, 4), np.float32)})["y"], np.full((1, 4), 3))
