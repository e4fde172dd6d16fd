"""perf_analyzer, the load generator of Triton, as tritonclient 2.50.0 brought it along. It needs two shared libraries:
libcudart.so.12 and libb64.so.0d, which `make` puts into the same environment where it can."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.bundles import N, write_model
from support.server import ServerProcess

ENVIRONMENT = Path(__file__).parents[2] / ".venv-tritonclient-2.50"
PROGRAM = ENVIRONMENT / "bin" / "perf_analyzer"
LIBRARIES = ("libcudart.so.12", "libb64.so.0d")
CONCURRENCY = "4"


@pytest.fixture(scope="module")
def environ():
    """The variables with which the program starts; skips where it cannot."""
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is missing; `make .venv-tritonclient-2.50/.ready` creates it")
    brought = [str(path.parent) for name in LIBRARIES for path in ENVIRONMENT.rglob(name)]
    path = [*brought, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environ = {**os.environ, "LD_LIBRARY_PATH": ":".join(path)}
    started = subprocess.run([PROGRAM, "--version"], env=environ, capture_output=True, text=True, timeout=60)
    if started.returncode == 127 or "error while loading shared libraries" in started.stderr:
        pytest.skip(f"perf_analyzer does not start here: {started.stderr.strip()} (CONTRIBUTING.md says what it needs)")
    return environ


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    pair = ((N, 16), np.float32)
    write_model(repo / "pair", lambda a, b: (a + b, a - b), {"a": pair, "b": pair}, {"sum": pair, "difference": pair})
    with ServerProcess(repo, env={"RSRV_WORKER_METRICS_TRITON_COMPAT": "1"}) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def run(server, environ, *arguments):
    """With four requests at a time; whether its measurement settles is not our concern."""
    command = [PROGRAM, "-m", "pair", "-u", server.url, "-i", "grpc", "--concurrency-range", CONCURRENCY, *arguments]
    command += ["--measurement-mode", "count_windows", "--measurement-request-count", "50", "-s", "999", "-r", "3"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150)


def report_of(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nable to" not in done.stderr
    return {name: float(value) for name, value in re.findall(r"^ *([A-Z][\w ]+): ([\d.]+)", done.stdout, re.MULTILINE)}


def write(directory, inputs, outputs):
    """The file that tells it what to send and what to expect."""
    path = directory / "data.json"
    path.write_text(json.dumps({"data": [inputs], "validation_data": [outputs]}))
    return str(path)


def test_it_completes_inline_and_the_outputs_are_what_it_was_told_to_expect(server, environ, tmp_path):
    a, b = np.arange(16.0), np.arange(16.0) * 3
    expected = {"sum": (a + b).tolist(), "difference": (a - b).tolist()}
    data = write(tmp_path, {"a": a.tolist(), "b": b.tolist()}, expected)
    report = report_of(run(server, environ, "--input-data", data))
    assert report["Throughput"] > 0
    # The server's count is the difference of two readings: of each of the four slots, one request may fall beside it.
    assert report["Successful request count"] >= report["Request count"] - int(CONCURRENCY)
    assert report["Inference count"] >= report["Execution count"] > 0


def test_it_notices_outputs_that_it_was_not_told_to_expect(server, environ, tmp_path):
    zeros, ones = [0.0] * 16, [1.0] * 16
    data = write(tmp_path, {"a": zeros, "b": zeros}, {"sum": ones, "difference": zeros})
    done = run(server, environ, "--input-data", data)
    assert done.returncode != 0
    assert "Output doesn't match expected output" in done.stderr


def test_it_completes_over_system_shared_memory_and_takes_its_regions_away(server, environ):
    before = set(os.listdir("/dev/shm"))
    done = run(server, environ, "--shared-memory", "system", "--output-shared-memory-size", "1024")
    report = report_of(done)
    assert report["Throughput"] > 0
    assert server.metric("rsrv_worker_shm_regions") == 0
    # Our own tests, which may run meanwhile, begin the names of their regions so.
    new = [name for name in set(os.listdir("/dev/shm")) - before if not name.startswith(("rsrv", "test-"))]
    assert not new


def test_a_batch_of_rows_in_each_request_completes_too(server, environ):
    report = report_of(run(server, environ, "-b", "3"))
    assert report["Batch size"] == 3
    assert report["Inference count"] >= 3 * report["Execution count"]
    assert server.metric("rsrv_worker_requests_total", status="OK") > 0
