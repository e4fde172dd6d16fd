"""Handlers make bundles in their own way; whatever else they do, nothing unfinished is left."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.bundles import write_affine
from support.triton import config_pbtxt, write_convert_config, write_triton_model

from rsrv.bundle import open_bundle
from rsrv.core.errors import ConfigError, ExportError, UsageError
from rsrv.export.repository import ConversionReport, TritonTensor, convert_repository, load_convert_config
from rsrv.export.repository.handlers import example_input
from rsrv.export.repository.staging import staging_area

HANDLERS = {
    "copy": """
import shutil
from pathlib import Path

def handler(ctx):
    shutil.copytree(Path(ctx.options["made_dir"]) / ctx.bundle_name, ctx.out_dir)
    return [4, 1]
""",
    "leaving": """
import os, signal, tempfile

def handler(ctx):
    (ctx.out_dir.parents[3] / "where").write_text(tempfile.mkdtemp())
    os.kill(os.getpid(), signal.SIGKILL)
""",
    "full": """
def handler(ctx):
    raise OSError(f"{ctx.out_dir} cannot be written")
""",
    "warned": """
import logging, shutil
from pathlib import Path

def handler(ctx):
    logging.getLogger("rsrv.audit.golden").warning("half of it is made up")
    logging.getLogger("rsrv.bundle.provenance").warning("no commit")
    shutil.copytree(Path(ctx.options["made_dir"]) / ctx.bundle_name, ctx.out_dir)
    return [4, 1]
""",
    "several": """
import shutil
from pathlib import Path

def handler(ctx):
    for name in (ctx.bundle_name, ctx.options["also"]):
        shutil.copytree(Path(ctx.options["made_dir"]) / name, ctx.out_dir.parent / name)
    (ctx.out_dir.parent / "scratch").mkdir()
    return [1, 4]
""",
    "raising": """
import json

def handler(ctx):
    ctx.out_dir.mkdir()
    (ctx.out_dir / "manifest.yaml").write_text("half")
    raise ValueError(f"no weights for {ctx.model}")
""",
    "wrong": """
def handler(ctx):
    return "1,8"
""",
    "nothing": """
def handler(ctx):
    return [1]
""",
    "lying": """
import shutil
from pathlib import Path

def handler(ctx):
    shutil.copytree(Path(ctx.options["made_dir"]) / ctx.bundle_name, ctx.out_dir)
    return [1, 8]
""",
    "absent": """
def handle(ctx):
    return [1]
""",
    "killed": """
import os, signal

