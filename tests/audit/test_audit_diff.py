"""`diff_bundles`: what differs is named with both sides; what is the same is not mentioned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.bundles import N, write_affine, write_model

from rsrv.audit import BundleDiff, diff_bundles
from rsrv.bundle import seal
from rsrv.core.errors import BundleError
from rsrv.runtime import CompilePool


def found(diff: BundleDiff) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    return {(d.section, d.what): (d.left, d.right) for d in diff.differences}


def test_a_bundle_and_its_copy_under_another_name_are_the_same(tmp_path: Path, pool: CompilePool) -> None:
    path = write_affine(tmp_path / "net")
    shutil.copytree(path, tmp_path / "copy")
    diff = diff_bundles(path, tmp_path / "copy", pool=pool)
    assert diff.differences == ()
    assert diff.same


def test_provenance_is_shown_and_does_not_count(tmp_path: Path) -> None:
    path = write_affine(tmp_path / "net")
    shutil.copytree(path, tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.yaml"
    manifest.write_text(manifest.read_text() + 'provenance: {ticket: 7, tags: ["a", "b"]}\n')
    (tmp_path / "copy" / "working_tree.patch").write_text("diff\n")
    seal(tmp_path / "copy")
    diff = diff_bundles(path, tmp_path / "copy")
    assert {section for section, _ in found(diff)} == {"provenance"}
    assert found(diff)["provenance", "ticket"] == (None, "7")
    assert diff.same


def test_weights_are_compared_by_hash_and_by_number(tmp_path: Path, pool: CompilePool) -> None:
    diff = diff_bundles(
        write_affine(tmp_path / "a" / "net"), write_affine(tmp_path / "b" / "net", scale=2.5), pool=pool
    )
    (difference,) = diff.differences
    assert (difference.section, difference.what) == ("weights", "scale")
    assert difference.note == "max abs 0.5, rel 0.25"
    assert "sha256" in str(difference.left)
    assert not diff.same


def test_programs_are_compared_by_their_signatures(tmp_path: Path, pool: CompilePool) -> None:
    tensor = ((N, 3), np.float32)
    one = write_model(tmp_path / "a" / "net", lambda x: (x + 1,), {"x": tensor}, {"y": tensor}, batch_sizes=(1, 2))
    other = write_model(tmp_path / "b" / "net", lambda x: (x + 2,), {"x": tensor}, {"y": tensor}, batch_sizes=(1, 4))
    diff = diff_bundles(one, other, pool=pool)
    notes = {(d.section, d.what): d.note for d in diff.differences}
    assert notes["programs", "model.b1.mlir"] == "same signature"
    assert found(diff)["programs", "model.b2.mlir"][1] is None
    assert found(diff)["programs", "model.b4.mlir"][0] is None
    assert found(diff)["manifest", "batching.compiled_batch_sizes"] == ("1, 2", "1, 4")

    double = ((N, 3), np.float64)
    wide = write_model(tmp_path / "c" / "net", lambda x: (x + 1,), {"x": double}, {"y": double}, batch_sizes=(1, 2))
    diff = diff_bundles(one, wide)
    notes = {(d.section, d.what): d.note for d in diff.differences}
    assert notes["programs", "model.b1.mlir"] == (
        "argument 0 is f32[1,3] and f64[1,3]; result 0 is f32[1,3] and f64[1,3]"
    )
    assert found(diff)["manifest", "executable_inputs 'x'"] == ("f32[n,3] 'na'", "f64[n,3] 'na'")


def test_tensors_weights_and_files_that_only_one_has_are_shown_as_missing(tmp_path: Path, pool: CompilePool) -> None:
    tensor = ((N, 3), np.float32)
    w, v = np.ones(3, np.float32), np.zeros(3, np.float32)
    one = write_model(
        tmp_path / "a" / "net",
        lambda x, w, v: (x * w + v,),
        {"x": tensor},
        {"y": tensor},
        weights={"w": w, "v": v},
        batch_sizes=(1,),
        hooks="def preprocess(inputs): return inputs\n",
    )
    other = write_model(
        tmp_path / "b" / "net",
        lambda x, v, w: (x * w + v,),
        {"x": tensor},
        {"z": tensor},
        weights={"v": v, "w": w},
        batch_sizes=(1,),
    )
    sides = found(diff_bundles(one, other, pool=pool))
    assert sides["weights", "argument_order"] == ("w", "v")
    assert sides["files", "model.py"][1] is None
    assert sides["manifest", "executable_outputs 'y'"] == ("f32[n,3] 'na'", None)
    assert sides["manifest", "executable_outputs 'z'"] == (None, "f32[n,3] 'na'")


def test_a_diff_is_json(tmp_path: Path, pool: CompilePool) -> None:
    diff = diff_bundles(write_affine(tmp_path / "a" / "net"), write_affine(tmp_path / "b" / "net", scale=3), pool=pool)
    text = json.loads(json.dumps(diff.to_json()))
    assert text["same"] is False
    assert text["differences"][0]["what"] == "scale"


def test_what_is_no_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        diff_bundles(write_affine(tmp_path / "net"), tmp_path / "nothing")
