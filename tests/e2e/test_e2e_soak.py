"""The short form of ``make soak``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_under_random_hostile_and_dying_clients_answers_rightly_and_comes_to_rest(tmp_path):
    record_file = tmp_path / "soak.json"
    # With a small budget, where weights come and go beside all that happens without one.
    command = [sys.executable, "-m", "soak", "--seconds", "15", "--small-budget", "--json", str(record_file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    record = json.loads(record_file.read_text())
    assert record["passed"]
    assert record["requests"]["killed_clients"] > 0
