"""`check_bundle` on bundles that are damaged in one way each: the finding, its rule, and nothing beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rsrv.audit import CheckReport, bundle_gate, check_bundle
from rsrv.bundle import IOSpec, seal, write_bundle
from rsrv.core.errors import BundleError, SignatureMismatch, UsageError
from rsrv.runtime import CompilePool
from rsrv.stablehlo import ProgramReport, serialize

W = np.arange(64, dtype=np.float32).reshape(4, 16)
GOOD = """
func.func public @main(%x: tensor<{n}x4xf32>, %w: tensor<4x16xf32>) -> tensor<{n}x16xf32> {{
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<{n}x4xf32>, tensor<4x16xf32>) -> tensor<{n}x16xf32>
  return %y : tensor<{n}x16xf32>
}}
"""
CALLING = """
func.func public @main(%x: tensor<{n}x4xf32>, %w: tensor<4x16xf32>) -> tensor<{n}x16xf32> {{
  %y = stablehlo.custom_call @{target}(%x, %w) : (tensor<{n}x4xf32>, tensor<4x16xf32>) -> tensor<{n}x16xf32>
  return %y : tensor<{n}x16xf32>
}}
"""


def program(template: str = GOOD, **values: object) -> bytes:
    return serialize(template.format(**{"n": 2, **values}))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a bundle without any gate."""

    def call(**changes: Any) -> Path:
        return write_bundle(
            tmp_path / "net",
            **{
                "name": "net",
                "executable_inputs": [IOSpec("x", "f32", (1, 4), batch_axis=0)],
                "executable_outputs": [IOSpec("y", "f32", (1, 16), batch_axis=0)],
                "modules": {n: program(n=n) for n in (2, 8)},
                "weights": [("w", W)],
                "overwrite": True,
                **changes,
            },
        )

    return call


def found(report: CheckReport) -> list[tuple[str, str, str | None, str | None]]:
    return [(finding.severity, finding.check, finding.rule, finding.file) for finding in report.findings]


def edit(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text())
    assert count == 1
    path.write_text(text)


def test_a_sound_bundle_has_no_finding_and_every_part_ran(write: Any, pool: CompilePool) -> None:
    report = check_bundle(write(), pool=pool)
    assert report.findings == []
    assert report.skipped == []
    assert report.passed(strict=True)
    assert report.checks == ["manifest", "files", "weights", "model.b2.mlir", "model.b8.mlir"]
    assert report.bundle == "net"


def test_a_check_starts_its_own_process_when_it_is_given_none(write: Any) -> None:
    assert check_bundle(write()).passed(strict=True)


def test_a_flipped_bit_in_a_program_is_found_and_the_program_not_parsed(write: Any) -> None:
    class NoParsing(CompilePool):
        def __init__(self) -> None: ...

        def inspect(self, program: bytes) -> ProgramReport:
            raise AssertionError("a damaged program was parsed")

    path = write(modules={2: program()})
    data = bytearray((path / "model.b2.mlir").read_bytes())
    data[-3] ^= 4
    (path / "model.b2.mlir").write_bytes(data)
    report = check_bundle(path, pool=NoParsing())
    assert found(report) == [("error", "files", "B-15a", "model.b2.mlir")]
    assert [(s.check, s.reason) for s in report.skipped] == [
        ("model.b2.mlir", "it differs from its digest, so it was not parsed")
    ]


def test_a_program_that_cannot_be_read_is_found_even_when_its_digest_is_right(write: Any, pool: CompilePool) -> None:
    path = write(modules={2: program()[:-40]})
    report = check_bundle(path, pool=pool)
    assert found(report) == [("error", "model.b2.mlir", None, "model.b2.mlir")]
    assert report.findings[0].message.startswith("model.b2.mlir: program cannot be read")


def nested(depth: int) -> bytes:
    """A program so deep that the parser's stack overflows."""
    head = "func.func public @main(%x: tensor<2x4xf32>, %i: tensor<i32>) -> tensor<2x4xf32> {\n"
    opened = "".join(f'%r{k} = "stablehlo.case"(%i) ({{\n' for k in range(depth))
    closed = "".join(
        f"stablehlo.return {f'%r{k + 1}' if k + 1 < depth else '%x'} : tensor<2x4xf32>\n"
        "}) : (tensor<i32>) -> tensor<2x4xf32>\n"
        for k in reversed(range(depth))
    )
    return f"{head}{opened}{closed}return %r0 : tensor<2x4xf32>\n}}".encode()


