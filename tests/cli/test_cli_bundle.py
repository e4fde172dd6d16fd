from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from rsrv.bundle import IOSpec, write_bundle
from rsrv.cli.main import main
from rsrv.stablehlo import serialize


def write(path: Path, *, broken: bool = False, hooks: str | None = None) -> Path:
    shape = "3x4" if broken else "2x4"
    text = f"func.func public @main(%x: tensor<{shape}xf32>, %w: tensor<16xf32>) -> tensor<{shape}xf32> {{"
    return write_bundle(
        path,
        name=path.name,
        executable_inputs=[IOSpec("x", "f32", (1, 4), batch_axis=0)],
        executable_outputs=[IOSpec("y", "f32", (1, 4), batch_axis=0)],
        modules={2: serialize(f"{text} return %x : tensor<{shape}xf32> }}")},
        weights=[("w", np.zeros(16, np.float32))],
        provenance={"ticket": 7},
        hooks=hooks,
        client_inputs=[IOSpec("image", "f32", (1, 2, 2), batch_axis=0)] if hooks else None,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path / "models" / "good")
    write(tmp_path / "models" / "wrong", broken=True)
    return tmp_path / "models"


def test_sound_bundles_pass(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "check", str(repository / "good"), "--strict"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "good: ok (4 checks, 0 errors, 0 warnings, 0 skipped)" in printed.err


def test_one_bad_bundle_fails_alone(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "check", str(repository / "wrong"), str(repository / "good")]) == 1
    printed = capsys.readouterr()
    assert "good: ok" in printed.err
    assert "wrong: failed" in printed.err
    lines = printed.out.splitlines()
    assert lines[0].split() == ["bundle", "severity", "check", "rule", "message"]
    assert {line.split()[0] for line in lines[1:]} == {"wrong"}
    assert "argument 0 is f32[3,4], but input 'x' is declared as f32[2,4]" in printed.out


def test_warnings_fail_only_when_strict(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "good" / "vocab.txt").write_text("a\n")
    assert main(["bundle", "check", str(repository / "good")]) == 0
    assert "vocab.txt is not listed in files" in capsys.readouterr().out
    assert main(["bundle", "check", str(repository / "good"), "--strict"]) == 1


