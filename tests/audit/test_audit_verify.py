"""`verify_bundle`: goldens, samples and sweeps, and what becomes of programs that cannot be run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import N, write_affine, write_model

from rsrv.audit import AuditProcess, VerifyReport, to_junit, verify_bundle
from rsrv.audit.samples import read_samples
from rsrv.audit.shapes import SizedInput
from rsrv.bundle import open_bundle, seal
from rsrv.bundle.golden import Golden, write_golden
from rsrv.core.errors import ExportError, UsageError

X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture(scope="module")
def process() -> Iterator[AuditProcess]:
    with AuditProcess(backend="cpu") as process:
        yield process


@pytest.fixture
def verify(process: AuditProcess) -> Any:
    def call(path: Path, **options: Any) -> VerifyReport:
        return verify_bundle(path, process=process, **options)

    return call


def golden(rows: int = 1, off: float = 0.0) -> Golden:
    x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3) + 1
    return Golden({"x": x}, {"y": x * 2 + 1 + np.float32(off)})


def verdicts(report: VerifyReport) -> dict[str, str]:
    return {program.file: program.verdict for program in report.programs}


def test_the_goldens_of_a_bundle_are_the_default(tmp_path: Path, verify: Any) -> None:
    path = write_affine(tmp_path / "net", batch_sizes=(1, 4))
    write_golden(path / "golden.safetensors", [golden().inputs], [golden().outputs])
    report = verify(path)
    assert verdicts(report) == {"model.b1.mlir": "ok", "model.b4.mlir": "ok"}
    assert report.passed(strict=True)
    assert report.against == "golden"


def test_a_bundle_without_goldens_fails_and_says_how_to_get_some(tmp_path: Path, verify: Any) -> None:
    report = verify(write_affine(tmp_path / "net"))
    assert not report.passed()
    assert "--golden N" in str(report.problem)
    assert report.as_check().errors[0].check == "bundle"


def test_each_sample_is_reported_by_itself(tmp_path: Path, verify: Any) -> None:
    path = write_affine(tmp_path / "net", batch_sizes=(2,))
    report = verify(path, goldens=[golden(), golden(3, off=0.1), golden(2)])
    (program,) = report.programs
    assert {index: parity.ok for index, parity in program.samples.items()} == {0: True, 1: False, 2: True}
    assert program.verdict == "mismatch"
    assert not report.passed()
    assert program.to_json()["passed"] == 2
    assert verify(path, goldens=[golden(), golden(3, off=0.1)], limit=1).passed()


def test_only_the_wanted_batch_sizes_run(tmp_path: Path, verify: Any) -> None:
    path = write_affine(tmp_path / "net", batch_sizes=(1, 2, 8))
    assert list(verdicts(verify(path, goldens=[golden()], batches=[8, 1]))) == ["model.b1.mlir", "model.b8.mlir"]
    with pytest.raises(UsageError, match="no program for batch size 3; sizes: 1, 2, 8"):
        verify(path, goldens=[golden()], batches=[3])


def test_a_sweep_makes_samples_of_the_shape_of_each_program(tmp_path: Path, verify: Any) -> None:
    shapes = []

    def sweep(inputs: Sequence[SizedInput]) -> list[Golden]:
        ((spec, shape),) = inputs
        shapes.append((spec.name, shape))
        return [golden(shape[0])]

    report = verify(write_affine(tmp_path / "net", batch_sizes=(1, 8)), sweep=sweep, against="jax:m:f")
    assert shapes == [("x", (1, 3)), ("x", (8, 3))]
    assert report.passed(strict=True)
    assert report.to_json()["against"] == "jax:m:f"


def test_a_sweep_asks_the_program_where_only_it_knows_its_batch_extent(tmp_path: Path, verify: Any) -> None:
    shapes = []

    def sweep(inputs: Sequence[SizedInput]) -> list[Golden]:
        shapes.append(inputs[0][1])
        return [golden(inputs[0][1][0])]

    assert verify(write_affine(tmp_path / "net", batch_sizes=None), sweep=sweep).passed(strict=True)
    assert shapes == [(1, 3)]


def test_an_original_that_fails_is_the_problem_of_that_program(tmp_path: Path, verify: Any) -> None:
    def sweep(inputs: Sequence[SizedInput]) -> list[Golden]:
        if inputs[0][1][0] == 8:
            raise ExportError("the original only takes up to 4 rows")
        return [golden(inputs[0][1][0])]

    report = verify(write_affine(tmp_path / "net", batch_sizes=(1, 8)), sweep=sweep)
    assert verdicts(report) == {"model.b1.mlir": "ok", "model.b8.mlir": "failed"}
    assert report.programs[1].problem == "the original only takes up to 4 rows"


def test_a_program_that_ends_its_process_fails_alone(tmp_path: Path, verify: Any) -> None:
    path = write_affine(tmp_path / "net", batch_sizes=(1, 2))
    depth = 30_000
    opened = "".join(f'%r{k} = "stablehlo.case"(%i) ({{\n' for k in range(depth))
    closed = "".join(
        f"stablehlo.return {f'%r{k + 1}' if k + 1 < depth else '%x'} : tensor<1x3xf32>\n"
        "}) : (tensor<i32>) -> tensor<1x3xf32>\n"
        for k in reversed(range(depth))
    )
    (path / "model.b1.mlir").write_text(
        "func.func public @main(%x: tensor<1x3xf32>, %i: tensor<i32>) -> tensor<1x3xf32> {\n"
        f"{opened}{closed}return %r0 : tensor<1x3xf32>\n}}"
    )
    seal(path)
    report = verify(path, goldens=[golden()])
    assert verdicts(report) == {"model.b1.mlir": "failed", "model.b2.mlir": "ok"}
    assert "ended its process" in str(report.programs[0].problem)


def test_a_program_that_differs_from_its_digest_is_not_run(tmp_path: Path, verify: Any) -> None:
    path = write_affine(tmp_path / "net", batch_sizes=(1,))
    (path / "model.b1.mlir").write_bytes(b"junk")
    report = verify(path, goldens=[golden()])
    assert verdicts(report) == {"model.b1.mlir": "failed"}
    assert "sha256" in str(report.programs[0].problem) or "bytes" in str(report.programs[0].problem)


def test_unproven_outputs_pass_unless_strict(tmp_path: Path, verify: Any) -> None:
    tensor = ((N, 3), np.float32)
    path = write_model(tmp_path / "net", lambda x: (x * 0,), {"x": tensor}, {"y": tensor}, batch_sizes=(1,))
    report = verify(path, goldens=[Golden({"x": X}, {"y": 0 * X})])
    assert verdicts(report) == {"model.b1.mlir": "unproven"}
    assert report.passed()
    assert not report.passed(strict=True)


def test_programs_that_no_sample_fits_are_left_out_and_nothing_compared_is_no_success(
    tmp_path: Path, verify: Any
) -> None:
    tensor, total = ((N, 3), np.float32), ((3,), np.float32)
    path = write_model(tmp_path / "net", lambda x: (x.sum(0),), {"x": tensor}, {"y": total}, batch_sizes=(1, 2))
    report = verify(path, goldens=[Golden({"x": X}, {"y": X[0]})])
    assert [skipped.check for skipped in report.skipped] == ["model.b2.mlir"]
    assert report.passed()
    assert not report.passed(strict=True)
    report = verify(path, goldens=[Golden({"x": np.repeat(X, 5, 0)}, {"y": X[0] * 5})])
    assert not report.passed()


def test_a_sample_that_fits_nothing_is_the_bundles_problem(tmp_path: Path, verify: Any) -> None:
    report = verify(write_affine(tmp_path / "net"), goldens=[Golden({"z": X}, {"y": X})])
    assert "sample 0 has the inputs z, want x" in str(report.problem)


def test_a_meta_bundle_has_nothing_to_compare_and_passes(tmp_path: Path, verify: Any) -> None:
    path = tmp_path / "meta"
    path.mkdir()
    (path / "manifest.yaml").write_text(
        'format_version: "3.0"\nkind: meta\nmeta: {calls: []}\n'
        'client_inputs: [{name: "x", dtype: f32, shape: "n"}]\nclient_outputs: [{name: "y", dtype: f32, shape: "n"}]\n'
    )
    (path / "model.py").write_text("def run(inputs, call): return {'y': inputs['x']}\n")
    seal(path)
    report = verify(path, batches=[4])
    assert report.programs == []
    assert report.passed(strict=True)


def test_a_path_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        verify_bundle(tmp_path / "nothing")


def test_a_report_is_json_and_junit(tmp_path: Path, verify: Any) -> None:
    path = write_affine(tmp_path / "net", batch_sizes=(1, 2))
    report = verify(path, goldens=[golden(off=0.1)])
    text = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [program["verdict"] for program in text["programs"]] == ["mismatch", "mismatch"]
    assert text["programs"][1]["batch_size"] == 2
    xml = to_junit([report.as_check()], name="rsrv bundle verify")
    assert 'failures="2"' in xml
    assert "model.b1.mlir against golden" in xml


def specs(path: Path) -> Any:
    return open_bundle(path).manifest.executable_inputs


def test_samples_are_arrays_or_directories_and_get_a_missing_batch_axis(tmp_path: Path) -> None:
    net = write_affine(tmp_path / "net", batch_sizes=(1,))
    folder = tmp_path / "samples"
    folder.mkdir()
    np.save(folder / "a.npy", X[0])
    np.save(folder / "b.npy", np.repeat(X, 2, 0))
    (folder / "c").mkdir()
    np.save(folder / "c" / "x.npy", X)
    (folder / "notes.txt").write_text("not a sample")
    (folder / ".cache").mkdir()
    shapes = {name: sample["x"].shape for name, sample in read_samples(folder, specs(net)).items()}
    assert shapes == {"a.npy": (1, 3), "b.npy": (2, 3), "c": (1, 3)}
    assert len(read_samples(folder, specs(net), 2)) == 2


def test_samples_that_do_not_fit_are_named(tmp_path: Path) -> None:
    one = specs(write_affine(tmp_path / "net", batch_sizes=(1,)))
    tensor = ((N, 3), np.float32)
    both = specs(
        write_model(
            tmp_path / "two", lambda a, b: (a + b,), {"a": tensor, "b": tensor}, {"y": tensor}, batch_sizes=(1,)
        )
    )
    folder = tmp_path / "samples"
    with pytest.raises(UsageError, match="no such directory"):
        read_samples(folder, one)
    folder.mkdir()
    with pytest.raises(
        UsageError, match=r"holds no sample: looked for ANY\.npy \(f32\[n,3\]\), or a directory for each"
    ):
        read_samples(folder, one)
    with pytest.raises(UsageError, match=r"directory for each sample with a\.npy \(f32\[n,3\]\) and b\.npy"):
        read_samples(folder, both)
    np.save(folder / "a.npy", X.astype(np.float64))
    with pytest.raises(UsageError, match=r"a\.npy is float64, want f32\[n,3\]"):
        read_samples(folder, one)
    with pytest.raises(UsageError, match="is one array, but the bundle takes a, b"):
        read_samples(folder, both)
    (folder / "a.npy").write_bytes(b"junk")
    with pytest.raises(UsageError, match=r"is no \.npy file"):
        read_samples(folder, one)
    (folder / "a.npy").unlink()
    (folder / "s").mkdir()
    with pytest.raises(UsageError, match=r"s/x\.npy: no such file"):
        read_samples(folder, one)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ((1, 4), (1, 3), r"s/a\.npy has the shape \[1, 4\], want f32\[n,3\]"),
        ((1, 1, 3), (1, 3), r"s/a\.npy has the shape \[1, 1, 3\], want f32\[n,3\]"),
        ((2, 3), (1, 3), r"s has 2 rows of 'a', 1 rows of 'b'; want the same number"),
        ((0, 3), (0, 3), r"s has 0 rows of 'a'"),
    ],
)
def test_samples_of_other_sizes_are_refused_before_the_original_sees_them(
    tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...], said: str
) -> None:
    tensor = ((N, 3), np.float32)
    net = write_model(
        tmp_path / "two", lambda a, b: (a + b,), {"a": tensor, "b": tensor}, {"y": tensor}, batch_sizes=(1,)
    )
    (tmp_path / "samples" / "s").mkdir(parents=True)
    np.save(tmp_path / "samples/s/a.npy", np.ones(a, np.float32))
    np.save(tmp_path / "samples/s/b.npy", np.ones(b, np.float32))
    with pytest.raises(UsageError, match=said):
        read_samples(tmp_path / "samples", specs(net))