def test_a_program_that_ends_the_process_that_parses_it_is_a_finding_and_the_next_is_checked(
    write: Any, pool: CompilePool
) -> None:
    report = check_bundle(write(modules={2: nested(30_000), 8: program(n=8)}), pool=pool)
    assert [(f.check, f.severity) for f in report.findings] == [("model.b2.mlir", "error")]
    assert "ended its process" in report.findings[0].message
    assert report.checks[-1] == "model.b8.mlir"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"executable_inputs": [IOSpec("x", "f64", (1, 4), batch_axis=0)]},
            "argument 0 is f32[2,4], but input 'x' is declared as f64[2,4]",
        ),
        (
            {"executable_outputs": [IOSpec("y", "f32", (1, 17), batch_axis=0)]},
            "result 0 is f32[2,16], but output 'y' is declared as f32[2,17]",
        ),
        ({"weights": [("w", W.T)]}, "argument 1 is f32[4,16], but weight 'w' is declared as f32[16,4]"),
        ({"weights": []}, "takes 2 arguments, but 1 inputs + 0 weights = 1 are declared: 1 surplus"),
        ({"modules": {2: program(n=3)}}, "argument 0 is f32[3,4], but input 'x' is declared as f32[2,4]"),
    ],
)
def test_every_argument_and_result_is_compared(write: Any, pool: CompilePool, changes: Any, says: str) -> None:
    report = check_bundle(write(**{"modules": {2: program()}, **changes}), pool=pool)
    assert {(f.severity, f.check, f.rule) for f in report.findings} == {("error", "model.b2.mlir", "B-11")}
    assert says in report.findings[0].message


def test_every_program_is_looked_at(write: Any, pool: CompilePool) -> None:
    report = check_bundle(write(modules={2: program(n=3), 4: program(n=4), 8: b"junk"}), pool=pool)
    assert sorted({f.file for f in report.errors}) == ["model.b2.mlir", "model.b8.mlir"]


def test_a_manifest_with_mistakes_reports_all_of_them_and_programs_are_still_read(
    write: Any, pool: CompilePool
) -> None:
    path = write(modules={2: program(), 8: b"junk"})
    edit(path / "manifest.yaml", "axis_order: row_major", "axis_ordr: row_major")
    edit(path / "manifest.yaml", 'dtype: f32, shape: "na", dims: {a: 16}', 'dtype: f23, shape: "na", dims: {a: 16}')
    report = check_bundle(path, pool=pool)
    assert {(f.check, f.rule) for f in report.errors} == {
        ("manifest", "B-13"),
        ("manifest", "B-56"),
        ("model.b8.mlir", None),
    }
    assert [s.check for s in report.skipped] == ["model.b2.mlir signature", "model.b8.mlir signature"]


def test_without_a_manifest_weights_and_hooks_are_still_checked(write: Any, pool: CompilePool) -> None:
    path = write(hooks="def preprocess(inputs):\n    return inputs\n")
    (path / "manifest.yaml").unlink()
    (path / "model.py").write_text("def preprocess(:\n")
    (path / "weights.safetensors").write_bytes(b"short")
    report = check_bundle(path, pool=pool)
    assert {(f.check, f.rule) for f in report.errors} == {("manifest", "B-1"), ("weights", "B-60"), ("hooks", "B-71")}
    assert [s.check for s in report.skipped] == ["programs"]


def test_a_missing_and_an_undeclared_program_are_both_found(write: Any, pool: CompilePool) -> None:
    path = write()
    (path / "model.b8.mlir").rename(path / "model.b9.mlir")
    report = check_bundle(path, pool=pool)
    assert {("error", "files", "B-32", "model.b8.mlir"), ("error", "files", "B-33", "model.b9.mlir")} <= set(
        found(report)
    )
    assert "model.b2.mlir" in report.checks


def test_weights_that_cannot_be_read_leave_the_comparison_of_inputs_and_results(write: Any, pool: CompilePool) -> None:
    path = write(modules={2: program(n=3)})
    data = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(data[:-7])
    seal(path)
    report = check_bundle(path, pool=pool)
    assert {(f.check, f.rule) for f in report.errors} == {("weights", "B-60"), ("model.b2.mlir", "B-11")}
    assert [s.check for s in report.skipped] == ["model.b2.mlir weight arguments"]


