"""``rsrv inspect torchscript``: what is in a TorchScript model, and why it does not convert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rsrv.cli.main import main
from tests.support import torch_scripts as scripts

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]

CONFIG = """
name: "detector"
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, -1, 8 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def save(module: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.jit.save(torch.jit.script(module.eval()), path)
    return path


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    save(scripts.Detector(), tmp_path / "detector" / "1" / "model.pt")
    (tmp_path / "detector" / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "detector"


def inspect(*args: object) -> int:
    return main(["inspect", "torchscript", *map(str, args)])


def test_a_model_directory_is_taken_apart(detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(detector, "--size", "16", "--code-out", tmp_path / "net.py") == 1
    printed = capsys.readouterr()
    out = [" ".join(line.split()) for line in printed.out.splitlines()]
    order = [
        "detector",
        "inputs INPUT__0 TYPE_FP32[3,-1,8]",
        "max batch size 8",
        "forward takes image: Tensor",
        "backbone Backbone 112 -",
        "head.score Linear 10 -",
        "operators",
        "returns for zeros",
    ]
    assert [out.index(line) for line in order] == sorted(out.index(line) for line in order)
    assert "head Head 10 aten::index ×1" in out
    assert any(line.startswith("aten::index 1 ! ") and "boxes[boxes[:, 0] > 0]" in line for line in out)
    assert out[-1].startswith("float32[")
    assert "torch.export does not take it: aten.index.Tensor at" in printed.err
    assert "hint: use torch.where" in printed.err
    assert "to be exported alone: backbone" in printed.err
    assert f"source written to {tmp_path / 'net.py'}" in printed.err
    source = (tmp_path / "net.py").read_text()
    assert "# the module itself (Detector)" in source
    assert "# head.score (Linear)" in source


def test_a_file_that_converts_is_said_to_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(scripts.Cnn(), tmp_path / "net.pt")
    assert inspect(path, "--inputs", "x=f32[2,1,8,8]", "--json", "--code-out", tmp_path / "net.py") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["inputs"] == [{"name": "x", "dtype": "f32", "shape": [2, 1, 8, 8]}]
    assert report["max_batch_size"] is None
    assert report["forward"] == ["float32[2,3]"]
    assert report["probe"]["converts"] is True
    assert {"aten.conv2d", "aten.linear"} <= {one["operator"] for one in report["probe"]["operators"]}
    counts = [one["count"] for one in report["census"]]
    assert counts == sorted(counts, reverse=True)


def test_a_branch_on_data_shows_the_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(scripts.Branch(), tmp_path / "net.pt")
    assert inspect(path, "--input", "x=f32[1,3]", "--code-out", tmp_path / "net.py", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["probe"]["message"].startswith("prim::If at ")
    assert "torch.where" in report["probe"]["hint"]
    assert any("Could not guard on data-dependent expression" in line for line in report["probe"]["guards"])
    (branch,) = [one for one in report["census"] if one["operator"] == "prim::If"]
    assert branch["attention"]
    assert "if bool(x.sum() > 0):" in branch["place"]


def test_without_export_a_file_needs_no_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(scripts.Loop(), tmp_path / "net.pt")
    assert inspect(path, "--no-export", "--code-out", tmp_path / "net.py") == 0
    printed = capsys.readouterr()
    assert "prim::Loop" in printed.out
    assert "does not say what it takes (give --inputs" in printed.err
    assert inspect(path, "--code-out", tmp_path / "net.py") == 1


def test_a_call_that_fails_is_told_with_the_rest(detector: Path, tmp_path: Path, capsys: Any) -> None:
    assert inspect(detector, "--inputs", "INPUT__0=f32[1,4,8,8]", "--code-out", tmp_path / "net.py") == 1
    printed = capsys.readouterr()
    assert "a call on zeros failed: " in printed.err
    assert "expected input[1, 4, 8, 8] to have 3 channels" in printed.err
    assert "aten::conv2d" in printed.out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["absent.pt"], 2, "absent.pt: no such file or directory"),
        (["empty"], 1, "config.pbtxt"),
        (["bad.pt"], 1, "bad.pt is no TorchScript module"),
        (["net.pt2"], 2, "is a program of torch.export"),
        (["net.pt", "--inputs", "x=f32[1"], 2, "is not NAME=DTYPE[SIZES]"),
        (["net.pt", "--size", "0"], 2, "--size"),
    ],
)
def test_a_wrong_command_line_is_explained(
    args: list[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("bad.pt", "net.pt", "net.pt2"):
        (tmp_path / name).write_bytes(b"no model")
    assert inspect(*args) == code
    assert says in capsys.readouterr().err


def test_inputs_that_the_configuration_does_not_have_are_refused(detector: Path, tmp_path: Path, capsys: Any) -> None:
    assert inspect(detector, "--inputs", "image=f32[1,3,8,8]", "--code-out", tmp_path / "net.py") == 1
    assert "--inputs names 'image'; the inputs are INPUT__0" in capsys.readouterr().err


def test_the_inspector_loads_no_compiler(detector: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from rsrv.cli.main import main\n"
        "main(['inspect', 'torchscript', sys.argv[1], '--size', '16', '--code-out', sys.argv[2]])\n"
        "print([name for name in ('jax', 'jaxlib', 'torchax') if name in sys.modules])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(detector), str(tmp_path / "net.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_an_example_that_memory_cannot_hold_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save(scripts.Detector(), tmp_path / "net.pt")
    assert inspect(file, "--inputs", "image=f32[1000000,1000000,1000]", "--code-out", tmp_path / "net.py") == 1
    printed = capsys.readouterr().err
    assert "an example of shape [1000000, 1000000, 1000] for input 'image' cannot be made" in printed
    assert "unexpected" not in printed


def test_a_place_for_the_source_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain").touch()
    assert inspect(tmp_path / "net.pt", "--code-out", tmp_path / "plain" / "net.py") == 2
    assert "--code-out" in capsys.readouterr().err
