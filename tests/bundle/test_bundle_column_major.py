"""Manifests of format 2.0 read as row-major: letters, batch axes, variants, hooks, leniency (§1.11, B-62 … B-68)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rsrv.bundle.column_major import turned_key, with_reversed_axes
from rsrv.bundle.directory import open_bundle
from rsrv.bundle.manifest import inspect_manifest, load_manifest, manifest_problems
from rsrv.bundle.programs import list_programs
from rsrv.bundle.rewrite import rewritten
from rsrv.core.errors import ManifestError

OLDER: dict[str, Any] = {
    "format_version": "2.0",
    "executable_inputs": [
        {"name": "image", "dtype": "f32", "shape": "whcn", "dims": {"w": -1, "h": -1, "c": 3}},
        {"name": "boxes", "dtype": "f32", "shape": "ckn", "dims": {"c": 4, "k": 7}},
    ],
    "executable_outputs": [
        {"name": "scores", "dtype": "f32", "shape": "kn", "dims": {"k": 10}},
        {"name": "map", "dtype": "f32", "shape": "nwh", "dims": {"w": -1, "h": -1}},
    ],
    "batching": {"compiled_batch_sizes": [1]},
    "input_shapes": [{"h": 720, "w": 1280}, {"w": 640, "h": 480}],
}


def write(directory: Path, text: str, *files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.yaml").write_text(text)
    for file in files:
        (directory / file).touch()
    return directory


@pytest.fixture
def older(tmp_path: Path) -> Any:
    def make(*files: str, **changes: Any) -> Path:
        mapping = {**copy.deepcopy(OLDER), **changes}
        return write(tmp_path / "net", yaml.safe_dump(mapping, sort_keys=False), *files)

    return make


def test_letters_batch_axes_and_variant_keys_come_out_row_major(older: Any) -> None:
    manifest = load_manifest(older())
    assert [(s.letters, s.batch_axis) for s in manifest.executable_inputs] == [("nchw", 0), ("nkc", 0)]
    assert [(s.letters, s.batch_axis) for s in manifest.executable_outputs] == [("nk", 0), ("hwn", 2)]
    assert manifest.executable_inputs[0].wire_shape == (-1, 3, -1, -1)
    assert manifest.input_shapes == ((720, 1280), (480, 640))
    assert manifest.variant_of({"image": (1, 3, 480, 640)}) == (480, 640)
    assert manifest.wire_batch() == ("image", 1)


def test_reversing_twice_changes_nothing(older: Any) -> None:
    manifest = load_manifest(older())
    turned = with_reversed_axes(manifest)
    assert [spec.letters for spec in turned.executable_inputs] == ["whcn", "ckn"]
    assert turned.input_shapes == ((1280, 720), (640, 480))
    assert turned_key(turned, (640, 480)) == (480, 640)
    assert with_reversed_axes(turned) == manifest


@pytest.mark.parametrize(("order", "fine"), [("column_major", True), ("row_major", False), (None, True)])
def test_the_axis_order_may_only_repeat_what_the_version_says(older: Any, order: str | None, fine: bool) -> None:
    problems = manifest_problems(older(axis_order=order))
    assert [problem.rule for problem in problems] == ([] if fine else ["§1.11"])


def test_what_the_format_does_not_know_is_a_warning_with_its_line(older: Any) -> None:
    manifest, problems = inspect_manifest(older(owner="me", batching={"compiled_batch_sizes": [1], "wait": 3}))
    assert not problems
    assert manifest is not None
    texts = [warning.message for warning in manifest.warnings]
    assert [text.partition(": ")[2] for text in texts] == [
        "unknown key 'owner' is ignored (B-13)",
        "unknown key 'wait' in batching is ignored (B-13)",
    ]
    assert all(text.startswith("manifest.yaml:") for text in texts)


def test_mistakes_are_mistakes_in_the_older_format_too(older: Any) -> None:
    broken = [{"name": "x", "dtype": "f32", "shape": "cc", "dims": {"c": 3}}]
    assert [problem.rule for problem in manifest_problems(older(executable_outputs=broken))] == ["B-18"]


def test_undeclared_programs_are_skipped_with_a_warning(older: Any) -> None:
    listing = list_programs(load_manifest(older()), ["model.v0.b1.mlir", "model.v1.b1.mlir", "model.v0.b8.mlir"])
    assert listing.names == {(720, 1280): {1: "model.v0.b1.mlir"}, (480, 640): {1: "model.v1.b1.mlir"}}
    assert not listing.problems
    assert [(warning.rule, warning.file) for warning in listing.warnings] == [("B-33", "model.v0.b8.mlir")]


CLIENT = {"client_inputs": [{"name": "photo", "dtype": "u8", "shape": "cwhn", "dims": {"c": 3, "w": -1, "h": -1}}]}
FILES = ("weights.safetensors", "model.v0.b1.mlir", "model.v1.b1.mlir")


def test_hooks_that_cannot_run_here_are_one_clear_problem(older: Any) -> None:
    path = older(*FILES, "model.jl", **CLIENT)
    with pytest.raises(ManifestError, match="'net' needs a Python port of its hooks") as raised:
        open_bundle(path)
    assert raised.value.rule == "B-68"
    assert "allow_unhooked" in str(raised.value.hint)
    assert len(manifest_problems(path)) == 1
    bundle = open_bundle(path, unhooked=True)
    assert bundle.manifest.client_inputs is None
    assert [spec.name for spec in bundle.manifest.wire_inputs] == ["image", "boxes"]


def test_python_hooks_win_over_the_others(older: Any) -> None:
    for unhooked in (False, True):
        bundle = open_bundle(older(*FILES, "model.jl", "model.py", **CLIENT), unhooked=unhooked)
        assert bundle.hooks_path is not None
        assert [spec.letters for spec in bundle.manifest.wire_inputs] == ["nhwc"]


def test_a_file_of_that_name_means_nothing_in_the_new_format(make_bundle: Any) -> None:
    assert open_bundle(make_bundle(files={"model.jl": ""})).hooks_path is None


def test_the_manifest_is_written_anew_in_either_format(older: Any) -> None:
    path = older(owner="me", description=7, **{"x-team": [1]}, provenance="none")
    manifest = load_manifest(path)
    mapping = yaml.safe_load((path / "manifest.yaml").read_text())
    new = rewritten(manifest, mapping, name="fresh", to="3.0")
    assert new == {
        "format_version": "3.0",
        "name": "fresh",
        "description": "7",
        "executable_inputs": [
            {"name": "image", "dtype": "f32", "shape": "nchw", "dims": {"c": 3, "h": -1, "w": -1}},
            {"name": "boxes", "dtype": "f32", "shape": "nkc", "dims": {"k": 7, "c": 4}},
        ],
        "executable_outputs": [
            {"name": "scores", "dtype": "f32", "shape": "nk", "dims": {"k": 10}},
            {"name": "map", "dtype": "f32", "shape": "hwn", "dims": {"h": -1, "w": -1}},
        ],
        "batching": {"compiled_batch_sizes": [1]},
        "input_shapes": [{"h": 720, "w": 1280}, {"h": 480, "w": 640}],
        "axis_order": "row_major",
        "x-team": [1],
    }
    again = rewritten(manifest, mapping, name="net", to="2.0")
    assert again["format_version"] == "2.0"
    assert again["executable_inputs"] == [
        {"name": "image", "dtype": "f32", "shape": "whcn", "dims": {"w": -1, "h": -1, "c": 3}},
        {"name": "boxes", "dtype": "f32", "shape": "ckn", "dims": {"c": 4, "k": 7}},
    ]
    assert "axis_order" not in again
