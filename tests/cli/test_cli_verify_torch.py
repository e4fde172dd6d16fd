"""``rsrv bundle verify --against torch:SPEC``: eager PyTorch as the original.

One command of each kind runs in a process that has not loaded it; the others, which would take seconds each, in ours.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.bundles import N, write_model

from rsrv.cli.main import main

pytestmark = pytest.mark.torch

Command = Callable[..., tuple[int, str]]

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


def fresh(*arguments: str) -> tuple[int, str]:
    """``rsrv`` in a process of its own."""
    command = [sys.executable, "-m", "rsrv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def rsrv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``rsrv`` in this process, in the directory of the test."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = main(list(arguments))
        return code, "".join(capsys.readouterr())

    return run


def test_a_pytorch_bundle_is_checked_and_compared_with_its_module(tmp_path: Path, rsrv: Command) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "twin.py").write_text(MODEL.replace("SCALE = 1.0", "SCALE = 1.001"))
    export = ("export", "torch", "model.py:make", "--out", "net", "--batch-sizes", "1,3", "--golden", "2")
    assert rsrv(*export)[0] == 0
    code, text = rsrv("bundle", "check", "net", "--run", "--strict")
    assert code == 0, text
    # The ids stay within the table, whose size the export has stated.
    code, text = fresh("bundle", "verify", "net", "--against", "torch:model.py:make", "--count", "3")
    assert code == 0, text
    assert "6 of 6 samples passed, 2 programs" in text
    code, text = rsrv("bundle", "verify", "net", "--against", "torch:twin.py:make", "--batch", "3")
    assert code == 1, text
    assert "mismatch" in text


PAIR = """
import torch

class Pair(torch.nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, a, b):
        return a * self.scale + b, a - b
"""


def test_bundles_are_compared_with_the_models_of_a_triton_repository(
    tmp_path: Path, rsrv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    (tmp_path / "verify_torch_pair.py").write_text(PAIR)
    monkeypatch.syspath_prepend(tmp_path)
    pair = importlib.import_module("verify_torch_pair").Pair
    for index, scale in ((1, 2.0), (2, 5.0)):
        directory = tmp_path / f"triton{index}" / "pair" / "1"
        directory.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(pair(scale)).save(str(directory / "model.pt"))
    # Triton's names say positions, whatever order they are listed in.
    tensors = {"INPUT__1": ((N, 3), np.float32), "INPUT__0": ((N, 3), np.float32)}
    outputs = {"OUTPUT__0": ((N, 3), np.float32), "OUTPUT__1": ((N, 3), np.float32)}
    for name, scale in (("pair", 2), ("pair__dynamic", 5), ("other", 1)):
        function = functools.partial(lambda b, a, scale: (a * scale + b, a - b), scale=scale)
        write_model(tmp_path / "models" / name, function, tensors, outputs, batch_sizes=(1, 4))
    sources = ("--sources", "triton1", "--sources", "triton2")
    verify = ("bundle", "verify", "--repo", "models", *sources, "--results", "r.tsv", "--report", "r.md")
    code, text = fresh(*verify, "--exclude", "other")
    assert code == 0, text
    assert "models/pair__dynamic: ok against sources (2 of 2 samples passed, 2 programs)" in text
    code, text = rsrv(*verify)
    assert code == 1, text
    assert "models/pair: skipped, r.tsv has 'pair' already" in text
    assert "there is no model 'other' in triton1, triton2" in text
    assert "2 of 3 models passed" in (tmp_path / "r.md").read_text()
    code, text = rsrv("bundle", "verify", "models/pair__dynamic", "--sources", "triton1")
    assert code == 1, text
    code, text = rsrv("bundle", "verify", "models/pair", "--sources", "triton2")
    assert code == 1, text
    assert "mismatch" in text
    code, text = rsrv("bundle", "verify", "models/pair", "--sources", "triton1", "--device", "cuda")
    assert (code, "PyTorch finds no CUDA device here" in text) == (2, True) or torch_has_cuda()


def torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
