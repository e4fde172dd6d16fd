"""tritonclient 2.50.0, the oldest release that we promise to answer, from an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.bundles import N, write_model
from support.server import ServerProcess

PYTHON = Path(__file__).parents[2] / ".venv-tritonclient-2.50" / "bin" / "python"
CALLS = Path(__file__).with_name("tritonclient_250_calls.py")


def test_tritonclient_2_50_gets_bit_exact_answers_inline_shared_and_mixed(tmp_path):
    if not PYTHON.exists():
        if os.environ.get("RSRV_REQUIRE_CONTRACT_ENVS"):
            pytest.fail(f"{PYTHON} is missing; `make test` creates it")
        pytest.skip(f"{PYTHON} is missing; `make .venv-tritonclient-2.50/.ready` creates it")
    pair = ((N, 16), np.float32)
    repo = tmp_path / "repo"
    write_model(repo / "pair", lambda a, b: (a + b, a - b), {"a": pair, "b": pair}, {"sum": pair, "difference": pair})
    with ServerProcess(repo) as server:
        server.wait_ready()
        done = subprocess.run([PYTHON, CALLS, server.url], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "version": "2.50.0",
            "ready": True,
            "inline": True,
            "shared": True,
            "mixed": True,
            "config_max_batch": 8,
            "metadata": ["a", "b"],
        }
        assert server.stop() == 0
