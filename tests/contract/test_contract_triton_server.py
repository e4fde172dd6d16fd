"""Our client against the real tritonserver, on the CPU: shared memory without a probe, and a server that comes back.

Skipped where its environment is missing: ``make .venv-tritonserver/.ready`` creates it.
"""

import glob
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.ports import lasting_ports
from support.rows_io import Rows

from rsrv.client import (
    KServeModel,
    Server,
    infer_async,
    infer_sync,
    model_io_spec,
)
from rsrv.core.errors import RsrvError, UnknownModel

ENVIRONMENT = Path(__file__).parents[2] / ".venv-tritonserver"
START_SECONDS = 60
CONFIG = """
backend: "python"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
"""
MODEL = """
import triton_python_backend_utils as triton

class TritonPythonModel:
    def execute(self, requests):
        inputs = [triton.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [triton.InferenceResponse([triton.Tensor("y", 2 * x + 1)]) for x in inputs]
"""

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").exists(),
    reason=f"{ENVIRONMENT} is missing; `make .venv-tritonserver/.ready` creates it",
)


class TritonServer:
    """A tritonserver with the model ``affine`` on one port; it can be killed and started again there."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "models" / "affine" / "1").mkdir(parents=True)
        (folder / "models" / "affine" / "config.pbtxt").write_text(CONFIG)
        (folder / "models" / "affine" / "1" / "model.py").write_text(MODEL)
        self.url = f"127.0.0.1:{lasting_ports(1)[0]}"

    def start(self):
        (packages,) = (ENVIRONMENT / "lib").glob("python3*/site-packages")
        home = packages / "pytriton" / "tritonserver"
        host, port = self.url.split(":")
        command = [home / "bin" / "tritonserver", f"--model-repository={self.folder / 'models'}"]
        command += [f"--backend-directory={home / 'backends'}", f"--grpc-address={host}", f"--grpc-port={port}"]
        command += ["--allow-http=false", "--allow-metrics=false"]
        env = {"PATH": f"{ENVIRONMENT / 'bin'}:/usr/bin:/bin", "LD_LIBRARY_PATH": packages / "nvidia_pytriton.libs"}
        self.log = self.folder / "log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + START_SECONDS
        with Server(self.url) as server:
            while True:
                try:
                    if server.model_ready("affine"):
                        return
                except RsrvError:
                    pass
                if self.process.poll() is not None or time.monotonic() > until:
                    raise AssertionError(f"tritonserver is not ready:\n{self.log.read_text()}")
                time.sleep(0.05)

    def kill(self):
        """SIGKILL for it and the process of its Python backend, whose shared memory then stays and is not ours."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for path in glob.glob("/dev/shm/triton_python_backend_shm_region_*"):
            os.unlink(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = TritonServer(tmp_path_factory.mktemp("triton"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize(("mode", "transport"), [("off", "inline"), ("auto", "inline"), ("on", "shared memory")])
def test_one_call_is_right_and_auto_does_not_trust_a_server_without_a_probe(server, mode, transport):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with KServeModel(server.url, "affine", shared_memory=mode) as model:
        np.testing.assert_array_equal(model.infer({"x": x})["y"], 2 * x + 1)
        assert model.transport == transport


@pytest.mark.parametrize("drive", [infer_sync, infer_async])
@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_dataset_is_right_in_chunks_that_the_model_config_allows(server, mode, drive):
    data = Rows(100)
    with KServeModel(server.url, "affine", max_batch_size="auto", shared_memory=mode) as model:
        drive(model, data)
    assert data.is_right()
    assert sorted(data.requests) == [4] + [8] * 12


def test_its_metadata_gives_a_spec(server):
    with KServeModel(server.url, "affine") as model:
        spec = model_io_spec(model)
        assert spec.inputs["x"].shape == (-1, 4)
        assert spec.outputs["y"].datatype == "FP32"
        assert model.metadata().batch_sizes == ()


def test_map_through_shared_memory(server):
    x = np.arange(400, dtype=np.float32).reshape(100, 4)
    with KServeModel(server.url, "affine", shared_memory="on") as model:
        np.testing.assert_array_equal(model.map(x, batch=8), 2 * x + 1)


def test_a_model_that_it_does_not_have_is_an_unknown_model(server):
    with KServeModel(server.url, "nothing") as model, pytest.raises(UnknownModel, match="nothing"):
        model.infer({"x": np.zeros((1, 4), np.float32)})


def test_a_server_that_was_killed_between_two_calls_gets_the_memory_registered_again(server):
    x = np.ones((2, 4), np.float32)
    with KServeModel(server.url, "affine", shared_memory="on", deadline=60) as model:
        assert model.infer({"x": x})["y"][0, 0] == 3
        server.kill()
        server.start()
        assert model.infer({"x": 2 * x})["y"][0, 0] == 5


@pytest.mark.parametrize("drive", [infer_sync, infer_async])
def test_a_server_that_is_killed_within_a_dataset_gets_the_memory_registered_again(server, drive):
    back = threading.Event()

    def restart():
        server.kill()
        server.start()
        back.set()

    data = Rows(800, at=400, then=lambda: threading.Thread(target=restart).start())
    with KServeModel(server.url, "affine", max_batch_size=8, shared_memory="on", deadline=60) as model:
        drive(model, data)
        assert data.is_right()
        assert back.wait(START_SECONDS)
        again = Rows(16)
        infer_async(model, again)
    assert again.is_right()