def test_json_has_every_finding(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "check", str(repository / "good"), str(repository / "wrong"), "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert result["ok"] is False
    good, wrong = result["bundles"]
    assert (good["ok"], good["findings"], good["skipped"]) == (True, [], [])
    assert wrong["ok"] is False
    assert {finding["rule"] for finding in wrong["findings"]} == {"B-11"}
    assert wrong["findings"][0]["file"] == "model.b2.mlir"


def test_junit_is_written_beside_the_normal_output(repository: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert main(["bundle", "check", str(repository / "good"), str(repository / "wrong"), "--junit", str(report)]) == 1
    root = ElementTree.parse(report).getroot()
    assert {suite.get("name"): suite.get("failures") for suite in root} == {"good": "0", "wrong": "1"}


@pytest.mark.parametrize("command", ["check", "seal", "inspect", "ls"])
def test_a_path_that_is_not_there_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(["bundle", command, str(tmp_path / "absent")]) == 2
    assert "absent: no such directory" in capsys.readouterr().err


def test_parts_that_were_skipped_are_shown_and_not_called_ok(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rsrv.audit.check.bindings_missing", lambda: "jaxlib is not installed")
    assert main(["bundle", "check", str(repository / "good")]) == 0
    printed = capsys.readouterr()
    assert "good: incomplete" in printed.err
    assert "skipped   model.b2.mlir  -     jaxlib is not installed" in printed.out
    assert main(["bundle", "check", str(repository / "good"), "--strict"]) == 1


def test_sealing_accepts_the_files_as_they_are(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = repository / "good"
    (good / "vocab.txt").write_text("a\n")
    assert main(["bundle", "seal", str(good)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{good}\n"
    assert "3 files" in printed.err
    assert main(["bundle", "check", str(good), "--strict"]) == 0
    capsys.readouterr()
    assert main(["bundle", "seal", str(good), "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)[str(good)]) == [
        "model.b2.mlir",
        "vocab.txt",
        "weights.safetensors",
    ]


def test_inspect_shows_tensors_programs_weights_and_provenance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = "def preprocess(inputs):\n    return {'x': inputs['image'].reshape(-1, 4)}\n"
    path = write(tmp_path / "net", hooks=hooks)
    assert main(["bundle", "inspect", str(path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "image input f32[n,2,2] nac",
        "y output f32[n,4] na",
        "x program input f32[n,4] na",
        "weights 1 tensors, 16 numbers, 64 bytes",
        "hooks preprocess",
        "requests are merged yes",
        "digests sealed",
        "ticket 7",
    ):
        assert line in lines
    assert any(line.startswith("model.b2.mlir 2 - ") for line in lines)


def test_inspect_as_json_is_the_description_of_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "net")
    assert main(["bundle", "inspect", str(path), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["name"] == "net"
    assert described["weights"]["bytes"] == 64
    assert described["provenance"] == {"ticket": 7}


def test_inspecting_a_broken_bundle_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net").mkdir()
    assert main(["bundle", "inspect", str(tmp_path / "net")]) == 1
    assert "manifest.yaml" in capsys.readouterr().err


def test_ls_lists_every_bundle_and_what_is_wrong_with_the_broken_ones(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = repository / "wrong" / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace('"3.0"', '"9.0"'))
    (repository / "no_bundle").mkdir()
    assert main(["bundle", "ls", str(repository), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["good", "wrong"]
    assert rows[0]["inputs"] == "x f32[n,4]"
    assert rows[0]["outputs"] == "y f32[n,4]"
    assert rows[0]["batch sizes"] == "2"
    assert rows[0]["problem"] is None
    assert "9.0" in rows[1]["problem"]
    assert main(["--quiet", "bundle", "ls", str(repository)]) == 0
    assert capsys.readouterr().out == "good\nwrong\n"


def test_a_report_may_go_into_a_directory_that_is_not_there_yet(repository: Path, tmp_path: Path) -> None:
    report = tmp_path / "build" / "reports" / "bundles.xml"
    assert main(["bundle", "check", str(repository / "good"), "--junit", str(report)]) == 0
    assert [suite.get("name") for suite in ElementTree.parse(report).getroot()] == ["good"]


@pytest.mark.parametrize(
    ("report", "says"),
    [("models", "is a directory, want a file"), ("file/report.xml", "file cannot be made: File exists")],
)
@pytest.mark.parametrize("command", ["check", "verify"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    report: str,
    says: str,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("rsrv.audit.check_bundle", lambda *_, **__: pytest.fail("it was checked"))
    monkeypatch.setattr("rsrv.audit.verify_bundle", lambda *_, **__: pytest.fail("it was verified"))
    assert main(["bundle", command, str(repository / "good"), "--junit", str(tmp_path / report)]) == 2
    printed = capsys.readouterr().err
    assert f"--junit {tmp_path / report}" in printed
    assert says in printed


def test_a_check_needs_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "check"]) == 2
    assert "name bundles to check" in capsys.readouterr().err


def test_changed_files_stand_for_the_bundles_that_they_lie_in(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    changed = ["README.md", "models/good/manifest.yaml", "models/good/model.b2.mlir", "models/notes.txt"]
    assert main(["bundle", "check", "--json", "--changed", *changed]) == 0
    assert [bundle["bundle"] for bundle in json.loads(capsys.readouterr().out)["bundles"]] == ["good"]
    gone = "models/wrong/labels/deleted.txt"
    assert main(["bundle", "check", "--changed", *changed, gone]) == 1
    assert "wrong: failed" in capsys.readouterr().err


@pytest.mark.parametrize("changed", [[], ["README.md", "src/model.py"]])
def test_no_bundle_among_the_changed_files_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, changed: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", "check", "--changed", *changed, "--junit", "build/report.xml"]) == 0
    assert "no bundle has changed" in capsys.readouterr().err
    assert len(ElementTree.parse("build/report.xml").getroot()) == 0