def test_missing_weights_are_found(write: Any, pool: CompilePool) -> None:
    path = write(modules={2: program()})
    (path / "weights.safetensors").unlink()
    report = check_bundle(path, pool=pool)
    assert ("error", "files", "B-58", "weights.safetensors") in found(report)


def test_replaced_weights_are_a_warning_until_their_own_digests_lie(write: Any, pool: CompilePool) -> None:
    path, other = write(modules={2: program()}), None
    before = (path / "weights.safetensors").read_bytes()
    other = write(modules={2: program()}, weights=[("w", 2 * W)])
    replaced = check_bundle(_with_weights(other, before), pool=pool)
    assert found(replaced) == [("warning", "files", "B-15a", "weights.safetensors")]
    assert replaced.passed()
    assert not replaced.passed(strict=True)
    rotten = bytearray(before)
    rotten[-1] ^= 1
    report = check_bundle(_with_weights(other, bytes(rotten)), pool=pool)
    assert ("error", "weights", "B-58a", "weights.safetensors") in found(report)
    assert "tensor 'w' has sha256" in report.errors[0].message


def _with_weights(path: Path, data: bytes) -> Path:
    (path / "weights.safetensors").write_bytes(data)
    return path


def test_weights_that_the_stock_library_wrote_are_fine_but_copied_at_load(write: Any, pool: CompilePool) -> None:
    path = write(modules={2: program()})
    file = path / "weights.safetensors"
    for padding in range(8):  # the stock library aligns to 8 bytes, so one of these is not at a multiple of 64
        metadata = {"argument_order": '["w"]', "note": "x" * (8 * padding + 1)}
        safetensors.numpy.save_file({"w": W}, file, metadata=metadata)
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64:
            break
    seal(path)
    report = check_bundle(path, pool=pool)
    assert found(report) == [("warning", "weights", "B-58a", "weights.safetensors")]
    assert "1 tensors (256 bytes), the first of them 'w'" in report.findings[0].message


