"""Audits of bundles whose one program has a symbolic batch axis: it is judged at every size that the bundle lists."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.bundles import N, specs

from rsrv.audit import AuditProcess, bundle_arity_report, bundle_gate, check_bundle, diff_bundles, verify_bundle
from rsrv.audit.convert import convert_bundle
from rsrv.bundle import describe_bundle, seal
from rsrv.bundle.golden import Golden, write_golden
from rsrv.bundle.writer import write_bundle
from rsrv.core.errors import BundleError, ParityMismatch
from rsrv.runtime import CompilePool

AFFINE = """module { func.func public @main(%x: tensor<?x3xf32>, %w: tensor<3xf32>) -> tensor<?x3xf32> {
  %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x3xf32>) -> tensor<i32>
  %m = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
  %c = stablehlo.constant dense<3> : tensor<1xi32>
  %s = stablehlo.concatenate %m, %c, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
  %b = stablehlo.dynamic_broadcast_in_dim %w, %s, dims = [1] : (tensor<3xf32>, tensor<2xi32>) -> tensor<?x3xf32>
  %y = stablehlo.multiply %x, %b : tensor<?x3xf32>
  return %y : tensor<?x3xf32> } }"""
ONLY_FOUR = """module { func.func public @main(%x: tensor<?x3xf32>, %w: tensor<3xf32>) -> tensor<?x3xf32> {
  %w4 = stablehlo.broadcast_in_dim %w, dims = [1] : (tensor<3xf32>) -> tensor<4x3xf32>
  %y = stablehlo.multiply %x, %w4 : (tensor<?x3xf32>, tensor<4x3xf32>) -> tensor<?x3xf32>
  return %y : tensor<?x3xf32> } }"""
W = np.float32([2, 3, 4])


@pytest.fixture(scope="module")
def process() -> Iterator[AuditProcess]:
    with AuditProcess(backend="cpu") as process:
        yield process


def bundle(path: Path, program: str = AFFINE, *, sizes: tuple[int, ...] = (1, 4), off: float = 0.0) -> Path:
    """``y = x * w`` with goldens of 1 and 3 rows."""
    tensor = ((N, 3), np.float32)
    write_bundle(
        path,
        name=path.name,
        executable_inputs=specs({"x": tensor}),
        executable_outputs=specs({"y": tensor}),
        modules={0: program.encode()},
        weights=[("w", W)],
        dynamic_batch_sizes=sizes,
    )
    samples = [{"x": np.arange(3 * rows, dtype=np.float32).reshape(rows, 3) + 1} for rows in (1, 3)]
    write_golden(path / "golden.safetensors", samples, [{"y": s["x"] * W + np.float32(off)} for s in samples])
    seal(path)
    return path


def test_every_listed_size_answers_the_goldens(tmp_path: Path, pool: CompilePool, process: AuditProcess) -> None:
    report = check_bundle(bundle(tmp_path / "net"), pool=pool, run=True, process=process)
    assert report.passed(strict=True), (report.findings, report.skipped)
    assert report.checks[-2:] == ["model.mlir at batch size 1 goldens", "model.mlir at batch size 4 goldens"]
    assert bundle_arity_report(tmp_path / "net", pool=pool).servable


def test_a_size_to_which_the_program_cannot_be_specialised_is_an_error(tmp_path: Path, pool: CompilePool) -> None:
    assert check_bundle(bundle(tmp_path / "four", ONLY_FOUR, sizes=(4,)), pool=pool).passed(strict=True)
    report = check_bundle(bundle(tmp_path / "net", ONLY_FOUR, sizes=(4, 5, 6)), pool=pool)
    (error,) = report.errors
    assert (error.rule, error.file) == ("B-12a", "model.mlir")
    assert error.message == (
        "model.mlir: program cannot be specialised to batch size 5: "
        "'stablehlo.multiply' op requires compatible types for all operands and results"
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("?x3xf32", "4x3xf32", r"argument 0 is f32\[4,3\], but the batch axis of input 'x' has to be symbolic"),
        ("?x3xf32", "?x5xf32", r"argument 0 is f32\[\?,5\], but input 'x' is declared as f32\[\?,3\]"),
    ],
)
def test_a_program_without_the_declared_symbol_is_an_error(
    tmp_path: Path, pool: CompilePool, old: str, new: str, problem: str
) -> None:
    program = f"""module {{ func.func public @main(%x: tensor<{old}>, %w: tensor<3xf32>) -> tensor<{old}> {{
      return %x : tensor<{old}> }} }}""".replace(old, new)
    errors = check_bundle(bundle(tmp_path / "net", program), pool=pool).errors
    assert errors
    assert all(error.rule == "B-11" for error in errors)
    with pytest.raises(BundleError, match=problem):
        bundle_gate(pool)(tmp_path / "net")


def test_verify_runs_it_at_any_size(tmp_path: Path, process: AuditProcess) -> None:
    path = bundle(tmp_path / "net")
    for batches, labels in ((None, ["1", "4"]), ([3, 8], ["3", "8"])):
        report = verify_bundle(path, process=process, batches=batches)
        assert report.passed(strict=True), report.problem
        assert [program.label for program in report.programs] == [f"model.mlir at batch size {n}" for n in labels]
        assert [program["batch_size"] for program in report.to_json()["programs"]] == [int(n) for n in labels]


def test_a_wrong_number_names_the_size(tmp_path: Path, pool: CompilePool, process: AuditProcess) -> None:
    path = bundle(tmp_path / "net", off=1.0)
    report = check_bundle(path, pool=pool, run=True, process=process)
    assert [error.message.split(": ")[0] for error in report.errors] == [
        "model.mlir at batch size 1",
        "model.mlir at batch size 4",
    ]
    x = np.float32([[1, 2, 3]])
    with pytest.raises(ParityMismatch, match="at batch size 1 does not compute what the framework computed"):
        bundle_gate(pool, goldens=[Golden({"x": x}, {"y": x})], backend="cpu")(path)


def test_diff_inspect_and_convert_know_the_symbol(tmp_path: Path, pool: CompilePool) -> None:
    one, other = (
        bundle(tmp_path / "one"),
        bundle(tmp_path / "other", AFFINE.replace("tensor<3xf32>", "tensor<1xf32>"), sizes=(2,)),
    )
    found = {(d.section, d.what): d for d in diff_bundles(one, other, pool=pool).differences}
    assert found["manifest", "batching.compiled_batch_sizes"].left == "1, 4"
    note = found["programs", "model.mlir"].note
    assert note is not None
    assert "argument 1 is f32[3] and f32[1]" in note
    described = describe_bundle(one)
    assert (described.dynamic_batch, described.coalesces, described.batch_sizes) == (True, True, (1, 4))
    assert [program.batch_keys for program in described.programs] == [(1, 4)]
    converted = convert_bundle(one, tmp_path / "copy" / "one", verify=True, pool=pool)
    assert converted.rewritten == ("model.mlir",)  # it was text
    assert converted.compared == ("model.mlir at batch size 1", "model.mlir at batch size 4")
