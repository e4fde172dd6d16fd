"""``rsrv demo`` from start to end, and what is left of it when somebody interrupts it."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def start_demo(scratch, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "rsrv", "demo", *arguments],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_that_mention(text):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if text.encode() in file.read():
                    found.append(int(pid))
        except OSError:  # it ended meanwhile
            pass
    return found


def test_the_demo_exports_checks_serves_compares_and_cleans_up(tmp_path):
    scratch, kept = tmp_path / "scratch", tmp_path / "kept"
    scratch.mkdir()
    with start_demo(scratch, "--json", "--keep", str(kept)) as demo:
        out, err = demo.communicate(timeout=150)
    assert demo.returncode == 0, err
    steps = {step["step"]: step["result"] for step in json.loads(out)}
    assert list(steps) == [
        "export",
        "check",
        "serve",
        "1 image inline",
        "1 image in shared memory",
        "8 images inline",
        "8 images in shared memory",
        "128 requests from 16 threads",
        "stop",
    ]
    assert "0 findings" in steps["check"]
    assert steps["8 images inline"] == steps["8 images in shared memory"]
    assert "8 of 8 right, bit-equal to JAX" in steps["8 images inline"]
    assert "128 of 128 right" in steps["128 requests from 16 threads"]
    assert steps["stop"] == "exit code 0"
    assert os.listdir(scratch) == []
    assert processes_that_mention(str(scratch)) == []
    assert sorted(os.listdir(kept / "models" / "digits")) == [
        "manifest.yaml",
        "model.b1.mlir",
        "model.b8.mlir",
        "weights.safetensors",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_demo_stops_its_server_and_removes_its_files(tmp_path, number, code):
    with start_demo(tmp_path) as demo:
        try:
            assert demo.stderr is not None
            for line in demo.stderr:
                if line.startswith("1 image"):
                    break
            assert len(processes_that_mention(str(tmp_path))) >= 1
            demo.send_signal(number)
            demo.communicate(timeout=60)
        finally:
            demo.kill()
    assert demo.returncode == code
    assert os.listdir(tmp_path) == []
    assert processes_that_mention(str(tmp_path)) == []