def handler(ctx):
    ctx.out_dir.mkdir()
    (ctx.out_dir / "manifest.yaml").write_text("half")
    print("about to go", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""",
    "sleeping": """
import time

def handler(ctx):
    time.sleep(600)
""",
    "telling": """
import json
from pathlib import Path

def handler(ctx):
    facts = {
        "source": str(ctx.source), "model": ctx.model, "bundle": ctx.bundle_name, "out": str(ctx.out_dir),
        "text": ctx.config_text, "inputs": [[t.name, t.data_type, list(t.dims)] for t in ctx.inputs],
        "outputs": [t.name for t in ctx.outputs], "ladder": list(ctx.ladder), "options": dict(ctx.options),
        "utils": [ctx.utils.batch_ladder(6), ctx.utils.parse_max_batch_size("max_batch_size: 3"),
                  [list(ctx.utils.example_input(t, 2).shape) for t in ctx.inputs],
                  ctx.utils.short_error(ValueError("x"))],
    }
    Path(ctx.options["told_path"]).write_text(json.dumps(facts))
    raise RuntimeError("told")
""",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in HANDLERS.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"_rsrv_factory_{name}", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    for name in ("net", "net_stage1", "twin"):
        write_affine(directory / name, batch_sizes=(1, 4))
    return directory


def run(here: Path, handlers: dict[str, list[str]], *, isolate: bool = False, **keys: Any) -> ConversionReport:
    options = keys.pop("options", {})
    entries = [{"file": f"{name}.py", "models": models, "options": options} for name, models in handlers.items()]
    keys = {"source_dirs": None, **keys}
    return convert_repository(
        load_convert_config(write_convert_config(here, handlers=entries, **keys)), isolate=isolate
    )


def left(here: Path) -> list[str]:
    return sorted(path.name for path in (here / "out").iterdir())


def test_a_bundle_that_a_handler_made_is_moved_to_its_place(here: Path, made: Path) -> None:
    report = run(here, {"copy": ["net"]}, options={"made_dir": str(made)})
    (result,) = report.results
    assert (result.outcome, result.batch_sizes, result.disposition) == ("success", (4, 1), "handler")
    assert open_bundle(here / "out/net").manifest.batching.compiled_batch_sizes == (1, 4)
    assert left(here) == ["net"]
    again = run(here, {"raising": ["net"]})
    assert again.results[0].was_there  # and the handler was not called
    assert json.loads((here / "report.json").read_text())["models"][0]["batch_sizes"] == [1, 4]


def test_a_handler_may_write_several_bundles(here: Path, made: Path) -> None:
    report = run(here, {"several": ["net"]}, options={"made_dir": str(made), "also": "net_stage1"})
    assert report.results[0].note == "also wrote net_stage1"
    assert left(here) == ["net", "net_stage1"]


def test_a_bundle_of_another_model_is_not_a_handlers_to_write(here: Path, made: Path) -> None:
    options = {"made_dir": str(made), "also": "twin"}
    report = run(here, {"several": ["net"], "nothing": ["twin"]}, options=options)
    assert report.results[0].reason == "the handler also wrote 'twin', which is a model of the worklist itself"
    assert left(here) == []


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        ("raising", "the handler raising.py raised ValueError: no weights for net"),
        ("wrong", "returned '1,8', want a list of the batch sizes"),
        ("nothing", "returned [1] and wrote no bundle 'net' (export to ctx.out_dir)"),
        ("lying", "returned [1, 8], but the bundle has programs for [1, 4]"),
        ("absent", "has no attribute 'handler' (did you mean 'handle'?)"),
    ],
)
def test_what_a_handler_does_wrong_is_in_the_report_and_nothing_is_left(
    here: Path, made: Path, handler: str, said: str
) -> None:
    report = run(here, {handler: ["net"]}, options={"made_dir": str(made)})
    assert report.results[0].outcome == "failed"
    assert said in report.results[0].reason
    assert left(here) == []
    assert said.partition(" (")[0] in json.loads((here / "report.json").read_text())["models"][0]["reason"]


def test_a_handler_that_dies_or_hangs_leaves_no_half_bundle_and_the_run_goes_on(here: Path, made: Path) -> None:
    report = run(
        here, {"killed": ["gone"], "sleeping": ["slow"], "copy": ["net"]}, isolate=True,
        options={"made_dir": str(made)}, timeout_seconds=20,
    )  # fmt: skip
    gone, slow, net = report.results
    assert (gone.outcome, slow.outcome, net.outcome) == ("failed", "failed", "success")
    assert "the conversion ended its process: it was ended by SIGKILL" in gone.reason
    assert "its last output: about to go" in gone.reason
    assert "took longer than 20 s (timeout_seconds) and was ended" in slow.reason
    assert left(here) == ["net"]


def test_the_context_holds_what_the_configuration_of_the_model_says(here: Path) -> None:
    config = config_pbtxt([("x", "TYPE_FP32", [-1, 3]), ("s", "TYPE_INT64", [2])], [("y", "TYPE_STRING", [1])], 6)
    write_triton_model(here / "source", "net", config)
    run(here, {"telling": ["net", "free"]}, source_dirs=["source"], options={"told_path": "told.json", "k": [1]})
    free = json.loads((here / "told.json").read_text())
    assert (free["source"], free["text"], free["inputs"], free["ladder"]) == ("None", "", [], [1])
    run(here, {"telling": ["net"]}, source_dirs=["source"], options={"told_path": "told.json"})
    told = json.loads((here / "told.json").read_text())
    assert (told["source"], told["model"], told["bundle"]) == (str(here / "source/net"), "net", "net")
    assert Path(told["out"]).name == "net"
    assert Path(told["out"]).is_relative_to(here / "out")
    assert told["text"] == config
    assert told["inputs"] == [["x", "TYPE_FP32", [-1, 3]], ["s", "TYPE_INT64", [2]]]
    assert (told["outputs"], told["ladder"]) == (["y"], [1, 3, 6])
    assert told["options"] == {"told_path": str(here / "told.json")}
    assert told["utils"] == [[1, 3, 6], 3, [[2, 512, 3], [2, 2]], "ValueError: x"]


def test_examples_are_arrays_of_the_declared_type() -> None:
    found = example_input(TritonTensor("x", "TYPE_FP32", (2, 2)), None)
    assert (found.dtype, found.tolist()) == (np.float32, [[0.0, np.float32(1 / 3)], [np.float32(2 / 3), 1.0]])
    assert example_input(TritonTensor("x", "TYPE_UINT8", (3,)), 2).tolist() == [[0, 0, 0], [0, 0, 0]]
    with pytest.raises(ExportError, match="'x' is TYPE_STRING, which has no example"):
        example_input(TritonTensor("x", "TYPE_STRING", (3,)))


def test_what_an_earlier_run_left_when_it_was_killed_is_removed(here: Path, made: Path) -> None:
    stale = here / "out/.rsrv-convert.abc.partial/net"
    stale.mkdir(parents=True)
    run(here, {"copy": ["net"]}, options={"made_dir": str(made)})
    assert left(here) == ["net"]


def test_a_place_that_another_run_takes_for_a_dead_ones_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def mkdtemp(**options: Any) -> str:
        made.append(tempfile.mkdtemp(**options))
        if len(made) == 1:  # the other run comes before the lock
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr("rsrv.export.repository.staging.tempfile", SimpleNamespace(mkdtemp=mkdtemp))
    with staging_area(tmp_path) as area:
        assert [str(area), 2] == [made[-1], len(made)]
        with staging_area(tmp_path) as other:
            assert sorted(path for path in tmp_path.iterdir()) == sorted([area, other])
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_handler_had_in_temporary_files_goes_with_it(here: Path, made: Path) -> None:
    report = run(here, {"leaving": ["net"]}, isolate=True)
    assert "SIGKILL" in report.results[0].reason or "signal" in report.results[0].reason
    place = Path((here / "where").read_text())
    assert place.is_relative_to(here / "out")
    assert not place.exists()
    assert left(here) == []


def test_a_reason_names_the_place_where_the_bundle_would_be(here: Path, made: Path) -> None:
    report = run(here, {"full": ["net"]})
    assert str(here / "out/net") + " cannot be written" in report.results[0].reason


def test_what_a_handler_was_warned_of_is_in_the_report(here: Path, made: Path) -> None:
    report = run(here, {"warned": ["net"]}, options={"made_dir": str(made)})
    assert report.results[0].outcome == "success"
    assert report.results[0].note == "half of it is made up"
    assert "half of it is made up" in (here / "report.md").read_text()


def test_a_directory_that_is_no_bundle_is_never_replaced(here: Path, made: Path) -> None:
    (here / "out/net").mkdir(parents=True)
    (here / "out/net/notes.txt").write_text("mine")
    report = run(here, {"copy": ["net"]}, options={"made_dir": str(made)})
    assert "holds files but no manifest.yaml" in report.results[0].reason
    config = load_convert_config(here / "convert.yaml")
    with pytest.raises(ExportError, match="out/net is no bundle, so it is not removed"):
        convert_repository(config, only=["net"], force=True, isolate=False)
    assert (here / "out/net/notes.txt").read_text() == "mine"


def test_a_damaged_bundle_is_made_anew(here: Path, made: Path) -> None:
    run(here, {"copy": ["net"]}, options={"made_dir": str(made)})
    (here / "out/net/weights.safetensors").unlink()
    assert not run(here, {"copy": ["net"]}, options={"made_dir": str(made)}).results[0].was_there
    assert open_bundle(here / "out/net").weights_path


def test_force_makes_the_named_bundles_anew_and_writes_no_report(here: Path, made: Path) -> None:
    run(here, {"copy": ["net", "twin"]}, options={"made_dir": str(made)})
    (here / "report.md").unlink()
    config = load_convert_config(here / "convert.yaml")
    before = {name: (here / "out" / name).stat().st_ino for name in ("net", "twin")}
    with pytest.raises(UsageError, match="--force deletes bundles and needs --only"):
        convert_repository(config, force=True)
    assert convert_repository(config, only=["net"], isolate=False).results[0].was_there
    (result,) = convert_repository(config, only=["net"], force=True, isolate=False).results
    assert (result.bundle, result.outcome, result.was_there) == ("net", "success", False)
    after = {name: (here / "out" / name).stat().st_ino for name in ("net", "twin")}
    assert after["net"] != before["net"]
    assert after["twin"] == before["twin"]
    assert not (here / "report.md").exists()


def test_an_excluded_model_is_skipped_and_its_bundle_removed_on_request(here: Path, made: Path) -> None:
    run(here, {"copy": ["net", "twin"]}, options={"made_dir": str(made)})
    (here / "source/net").mkdir(parents=True)
    (here / "source/twin").mkdir()
    exclude = {"net": {"reason": "too old", "remove_existing": True}, "twin": {"reason": "by hand"}}
    config = load_convert_config(write_convert_config(here, exclude=exclude))
    report = convert_repository(config)
    assert [(one.outcome, one.reason) for one in report.results] == [
        ("skipped", "excluded: too old; the bundle that was there is removed"),
        ("skipped", "excluded: by hand"),
    ]
    assert left(here) == ["twin"]
    assert report.ok
    assert "too old" in (here / "report.md").read_text()


def test_a_config_that_changed_into_nonsense_raises_before_anything_happens(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"handlers\[0\]\.file"):
        run(here, {"unwritten": ["net"]})
    assert not (here / "out").exists()
