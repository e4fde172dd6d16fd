"""``rsrv export torch``: the command line over `export_bundle("torch")`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from rsrv.bundle import open_bundle, read_header
from rsrv.cli.main import main

pytestmark = pytest.mark.torch

MODEL = """
import torch
from torch import nn

def bare():
    return nn.Linear(4, 3)

def pair():
    return nn.Linear(4, 3), torch.rand(1, 4)

def full():
    return {"module": nn.Linear(4, 3), "inputs": [torch.rand(1, 4)], "output_names": ["y"]}

def normalised():
    return nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(4)]), torch.rand(2, 4)

def wrong():
    return 3

def unknown():
    return {"module": nn.Linear(4, 3), "input": torch.rand(1, 4)}

def broken():
    raise ValueError("no checkpoint at /nowhere")
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "_rsrv_factory_torch_under_export", raising=False)
    (tmp_path / "torch_under_export.py").write_text(MODEL)
    return "torch_under_export.py"


def export(*args: str) -> int:
    return main(["export", "torch", *args])


def test_a_module_with_a_state_dict_becomes_a_bundle(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3)}
    torch.save(state, tmp_path / "state.pth")
    assert export(
        f"{model}:bare", "--weights", "state.pth", "--inputs", "input=f32[1,4]", "--out", "models/net",
        "--batch-sizes", "1,8", "--golden", "1", "--no-diff",
    ) == 0  # fmt: skip
    printed = capsys.readouterr()
    assert printed.out == "models/net\n"
    assert "input f32[n,4] → output f32[n,3]; batch sizes 1, 8; 2 weights, 60 bytes" in printed.err
    bundle = open_bundle(tmp_path / "models/net")
    assert read_header(bundle.path / "weights.safetensors").argument_order == ("weight", "bias")
    assert main(["bundle", "check", "--run", "models/net"]) == 0
    assert main(["bundle", "verify", "models/net", "--against", f"torch:{model}:bare"]) == 1  # other weights
    assert "is above 1e-05" in capsys.readouterr().out


def test_unused_weights_that_are_named_alike_are_summed_up(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(f"{model}:normalised", "--out", "net", "--no-batch", "--no-diff") == 0
    assert "weights that no output depends on were left out: 4 × num_batches_tracked\n" in capsys.readouterr().err


def test_a_dict_names_the_outputs(model: str, tmp_path: Path) -> None:
    assert export(f"{model}:full", "--out", "net", "--no-batch", "--no-diff") == 0
    (spec,) = open_bundle(tmp_path / "net").manifest.executable_outputs
    assert (spec.name, spec.describe()) == ("y", "f32[1,3]")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["{m}:bare", "--out", "net"], 2, "comes without example inputs"),
        (["{m}:pair", "--out", "net", "--inputs", "inptu=f32[1,4]"], 2, "names 'inptu'; the inputs are input"),
        (["{m}:pair", "--out", "net", "--int64", "wide"], 2, "--int64 wide is none of keep, narrow"),
        (["{m}:pair", "--out", "net", "--name", "other"], 2, "differs from the last part"),
        (["{m}:pair", "--out", "net", "--weights", "absent.pth"], 1, "absent.pth: no such file"),
        (["{m}:pair", "--out", "net", "--weights", "{m}"], 1, "torch_under_export.py is no state dict"),
        (["{m}:wrong", "--out", "net"], 1, "returned a int"),
        (["{m}:unknown", "--out", "net"], 1, "returned a dict with unknown keys input"),
        (["{m}:broken", "--out", "net"], 1, 'raise ValueError("no checkpoint at /nowhere")'),
        (["absent.pt2", "--out", "net"], 2, "absent.pt2: no such file"),
        (["bad.pt2", "--out", "net"], 1, "bad.pt2 is no program of torch.export"),
        (["bad.pt", "--out", "net"], 1, "bad.pt is no TorchScript module"),
        (["bad.pt", "--out", "net", "--weights", "bad.pt"], 2, "holds its own weights"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_wrong_command_line_or_file_is_explained(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, says: str
) -> None:
    for name in ("bad.pt2", "bad.pt"):
        (tmp_path / name).write_bytes(b"no model")
    assert export(*(arg.format(m=model) for arg in args)) == code
    printed = capsys.readouterr().err
    assert says in printed
    assert "site-packages" not in printed
    assert not (tmp_path / "net").exists()


def test_a_state_dict_that_does_not_fit_names_the_weights(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"weight": torch.ones(3, 5), "extra": torch.ones(1)}, tmp_path / "state.pth")
    assert export(f"{model}:pair", "--out", "net", "--weights", "state.pth") == 1
    printed = capsys.readouterr().err
    assert "state.pth does not fit the module" in printed
    assert all(word in printed for word in ("weight", "extra", "bias"))
