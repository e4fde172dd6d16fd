"""``rsrv bundle verify``, ``diff``, ``check --run`` and ``export jax --golden``: exit codes, tables, JSON, JUnit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from rsrv.cli.main import main

MODEL = """
import numpy as np
import jax.numpy as jnp

SCALE = 1.0

def make():
    params = {"w": np.sin(np.arange(64, dtype=np.float32)).reshape(4, 16), "e": np.ones((70, 16), np.float32)}

    def fn(params, x, ids):
        return {"y": SCALE * jnp.tanh(x @ params["w"]) + params["e"][ids], "best": jnp.argmax(x @ params["w"], -1)}

    return {"fn": fn, "params": params, "inputs": {"x": np.zeros((1, 4), np.float32), "ids": np.zeros(1, np.int32)}}
"""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a twin that is off, and the bundle of the former."""
    folder = tmp_path_factory.mktemp("room")
    (folder / "model.py").write_text(MODEL)
    (folder / "twin.py").write_text(MODEL.replace("SCALE = 1.0", "SCALE = 1.01"))
    arguments = ["--batch-sizes", "1,4", "--golden", "2", "--input-range", "ids=0:69", "--no-diff"]
    assert main(["export", "jax", f"{folder}/model.py:make", "--out", f"{folder}/net", *arguments]) == 0
    return folder


def printed_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_bundle_is_checked_with_its_goldens(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "check", str(room / "net"), "--run", "--strict", "--json"]) == 0
    (bundle,) = printed_json(capsys)["bundles"]
    assert bundle["checks"][-3:] == ["goldens", "model.b1.mlir goldens", "model.b4.mlir goldens"]


def test_goldens_are_verified_and_shown_as_a_table(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "verify", str(room / "net"), "--strict"]) == 0
    printed = capsys.readouterr()
    rows = [line.split()[:5] for line in printed.out.splitlines()[1:]]
    assert rows == [["net", f"model.b{size}.mlir", "2", output, "ok"] for size in (1, 4) for output in ("y", "best")]
    assert "ok against golden (4 of 4 samples passed, 2 programs)" in printed.err


