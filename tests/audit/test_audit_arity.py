from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.audit import assert_bundle_arity, bundle_arity_report, bundle_entry_arity
from rsrv.bundle import IOSpec, write_bundle
from rsrv.core.errors import BundleError, ProgramError, SignatureMismatch
from rsrv.runtime import CompilePool
from rsrv.stablehlo import serialize


def identity(arguments: int) -> bytes:
    """A program of so many arguments, of which it returns the first."""
    listed = ", ".join(f"%a{i}: tensor<2xf32>" for i in range(arguments))
    # A first private function: the entry has to be found by its name, not by its place.
    return serialize(
        "func.func private @other(%x: tensor<9xf32>) -> tensor<9xf32> { return %x : tensor<9xf32> }\n"
        f"func.func public @main({listed}) -> tensor<2xf32> {{ return %a0 : tensor<2xf32> }}"
    )


def write(path: Path, modules: dict[int, bytes], *, weights: int = 2) -> Path:
    return write_bundle(
        path,
        name=path.name,
        executable_inputs=[IOSpec("x", "f32", (1,), batch_axis=0)],
        executable_outputs=[IOSpec("y", "f32", (1,), batch_axis=0)],
        modules=modules,
        weights=[(f"w{i}", np.zeros(2, np.float32)) for i in range(weights)],
    )


def test_the_arity_is_that_of_the_entry_function(tmp_path: Path, pool: CompilePool) -> None:
    (tmp_path / "model.mlir").write_bytes(identity(5))
    assert bundle_entry_arity(tmp_path / "model.mlir", pool=pool) == 5
    assert bundle_entry_arity(tmp_path / "model.mlir") == 5


def test_what_is_no_program_or_not_there_has_no_arity(tmp_path: Path, pool: CompilePool) -> None:
    (tmp_path / "model.mlir").write_bytes(b"ML\xefR junk")
    with pytest.raises(ProgramError, match=r"model\.mlir: program cannot be read"):
        bundle_entry_arity(tmp_path / "model.mlir", pool=pool)
    with pytest.raises(BundleError, match="cannot be opened"):
        bundle_entry_arity(tmp_path / "absent.mlir", pool=pool)


def test_a_report_over_good_and_bad_bundles_never_raises(tmp_path: Path, pool: CompilePool) -> None:
    write(tmp_path / "good", {1: identity(3), 2: identity(3)})
    write(tmp_path / "surplus", {1: identity(3), 2: identity(4)})
    write(tmp_path / "unreadable", {1: b"junk"})
    reports = {path.name: bundle_arity_report(path, pool=pool) for path in sorted(tmp_path.iterdir())}
    assert {name: report.servable for name, report in reports.items()} == {
        "good": True,
        "surplus": False,
        "unreadable": False,
    }
    good = reports["good"]
    assert (good.name, good.n_inputs, good.n_weights, good.expected) == ("good", 1, 2, 3)
    assert [(m.module_file, m.entry_args, m.servable) for m in reports["surplus"].modules] == [
        ("model.b1.mlir", 3, True),
        ("model.b2.mlir", 4, False),
    ]
    (unreadable,) = reports["unreadable"].modules
    assert unreadable.entry_args is None
    assert "cannot be read" in str(unreadable.problem)


def test_one_more_declared_input_is_flagged(tmp_path: Path, pool: CompilePool) -> None:
    path = write(tmp_path / "net", {1: identity(3)})
    entry = '  - {name: "x", dtype: f32, shape: "n"}\n'
    text = (path / "manifest.yaml").read_text()
    assert text.count(entry) == 1
    (path / "manifest.yaml").write_text(text.replace(entry, entry + entry.replace('"x"', '"more"')))
    report = bundle_arity_report(path, pool=pool)
    assert report.expected == 4
    assert not report.servable


def test_asserting_returns_the_report_or_marks_the_modules_that_disagree(tmp_path: Path, pool: CompilePool) -> None:
    assert assert_bundle_arity(write(tmp_path / "good", {1: identity(3)}), pool=pool).servable
    with pytest.raises(SignatureMismatch) as raised:
        assert_bundle_arity(write(tmp_path / "bad", {1: identity(3), 2: identity(4)}), pool=pool)
    assert raised.value.message.splitlines() == [
        "bad: 1 inputs + 2 weights = 3 arguments expected",
        "  ✓ model.b1.mlir takes 3 arguments",
        "  ✗ model.b2.mlir takes 4 arguments",
    ]
    assert raised.value.file == "model.b2.mlir"


def test_a_meta_bundle_is_reported_as_such(tmp_path: Path) -> None:
    path = tmp_path / "meta"
    path.mkdir()
    (path / "model.py").write_text("def run(inputs, call):\n    return inputs\n")
    (path / "manifest.yaml").write_text(
        'format_version: "3.0"\nkind: meta\nmeta: {calls: []}\n'
        'client_inputs: [{name: x, dtype: f32, shape: "n"}]\nclient_outputs: [{name: y, dtype: f32, shape: "n"}]\n'
    )
    report = assert_bundle_arity(path)
    assert report.kind == "meta"
    assert report.modules == ()
    assert str(report) == "meta: kind meta, which has no programs"


def test_a_missing_file_is_the_one_thing_that_raises(tmp_path: Path, pool: CompilePool) -> None:
    path = write(tmp_path / "net", {1: identity(3)})
    (path / "model.b1.mlir").unlink()
    with pytest.raises(BundleError, match=r"model\.b1\.mlir"):
        bundle_arity_report(path, pool=pool)


def test_an_arity_that_cannot_be_read_is_a_failure_and_never_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rsrv.audit.arity.bindings_missing", lambda: "jaxlib is not installed")
    path: Any = write(tmp_path / "net", {1: identity(3)})
    report = bundle_arity_report(path)
    assert not report.servable
    assert report.modules[0].problem == "jaxlib is not installed"
    with pytest.raises(ProgramError, match="jaxlib is not installed"):
        bundle_entry_arity(path / "model.b1.mlir")
