"""``rsrv export convert``: the command line over `convert_repository`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bundles import write_affine
from support.triton import config_pbtxt, write_convert_config, write_triton_model

from rsrv.cli.main import main

CONFIG = config_pbtxt([("INPUT__0", "TYPE_FP32", [4])], [("OUTPUT__0", "TYPE_FP32", [3])], 4)

COPY = """
import shutil
from pathlib import Path

def handler(ctx):
    print("from the handler")
    shutil.copytree(Path(ctx.options["made_dir"]) / ctx.bundle_name, ctx.out_dir)
    return [1]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "_rsrv_factory_convert_copy", raising=False)
    write_affine(tmp_path / "made/net", batch_sizes=(1,))
    (tmp_path / "convert_copy.py").write_text(COPY)
    return tmp_path


def config(here: Path, models: list[str], **keys: Any) -> None:
    handlers = [{"file": "convert_copy.py", "models": models, "options": {"made_dir": "made"}}]
    write_convert_config(here, **{"handlers": handlers, "source_dirs": None, **keys})


def convert(*args: str) -> int:
    return main(["export", "convert", "convert.yaml", *args])


def test_models_become_bundles_and_the_table_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(here, ["net"])
    assert convert("--no-isolate") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "bundle  outcome  batch sizes  remark",
        "net     success  1            -",
    ]
    assert "from the handler" in printed.err
    assert "[1/1] net: success (1)" in printed.err
    assert "1 success\nreport: " in printed.err
    assert (here / "report.md").read_text().startswith("# Conversion of a model repository")
    assert main(["bundle", "check", "out/net"]) == 0


def test_a_failure_is_told_and_ends_with_exit_code_1(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(here, ["net", "gone"])
    assert convert("--no-isolate", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["counts"]) == (False, {"success": 1, "partial": 0, "failed": 1, "skipped": 0})
    assert found["models"][1]["bundle"] == "gone"
    assert "FileNotFoundError" in found["models"][1]["reason"]
    assert json.loads((here / "report.json").read_text())["counts"] == found["counts"]


def test_only_with_force_makes_one_bundle_anew_without_a_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(here / "made/net", here / "out/net")
    config(here, ["net", "gone"])
    assert convert("--no-isolate", "--only", "net") == 0
    assert "net: success (was there)" in capsys.readouterr().err
    assert convert("--no-isolate", "--only", " net ,", "--force") == 0
    assert "net: success (1)" in capsys.readouterr().err
    assert not (here / "report.md").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--only", "nett"],
            "--only names 'nett', which is neither a model nor a bundle of the worklist\nhint: did you",
        ),
        (["--only", ","], "--only ',' names nothing"),
        (["--force"], "--force deletes bundles and needs --only"),
        (["--ladder", "double"], "--ladder double is none of halve, bisect"),
    ],
)
def test_wrong_usage_ends_with_exit_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    config(here, ["net"])
    assert convert(*args) == 2
    assert said in capsys.readouterr().err
    assert not (here / "out").exists()


def test_a_file_that_is_not_there_is_wrong_usage_and_one_that_does_not_hold_is_78(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 2
    assert "convert.yaml: there is no such file" in capsys.readouterr().err
    config(here, ["net"], output_rot="x")
    assert convert() == 78
    printed = capsys.readouterr().err
    assert f"error: {here / 'convert.yaml'}: unknown key output_rot" in printed
    assert "hint: did you mean output_root?" in printed


def test_a_dry_run_shows_the_worklist_changes_nothing_and_does_not_import_torch(here: Path) -> None:
    for source in ("one", "two"):
        write_triton_model(here / source, "plain", CONFIG)
        (here / source / "plain/1/model.pt").write_bytes(b"")
    write_triton_model(here / "one", "broken", "input [ {")
    write_triton_model(here / "one", "old", CONFIG)
    shutil.copytree(here / "made/net", here / "out/net")
    shutil.copytree(here / "made/net", here / "out/old")
    exclude = {"old": {"reason": "too old", "remove_existing": True}, "slip": {"reason": "x"}}
    config(here, ["net"], source_dirs=["one", "two"], exclude=exclude)
    code = """
import sys
from rsrv.cli.main import main
assert main(["export", "convert", "convert.yaml", "--dry-run"]) == 0
heavy = {"torch", "jax", "torchax"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines()]
    assert [row[:4] for row in rows] == [
        ["bundle", "model", "by", "state"],
        ["broken", "broken", "generic", "absent"],
        ["old", "old", "excluded", "present"],
        ["plain", "plain", "generic", "absent"],
        ["plain__dynamic", "plain", "generic", "absent"],
        ["net", "net", "handler", "present"],
    ]
    assert rows[1][4].startswith("will fail: ")
    assert rows[2][4] == "too old; an existing bundle is removed"
    assert rows[3][4] == "batch sizes 1, 2, 4"
    assert rows[5][4].endswith("convert_copy.py")
    assert "exclude names 'slip', which is no model" in done.stderr
    assert sorted(path.name for path in (here / "out").iterdir()) == ["net", "old"]
    assert not (here / "report.md").exists()


def test_without_torch_nothing_is_begun(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    write_triton_model(here / "source", "plain", CONFIG)
    config(here, ["net"], source_dirs=["source"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert convert() == 1
    assert "pip install 'rsrv[torch]'" in capsys.readouterr().err
    assert not (here / "out").exists()


@pytest.mark.torch
@pytest.mark.slow
def test_a_torchscript_model_is_converted_in_a_process_of_its_own(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.script(torch.nn.Linear(4, 3).eval())
        write_triton_model(here / "source", "plain", CONFIG, module)
    write_convert_config(here)
    assert convert() == 0
    assert "plain   success  1, 2, 4      -" in capsys.readouterr().out
    assert sorted(path.name for path in (here / "out").iterdir()) == ["plain"]
