"""``rsrv bundle verify --against torch:SPEC``: eager PyTorch as the original, in a process that has not loaded it."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.bundles import N, write_model

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


SOURCE = """
import sys, torch

class Pair(torch.nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, a, b):
        return a * self.scale + b, a - b

for index, scale in ((1, 2.0), (2, 5.0)):
    torch.jit.script(Pair(scale)).save(f"triton{index}/pair/1/model.pt")
"""


def test_bundles_are_compared_with_the_models_of_a_triton_repository(tmp_path: Path) -> None:
    for index in (1, 2):
        (tmp_path / f"triton{index}" / "pair" / "1").mkdir(parents=True)
    (tmp_path / "save.py").write_text(SOURCE)
    subprocess.run([sys.executable, "save.py"], cwd=tmp_path, check=True, timeout=150)
    # Triton's names say positions, whatever order they are listed in.
    tensors = {"INPUT__1": ((N, 3), np.float32), "INPUT__0": ((N, 3), np.float32)}
    outputs = {"OUTPUT__0": ((N, 3), np.float32), "OUTPUT__1": ((N, 3), np.float32)}
    for name, scale in (("pair", 2), ("pair__dynamic", 5), ("other", 1)):
        function = functools.partial(lambda b, a, scale: (a * scale + b, a - b), scale=scale)
        write_model(tmp_path / "models" / name, function, tensors, outputs, batch_sizes=(1, 4))
    sources = ("--sources", "triton1", "--sources", "triton2")
    verify = ("bundle", "verify", "--repo", "models", *sources, "--results", "r.tsv", "--report", "r.md")
    code, text = rsrv(*verify, "--exclude", "other", cwd=tmp_path)
    assert code == 0, text
    assert "models/pair__dynamic: ok against sources (2 of 2 samples passed, 2 programs)" in text
    code, text = rsrv(*verify, cwd=tmp_path)
    assert code == 1, text
    assert "models/pair: skipped, r.tsv has 'pair' already" in text
    assert "there is no model 'other' in triton1, triton2" in text
    assert "2 of 3 models passed" in (tmp_path / "r.md").read_text()
    code, text = rsrv("bundle", "verify", "models/pair__dynamic", "--sources", "triton1", cwd=tmp_path)
    assert code == 1, text
    code, text = rsrv("bundle", "verify", "models/pair", "--sources", "triton2", cwd=tmp_path)
    assert code == 1, text
    assert "mismatch" in text
    code, text = rsrv("bundle", "verify", "models/pair", "--sources", "triton1", "--device", "cuda", cwd=tmp_path)
    assert (code, "PyTorch finds no CUDA device here" in text) == (2, True) or torch_has_cuda()


def torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
