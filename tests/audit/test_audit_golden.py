"""`check_bundle(run=True)`: goldens are replayed on every program, hooks imported, all in a process that may die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import N, write_affine, write_model

from rsrv.audit import AuditProcess, CheckReport, bundle_gate, check_bundle
from rsrv.bundle import open_bundle, seal
from rsrv.bundle.golden import Golden, write_golden
from rsrv.core.errors import BundleError, ParityMismatch
from rsrv.runtime import CompilePool
from rsrv.runtime.backends import cuda_plugin_installed

X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture(scope="module")
def process() -> Iterator[AuditProcess]:
    with AuditProcess(backend="cpu") as process:
        yield process


@pytest.fixture
def check(pool: CompilePool, process: AuditProcess) -> Any:
    def call(path: Path, **options: Any) -> CheckReport:
        return check_bundle(path, pool=pool, process=process, **{"run": True, **options})

    return call


def add_goldens(path: Path, samples: list[dict[str, np.ndarray]], answers: list[dict[str, np.ndarray]]) -> Path:
    write_golden(path / "golden.safetensors", samples, answers)
    seal(path)
    return path


def affine(path: Path, *, rows: tuple[int, ...] = (1, 1, 3), off: float = 0.0, **kw: Any) -> Path:
    """``y = 2x + 1`` with goldens of `rows` rows each."""
    write_affine(path, **kw)
    samples = [{"x": np.repeat(X, count, axis=0) + index} for index, count in enumerate(rows)]
    answers = [{"y": sample["x"] * 2 + 1 + np.float32(off)} for sample in samples]
    return add_goldens(path, samples, answers)


def found(report: CheckReport) -> list[tuple[str, str, str | None, str | None]]:
    return [(finding.severity, finding.check, finding.rule, finding.file) for finding in report.findings]


def test_every_program_answers_the_goldens(tmp_path: Path, check: Any) -> None:
    report = check(affine(tmp_path / "net", batch_sizes=(1, 2, 8)))
    assert report.passed(strict=True), report.findings
    assert report.checks[-4:] == ["goldens", "model.b1.mlir goldens", "model.b2.mlir goldens", "model.b8.mlir goldens"]


def test_nothing_runs_without_being_asked_for(tmp_path: Path, pool: CompilePool) -> None:
    class NeverStarted(AuditProcess):
        def _start(self) -> Any:
            raise AssertionError("something was run")

    path = affine(tmp_path / "net", hooks="def preprocess(inputs): return inputs\n")
    report = check_bundle(path, pool=pool, process=NeverStarted())
    assert report.passed(strict=True)


def test_a_check_starts_its_own_process(tmp_path: Path) -> None:
    assert check_bundle(affine(tmp_path / "net", batch_sizes=(2,)), run=True).passed(strict=True)


def test_a_program_that_computes_something_else_is_an_error_for_every_program(tmp_path: Path, check: Any) -> None:
    report = check(affine(tmp_path / "net", batch_sizes=(1, 4), off=0.01))
    assert found(report) == [("error", f"model.b{size}.mlir goldens", "X-58", f"model.b{size}.mlir") for size in (1, 4)]
    assert "output 'y': rel" in report.findings[0].message
    assert check(tmp_path / "net", tolerances=0.1).passed(strict=True)


def test_weights_that_were_replaced_are_found_by_their_numbers(tmp_path: Path, check: Any) -> None:
    path = affine(tmp_path / "net", batch_sizes=(2,))
    write_affine(tmp_path / "other" / "net", scale=2.5, batch_sizes=(2,))
    (path / "weights.safetensors").write_bytes((tmp_path / "other/net/weights.safetensors").read_bytes())
    seal(path)
    assert [finding.check for finding in check(path).errors] == ["model.b2.mlir goldens"]


def test_rows_that_influence_each_other_are_found(tmp_path: Path, check: Any) -> None:
    tensor = ((N, 3), np.float32)
    path = write_model(
        tmp_path / "net", lambda x: (x - x.mean(0, keepdims=True),), {"x": tensor}, {"y": tensor}, batch_sizes=(1, 2)
    )
    add_goldens(path, [{"x": X}, {"x": 3 * X}], [{"y": 0 * X}, {"y": 0 * X}])
    report = check(path)
    assert [finding.check for finding in report.errors] == ["model.b2.mlir goldens"]


def test_a_constant_answer_is_a_warning(tmp_path: Path, check: Any) -> None:
    tensor = ((N, 3), np.float32)
    path = write_model(tmp_path / "net", lambda x: (x * 0 + 7,), {"x": tensor}, {"y": tensor}, batch_sizes=(1,))
    report = check(add_goldens(path, [{"x": X}], [{"y": X * 0 + 7}]))
    assert found(report) == [("warning", "model.b1.mlir goldens", "X-58", "model.b1.mlir")]
    assert "the reference is 7 everywhere, so agreement proves little" in report.findings[0].message
    assert report.passed()


def test_without_goldens_the_check_says_that_nothing_is_known(tmp_path: Path, check: Any) -> None:
    report = check(write_affine(tmp_path / "net"))
    assert [(skipped.check, skipped.reason) for skipped in report.skipped] == [
        ("goldens", "there is no golden.safetensors; rsrv export … --golden N writes one")
    ]
    assert report.passed()
    assert not report.passed(strict=True)


def test_a_golden_that_no_program_can_be_given_is_an_error_and_the_others_run(tmp_path: Path, check: Any) -> None:
    path = write_affine(tmp_path / "net", batch_sizes=(1,))
    wide = np.zeros((1, 4), np.float32)
    report = check(add_goldens(path, [{"x": wide}, {"x": X}], [{"y": wide}, {"y": X * 2 + 1}]))
    assert found(report) == [("error", "goldens", "X-58", "golden.safetensors")]
    assert "golden 0 input 'x' is f32[1,4], want f32[n,3]" in report.findings[0].message
    assert report.checks[-1] == "model.b1.mlir goldens"


@pytest.mark.parametrize("content", [b"", b"junk" * 10])
def test_a_damaged_golden_file_is_an_error(tmp_path: Path, check: Any, content: bytes) -> None:
    path = affine(tmp_path / "net")
    (path / "golden.safetensors").write_bytes(content)
    seal(path)
    assert [(f.check, f.file) for f in check(path).errors] == [("goldens", "golden.safetensors")]


def test_a_program_without_a_batch_size_takes_goldens_of_its_shape(tmp_path: Path, check: Any) -> None:
    path = affine(tmp_path / "net", rows=(1, 3), batch_sizes=None)
    report = check(path)
    assert report.passed(strict=True)
    assert report.checks[-1] == "model.mlir goldens"
    only_wrong = affine(tmp_path / "other", rows=(3,), batch_sizes=None)
    report = check(only_wrong)
    assert report.skipped[0].check == "model.mlir goldens"


def test_a_program_that_has_errors_is_not_run(tmp_path: Path, check: Any) -> None:
    path = affine(tmp_path / "net", batch_sizes=(1, 2))
    data = bytearray((path / "model.b2.mlir").read_bytes())
    data[-3] ^= 4
    (path / "model.b2.mlir").write_bytes(data)
    report = check(path)
    assert "model.b1.mlir goldens" in report.checks
    assert [s.check for s in report.skipped] == ["model.b2.mlir", "model.b2.mlir goldens"]


def test_the_tolerances_that_an_export_states_hold_and_the_callers_win(tmp_path: Path, check: Any) -> None:
    path = affine(tmp_path / "net", batch_sizes=(1,), off=0.01)
    manifest = path / "manifest.yaml"
    manifest.write_text(manifest.read_text() + "provenance: {parity: {tolerances: {f32: 0.1}}}\n")
    assert check(path).passed()
    assert not check(path, tolerances={"f32": 1e-6}).passed()
    manifest.write_text(manifest.read_text().replace("{f32: 0.1}", "{y: 0.1}"))
    assert check(path).passed()
    assert not check(path, tolerances={"f32": 1e-6}).passed()
    manifest.write_text(manifest.read_text().replace("{y: 0.1}", '{f32: "wide", y: -1, z: true}'))
    assert not check(path).passed()


def test_a_device_that_is_not_there_is_no_silent_cpu(tmp_path: Path) -> None:
    if cuda_plugin_installed():
        pytest.skip("this machine has CUDA")
    with AuditProcess(backend="cuda") as process:
        report = check_bundle(affine(tmp_path / "net", batch_sizes=(1,)), run=True, process=process)
    assert "no CUDA plugin is installed" in report.errors[0].message


def hooked(path: Path, text: str) -> Path:
    return write_affine(path, batch_sizes=(1,), hooks=text)


def test_hooks_are_imported_on_demand(tmp_path: Path, check: Any) -> None:
    path = hooked(tmp_path / "net", "print('hello')\ndef preprocess(inputs): return inputs\n")
    report = check(path, run=False, hooks=True)
    assert report.passed(strict=True)
    assert report.checks[-1] == "hooks import"
    assert "goldens" not in report.checks


@pytest.mark.parametrize(
    ("text", "rule", "says"),
    [
        ("import no_such_package\ndef preprocess(i): return i\n", "B-71", "line 1: ModuleNotFoundError"),
        (
            "def preprocess(i): return i\nimport os; os._exit(3)\n",
            "B-71",
            "ended its process: it ended with exit code 3",
        ),
        ("def preprocess(i): return i\nimport os; os.abort()\n", "B-71", "ended by SIGABRT"),
        ("if False:\n    register_model(preprocess=print)\n", "B-72", "registers nothing"),
    ],
)
def test_hooks_that_do_not_load_are_errors(tmp_path: Path, check: Any, text: str, rule: str, says: str) -> None:
    report = check(hooked(tmp_path / "net", text), run=False, hooks=True)
    assert [(f.severity, f.check, f.rule, f.file) for f in report.findings] == [
        ("error", "hooks import", rule, "model.py")
    ]
    assert says in report.findings[0].message


def test_what_only_a_run_can_tell_is_no_warning_once_they_ran(tmp_path: Path, check: Any) -> None:
    path = hooked(tmp_path / "net", "if True:\n    register_model(preprocess=lambda inputs: inputs)\n")
    assert [finding.severity for finding in check(path, run=False).findings] == ["warning"]
    assert check(path, run=False, hooks=True).passed(strict=True)


def test_hooks_that_hang_run_into_the_deadline_and_the_next_job_gets_a_new_process(tmp_path: Path) -> None:
    path = hooked(tmp_path / "net", "import time\ntime.sleep(3600)\ndef preprocess(i): return i\n")
    fine = hooked(tmp_path / "fine", "def preprocess(i): return i\n")
    with AuditProcess(backend="cpu", timeout_seconds=1.0) as process:
        with pytest.raises(BundleError, match="took longer than 1 s") as error:
            process.import_hooks(open_bundle(path))
        assert error.value.rule == "B-71"
        process._timeout = 60.0
        assert process.import_hooks(open_bundle(fine)) == ["preprocess"]


def test_the_gate_refuses_a_bundle_that_computes_something_else(tmp_path: Path, pool: CompilePool) -> None:
    path = write_affine(tmp_path / "net", batch_sizes=(1, 4))
    right = [Golden({"x": X}, {"y": X * 2 + 1})]
    wrong = [Golden({"x": X}, {"y": X * 2 + 1.5})]
    bundle_gate(pool, goldens=right, backend="cpu")(path)
    with pytest.raises(ParityMismatch, match=r"was not written: model\.b1\.mlir does not compute") as error:
        bundle_gate(pool, goldens=wrong, backend="cpu")(path)
    assert error.value.reason == "parity"
    bundle_gate(pool, goldens=wrong, tolerances=0.5, backend="cpu")(path)
    strange = [Golden({"z": X}, {"y": X})]
    with pytest.raises(ParityMismatch, match="has the inputs z, want x"):
        bundle_gate(pool, goldens=strange, backend="cpu")(path)


def test_the_gate_wants_a_golden_for_every_program(tmp_path: Path, pool: CompilePool) -> None:
    tensor, total = ((N, 3), np.float32), ((3,), np.float32)
    path = write_model(tmp_path / "net", lambda x: (x.sum(0),), {"x": tensor}, {"y": total}, batch_sizes=(1, 2))
    with pytest.raises(ParityMismatch, match=r"model\.b2\.mlir: no golden has its shapes"):
        bundle_gate(pool, goldens=[Golden({"x": X}, {"y": X[0]})], backend="cpu")(path)
