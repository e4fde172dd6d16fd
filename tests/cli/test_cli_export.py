from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rsrv.bundle import open_bundle, read_header
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


def test_what_the_model_prints_stays_out_of_the_result(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / model, "a") as file:
        file.write("\nprint('imported')\ndef chatty():\n    print('called')\n    return plain()\n")
    assert export(f"{model}:chatty", "--out", "net", "--no-diff", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["name"] == "net"
    assert "imported" in printed.err
    assert "called" in printed.err


def test_a_factory_that_exits_with_success_has_not_exported_anything(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / model, "a") as file:
        file.write("\nimport sys\ndef quits():\n    sys.exit(0)\n")
    assert export(f"{model}:quits", "--out", "net") == 1
    assert "raised SystemExit" in capsys.readouterr().err


def test_the_64_bit_mode_is_also_that_of_the_factory(model: str, tmp_path: Path) -> None:
    with open(tmp_path / model, "a") as file:
        file.write(
            "\ndef wide():\n    import jax.numpy as jnp\n"
            "    return linear, {'w': jnp.ones((4, 3), jnp.float64)}, {'x': np.zeros((1, 4), np.float64)}\n"
        )
    assert export(f"{model}:wide", "--out", "net", "--x64", "--no-diff") == 0
    manifest = open_bundle(tmp_path / "net").manifest
    assert manifest.executable_outputs[0].dtype.value == "f64"
    assert manifest.provenance["x64"] is True
    header = read_header(tmp_path / "net" / "weights.safetensors")
    assert header.tensors["w"].dtype.value == "f64"


def test_a_warning_of_the_export_reads_like_a_warning_of_the_command(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / model, "a") as file:
        file.write("\ndef sums():\n    return lambda p, x: x.sum(), {}, {'x': np.zeros((1, 4), np.float32)}\n")
    with logging_without_handlers():
        assert export(f"{model}:sums", "--out", "net", "--no-diff") == 0
    assert "warning: output does not follow the batch size" in capsys.readouterr().err


@contextmanager
def logging_without_handlers() -> Iterator[None]:
    """As in a process of its own: pytest adds handlers that collect records."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--platform", "tpu"], "--platform tpu is none of cpu, cuda"),
        (["--batch-sizes", "99999999999999999999"], "is not an integer from 1 to"),
    ],
)
def test_a_value_that_no_program_can_have_is_refused(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert export(f"{model}:plain", "--out", "net", *arguments) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_relative_module_is_a_usage_error(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(".model:plain", "--out", "net") == 2
    assert "named from the top" in capsys.readouterr().err


def test_a_full_disk_names_the_bundle_and_leaves_nothing(model: str, tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text(
        "import numpy as np\n"
        "def make(): return lambda p, x: x @ p['w'], {'w': np.ones((4, 50_000), np.float32)}, "
        "{'x': np.ones((1, 4), np.float32)}\n"
    )
    code = (
        "import resource, sys; from rsrv.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)); "
        "sys.exit(main(['export', 'jax', 'big.py:make', '--out', 'models/net', '--no-diff']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert f"{tmp_path / 'models' / 'net'} cannot be written: File too large" in ended.stderr
    assert list((tmp_path / "models").iterdir()) == []
