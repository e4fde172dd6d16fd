from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rsrv.bundle import open_bundle
from rsrv.cli.main import main

MODEL = """
import numpy as np

W = np.ones((4, 3), np.float32)

def linear(params, x):
    return x @ params["w"]

def named():
    return {"fn": linear, "params": {"w": W, "off": W}, "inputs": {"x": np.zeros((1, 4), np.float32)},
            "output_names": ["y"]}

def plain():
    return linear, {"w": W}, [np.zeros((1, 4), np.float32)]

def two():
    return {"fn": lambda p, x, extra: x @ p["w"], "params": {"w": W},
            "inputs": [np.zeros((1, 4), np.float32), np.zeros(1, np.int32)], "input_names": ["x", "extra"]}

def broken():
    raise ValueError("no checkpoint at /nowhere")

def broken_fn():
    return lambda p, x: x @ p["w"].T, {"w": W}, [np.zeros((1, 4), np.float32)]
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name in ("model_under_export", "_rsrv_factory_model_under_export"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "model_under_export.py").write_text(MODEL)
    return "model_under_export.py"


def export(*args: str) -> int:
    return main(["export", "jax", *args])


def test_a_model_becomes_a_bundle_and_its_path_is_printed(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(f"{model}:named", "--out", "models/net", "--batch-sizes", "1,8", "--no-diff") == 0
    printed = capsys.readouterr()
    assert printed.out == "models/net\n"
    assert "x f32[n,4] → y f32[n,3]; batch sizes 1, 8; 1 weights, 48 bytes" in printed.err
    assert "weights that no output depends on were left out: off" in printed.err
    assert open_bundle(tmp_path / "models/net").manifest.batching.compiled_batch_sizes == (1, 8)


def test_a_module_works_like_a_file_and_json_describes_the_bundle(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export("model_under_export:plain", "--out", "net", "--no-batch", "--json") == 0
    described = json.loads(capsys.readouterr().out)
    assert described["name"] == "net"
    assert described["batch_sizes"] == []
    assert [tensor["text"] for tensor in described["executable_inputs"]] == ["f32[1,4]"]
    assert described["provenance"]["source_framework"] == "jax"


def test_inputs_on_the_command_line_replace_the_examples(model: str, tmp_path: Path) -> None:
    assert export(f"{model}:plain", "--out", "a", "--inputs", "image=f64[1,5,4]", "--x64") == 0
    (spec,) = open_bundle(tmp_path / "a").manifest.executable_inputs
    assert (spec.name, spec.describe()) == ("image", "f64[n,5,4]")
    assert export(f"{model}:named", "--out", "b", "--inputs", "x=f64[1,4]", "--x64") == 0
    (spec,) = open_bundle(tmp_path / "b").manifest.executable_inputs
    assert (spec.name, spec.describe()) == ("x", "f64[n,4]")
    assert export(f"{model}:two", "--out", "c", "--inputs", "extra=i64[1]", "--drop-unused-inputs", "--x64") == 0
    assert [spec.name for spec in open_bundle(tmp_path / "c").manifest.executable_inputs] == ["x"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["{m}:plain", "--out", "net", "--name", "other"], "--name other differs from the last part of --out net"),
        (["{m}:plain", "--out", "net", "--batch-sizes", "1,x"], "'x' is not a positive integer"),
        (["{m}:plain", "--out", "net", "--batch-sizes", "0"], "'0' is not a positive integer"),
        (["{m}:plain", "--out", "net", "--batch-sizes", "4,4"], "repeats a size"),
        (["{m}:plain", "--out", "net", "--batch-sizes", "4", "--no-batch"], "exclude each other"),
        (["{m}:plain", "--out", "net", "--matmul-precision", "tf32"], "none of default, high, highest"),
        (["{m}:plain", "--out", "net", "--inputs", "x=f33[1]"], "'f33' is not a dtype"),
        (["{m}:plain", "--out", "net", "--inputs", "x=f32[1]", "--inputs", "y=f32[1]"], "gives 2 examples"),
        (["{m}:named", "--out", "net", "--inputs", "X=f32[1]"], "names 'X'; the inputs are x"),
        (["{m}:plan", "--out", "net"], "has no attribute 'plan'"),
        (["{m}", "--out", "net"], "is not MODULE:FN"),
        (["absent.py:make", "--out", "net"], "absent.py: no such file"),
        (["{m}:plain"], "Missing option '--out'"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    assert export(*(arg.format(m=model) for arg in args)) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "net").exists()


def test_a_name_that_agrees_with_the_directory_is_fine(model: str) -> None:
    assert export(f"{model}:plain", "--out", "models/net/", "--name", "net") == 0


def test_an_existing_bundle_needs_overwrite(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(f"{model}:plain", "--out", "net") == 0
    assert export(f"{model}:plain", "--out", "net") == 1
    assert "--overwrite" in capsys.readouterr().err
    assert export(f"{model}:plain", "--out", "net", "--overwrite") == 0


@pytest.mark.parametrize(
    ("attribute", "says", "line"),
    [
        ("broken", "ValueError: no checkpoint at /nowhere", 'raise ValueError("no checkpoint at /nowhere")'),
        ("broken_fn", "tracing the function at batch size 1 raised TypeError", 'lambda p, x: x @ p["w"].T'),
    ],
)
def test_the_users_own_errors_show_the_users_own_lines(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], attribute: str, says: str, line: str
) -> None:
    assert export(f"{model}:{attribute}", "--out", "net") == 1
    printed = capsys.readouterr().err
    assert says in printed
    assert line in printed
    assert str(tmp_path / "model_under_export.py") in printed
    assert "site-packages" not in printed
    assert not (tmp_path / "net").exists()


def test_an_unused_input_is_named_with_what_to_do(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(f"{model}:two", "--out", "net") == 1
    printed = capsys.readouterr().err
    assert "no output depends on the input 'extra'" in printed
    assert "drop_unused_inputs" in printed
