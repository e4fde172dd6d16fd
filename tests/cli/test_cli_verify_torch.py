"""``rsrv bundle verify --against torch:SPEC``: eager PyTorch as the original, in a process that has not loaded it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

MODEL = """
import torch

SCALE = 1.0

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, ids):
        return SCALE * self.head(self.table(ids).mean(1))

def make():
    return Net(), (torch.zeros(1, 7, dtype=torch.int64),)
"""


def rsrv(*arguments: str, cwd: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "rsrv", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_pytorch_bundle_is_checked_and_compared_with_its_module(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "twin.py").write_text(MODEL.replace("SCALE = 1.0", "SCALE = 1.001"))
    export = ("export", "torch", "model.py:make", "--out", "net", "--batch-sizes", "1,3", "--golden", "2")
    assert rsrv(*export, cwd=tmp_path)[0] == 0
    code, text = rsrv("bundle", "check", "net", "--run", "--strict", cwd=tmp_path)
    assert code == 0, text
    # The ids stay within the table, whose size the export has stated.
    code, text = rsrv("bundle", "verify", "net", "--against", "torch:model.py:make", "--count", "3", cwd=tmp_path)
    assert code == 0, text
    assert "6 of 6 samples passed, 2 programs" in text
    code, text = rsrv("bundle", "verify", "net", "--against", "torch:twin.py:make", "--batch", "3", cwd=tmp_path)
    assert code == 1, text
    assert "mismatch" in text
