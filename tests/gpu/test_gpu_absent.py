"""Where there is no card, `make test-gpu` fails nothing and says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.card import BACKEND

from rsrv.runtime.backends import cuda_plugin_installed


@pytest.mark.skipif(BACKEND == "cuda" or cuda_plugin_installed(), reason="there may be a card")
def test_without_a_card_all_is_skipped_with_the_reason():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("test_gpu_numerics.py")),
    ]
    answer = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RSRV_TEST_BACKEND": "cuda"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert answer.returncode == 0, answer.stdout
    assert "no CUDA device: runtime.backend is cuda, but no CUDA plugin is installed" in answer.stdout
    assert "passed" not in answer.stdout