def test_hooks_are_compiled_and_read_but_never_run(write: Any, pool: CompilePool, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    source = f"open({str(trace)!r}, 'w').close()\ndef preprocess(inputs):\n    return inputs\n"
    report = check_bundle(write(hooks=source), pool=pool)
    assert report.passed(strict=True)
    assert "hooks" in report.checks
    assert not trace.exists()


@pytest.mark.parametrize(
    ("source", "severity", "rule"),
    [
        ("def preprocess(:\n", "error", "B-71"),
        ("def run(inputs, call):\n    return inputs\n", "error", "B-72"),
        ("x = 1\n", "error", "B-72"),
        ("import os\nif os.environ.get('HOOKS'):\n    register_model(preprocess=len)\n", "warning", "B-72"),
    ],
)
def test_hooks_that_cannot_work_are_found(write: Any, pool: CompilePool, source: str, severity: str, rule: str) -> None:
    path = write(hooks="def preprocess(inputs):\n    return inputs\n")
    (path / "model.py").write_text(source)
    seal(path)
    assert found(check_bundle(path, pool=pool)) == [(severity, "hooks", rule, "model.py")]


@pytest.mark.parametrize(
    ("target", "severity", "says"),
    [
        ("xla_ffi_python_cpu_callback", "error", "points into the Python process"),
        ("my_kernel", "error", "calls 'my_kernel', which no server knows"),
        ("lapack_sgetrf_ffi", "warning", "'lapack_sgetrf_ffi' exists on cpu only"),
        ("cu_threefry2x32_ffi", "warning", "'cu_threefry2x32_ffi' exists on cuda only"),
        ("Sharding", "warning", "custom call 'Sharding'"),
    ],
)
def test_custom_calls_are_named(write: Any, pool: CompilePool, target: str, severity: str, says: str) -> None:
    report = check_bundle(write(modules={2: program(CALLING, target=target)}), pool=pool)
    assert found(report) == [(severity, "model.b2.mlir", None, "model.b2.mlir")]
    assert says in report.findings[0].message


def test_a_program_that_asks_to_overwrite_its_arguments_is_a_warning(write: Any, pool: CompilePool) -> None:
    text = GOOD.format(n=2).replace("%w: tensor<4x16xf32>", "%w: tensor<4x16xf32> {jax.buffer_donor = true}")
    report = check_bundle(write(modules={2: text.encode()}), pool=pool)
    assert found(report) == [("warning", "model.b2.mlir", "B-8", "model.b2.mlir")]


def test_a_symbolic_program_is_checked_once(write: Any, pool: CompilePool) -> None:
    path = write(modules={0: program(n="?")}, dynamic_batch_sizes=[1, 8])
    report = check_bundle(path, pool=pool)
    assert report.passed(strict=True), report.to_json()
    assert report.checks.count("model.mlir") == 1


def test_every_shape_variant_is_compared_with_its_own_sizes(write: Any, pool: CompilePool) -> None:
    text = "func.func public @main(%x: tensor<2x{h}xf32>) -> tensor<2x{h}xf32> {{ return %x : tensor<2x{h}xf32> }}"
    path = write(
        executable_inputs=[IOSpec("x", "f32", (1, -1), batch_axis=0)],
        executable_outputs=[IOSpec("y", "f32", (1, -1), batch_axis=0)],
        input_shapes=[[3], [5]],
        modules={(3,): {2: program(text, h=3)}, (5,): {2: program(text, h=4)}},
        weights=[],
    )
    report = check_bundle(path, pool=pool)
    assert [f.message for f in report.findings] == [
        "model.v1.b2.mlir argument 0 is f32[2,4], but input 'x' is declared as f32[2,5]"
    ]


def test_a_single_program_with_another_batch_size_than_declared_is_found(write: Any, pool: CompilePool) -> None:
    path = write(modules={0: program(n=4)})
    assert check_bundle(path, pool=pool).passed(strict=True)
    edit(path / "manifest.yaml", r"compiled_batch_sizes: \[\]", "compiled_batch_sizes: [8]")
    report = check_bundle(path, pool=pool)
    assert [f.rule for f in report.errors] == ["B-11"]
    assert "B-34" in report.errors[0].message


def test_a_bundle_without_digests_is_a_warning(write: Any, pool: CompilePool) -> None:
    path = write(modules={2: program()})
    text = (path / "manifest.yaml").read_text()
    (path / "manifest.yaml").write_text(text[: text.index("files:")])
    report = check_bundle(path, pool=pool)
    assert found(report) == [("warning", "files", "B-15a", None)]
    assert "seal" in str(report.findings[0].hint)


def test_a_further_file_that_nobody_sealed_is_a_warning(write: Any, pool: CompilePool) -> None:
    path = write(modules={2: program()})
    (path / "vocab.txt").write_text("a\n")
    assert found(check_bundle(path, pool=pool)) == [("warning", "files", "B-15a", "vocab.txt")]


def test_a_meta_bundle_has_no_programs_to_check(tmp_path: Path, pool: CompilePool) -> None:
    path = tmp_path / "meta"
    path.mkdir()
    (path / "model.py").write_text("def run(inputs, call):\n    return inputs\n")
    (path / "manifest.yaml").write_text(
        'format_version: "3.0"\nkind: meta\nmeta: {calls: [net]}\n'
        'client_inputs: [{name: x, dtype: f32, shape: "n"}]\nclient_outputs: [{name: y, dtype: f32, shape: "n"}]\n'
    )
    seal(path)
    report = check_bundle(path, pool=pool)
    assert report.passed(strict=True), report.to_json()
    assert report.checks == ["manifest", "files", "hooks"]


def test_without_the_bindings_programs_are_skipped_and_never_passed(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rsrv.audit.check.bindings_missing", lambda: "jaxlib is not installed")
    report = check_bundle(write())
    assert [s.check for s in report.skipped] == ["model.b2.mlir", "model.b8.mlir"]
    assert not set(report.checks) & {"model.b2.mlir", "model.b8.mlir"}
    assert report.passed()
    assert not report.passed(strict=True)


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        check_bundle(tmp_path / "absent")


def test_the_gate_lets_a_sound_bundle_pass_and_refuses_others_before_they_appear(
    write: Any, pool: CompilePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = bundle_gate(pool)
    path = write(gate=gate)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(SignatureMismatch, match="argument 0 is f32") as raised:
        write(gate=gate, modules={2: program(n=3)})
    assert raised.value.file == "model.b2.mlir"
    with pytest.raises(BundleError, match="points into the Python process"):
        write(gate=gate, modules={2: program(CALLING, target="xla_python_cpu_callback")})
    monkeypatch.setattr("rsrv.audit.check.bindings_missing", lambda: "jaxlib is not installed")
    with pytest.raises(BundleError, match=r"model\.b2\.mlir cannot be checked: jaxlib is not installed"):
        write(gate=gate)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["net"]