def test_the_original_is_compared_at_every_batch_size(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"jax:{room}/model.py:make"
    ranges = ["--input-range", "ids=0:69"]
    assert main(["bundle", "verify", str(room / "net"), "--against", model, "--count", "2", *ranges, "--json"]) == 0
    (bundle,) = printed_json(capsys)["bundles"]
    assert [(program["batch_size"], len(program["samples"])) for program in bundle["programs"]] == [(1, 2), (4, 2)]


def test_another_model_is_a_mismatch_with_exit_code_1(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = ["bundle", "verify", str(room / "net"), "--against", f"jax:{room}/twin.py:make", "--batch", "4"]
    assert main([*twin, "--junit", str(tmp_path / "report.xml")]) == 1
    printed = capsys.readouterr()
    assert "mismatch" in printed.out
    assert "failed against" in printed.err
    assert ElementTree.parse(tmp_path / "report.xml").getroot().get("failures") == "1"
    assert main([*twin, "--tolerance", "f32=0.1"]) == 0


def test_samples_of_the_user_are_reported_one_by_one(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        (tmp_path / f"s{index}").mkdir()
        np.save(tmp_path / f"s{index}" / "x.npy", np.full(4, index + 1, np.float32))
        np.save(tmp_path / f"s{index}" / "ids.npy", np.array([index], np.int32))
    model = ["--against", f"jax:{room}/model.py:make", "--samples", str(tmp_path), "--batch", "4"]
    page = tmp_path / "page.md"
    assert main(["bundle", "verify", str(room / "net"), *model, "--max", "2", "--report", str(page)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split()[5:] == ["max", "abs", "mean", "abs", "rel", "ulp", "worst", "note"]
    assert [line.split()[2] for line in printed.out.splitlines()[1:]] == ["s0", "s0", "s1", "s1"]
    assert "2 of 2 samples passed" in printed.err
    assert page.read_text().splitlines()[2].startswith("2 of 2 samples passed in this run. 1 of 1 models passed")
    assert "\n- s1: passed (y: ok, max abs" in page.read_text()
    twin = ["--against", f"jax:{room}/twin.py:make", *model[2:], "--report", str(page)]
    assert main(["bundle", "verify", str(room / "net"), *twin]) == 1
    assert "\n- s2: FAILED (y: mismatch, max abs" in page.read_text()


def test_a_bundle_without_goldens_fails_and_is_named(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "jax", f"{room}/model.py:make", "--out", str(tmp_path / "bare"), "--no-diff"]) == 0
    capsys.readouterr()
    assert main(["bundle", "verify", str(room / "net"), str(tmp_path / "bare")]) == 1
    printed = capsys.readouterr()
    assert "net: ok against golden" in printed.err
    assert "--golden N writes one" in printed.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "1,x"], "--batch 1,x is neither all nor a list of sizes"),
        (["--batch", "3"], "no program for batch size 3; sizes: 1, 4"),
        (["--tolerance", "tight"], "tolerance 'tight'"),
        (["--against", "onnx:m.py:f"], "is none of golden, jax:SPEC and torch:SPEC"),
        (["--against", "jax:"], "is none of golden"),
        (["--count", "3"], "need an original"),
        (["--backend", "tpu"], "is none of auto, cpu and cuda"),
        (["--device", "gpu"], "--device gpu is none of cpu and cuda"),
        (["--hooks", "on", "--against", "jax:m:f"], "--hooks on is none of auto, off, bundle and both"),
        (["--hooks", "both"], "need an original"),
        (["--reference-only"], "need an original"),
        (["--sources", "/nowhere"], "--sources /nowhere: no such directory"),
        (["--sources", ".", "--against", "golden"], "--against and --sources both say"),
        (["--repo", "/nowhere"], "--repo /nowhere: no such directory"),
        (["--exclude", "nett"], "--exclude names 'nett'; the bundles are net"),
        (["--served", "--batch", "1"], "with --served the server chooses them"),
    ],
)
def test_wrong_usage_ends_with_code_2(
    room: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["bundle", "verify", str(room / "net"), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_paths_that_are_not_there_end_with_code_2(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(room / "nothing")
    assert main(["bundle", "verify", missing]) == 2
    assert main(["bundle", "verify", missing, "--against", f"jax:{room}/model.py:make"]) == 2
    assert main(["bundle", "diff", str(room / "net"), missing]) == 2
    assert main(["bundle", "verify", str(room / "net"), "--against", f"jax:{room}/gone.py:make"]) == 2
    capsys.readouterr()


def test_equal_bundles_have_no_difference_and_others_end_with_code_1(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", "diff", str(room / "net"), str(room / "net")]) == 0
    assert "the same" in capsys.readouterr().err
    assert main(["export", "jax", f"{room}/twin.py:make", "--out", str(tmp_path / "net"), "--no-diff"]) == 0
    capsys.readouterr()
    assert main(["bundle", "diff", str(room / "net"), str(tmp_path / "net"), "--json"]) == 1
    found = {(d["section"], d["what"]): d for d in printed_json(capsys)["differences"]}
    assert found["programs", "model.b1.mlir"]["note"] == "same signature"
    assert found["programs", "model.b4.mlir"]["right"] is None
    assert found["files", "golden.safetensors"]["right"] is None


def test_a_range_that_makes_no_sense_is_refused_at_export(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(room / "other"), "--golden", "1"]
    assert main(["export", "jax", f"{room}/model.py:make", *out, "--input-range", "ids"]) == 2
    assert "NAME=LOW:HIGH" in capsys.readouterr().err
    assert main(["export", "jax", f"{room}/model.py:make", *out, "--input-range", "id=0:1"]) == 1
    assert "names 'id'; the inputs are x, ids" in capsys.readouterr().err
    assert not (room / "other").exists()


def test_results_are_kept_models_in_them_skipped_and_their_failures_remembered(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--results", str(tmp_path / "parity.tsv"), "--report", str(tmp_path / "parity.md")]
    twin = ["bundle", "verify", str(room / "net"), "--against", f"jax:{room}/twin.py:make", *files]
    assert main([*twin, "--batch", "1"]) == 1
    assert "| net | 1 |" in (tmp_path / "parity.md").read_text()
    capsys.readouterr()
    assert main(twin) == 1
    assert "skipped" in capsys.readouterr().err
    assert len((tmp_path / "parity.tsv").read_text().splitlines()) == 2
