"""Seeded samples that are the same everywhere, and the goldens that the JAX front end stores and proves itself by."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.audit import AuditProcess, verify_bundle
from rsrv.bundle import load_manifest
from rsrv.bundle.golden import read_golden
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError, ParityMismatch, UsageError
from rsrv.export import export_bundle
from rsrv.export.golden import golden_batches, make_samples, parse_range
from rsrv.export.inputs import Example
from rsrv.runtime import CompilePool

EVERY_DTYPE = [Example(dtype.value, dtype, (2, 5), 0) for dtype in DType]
PARAMS = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)}


def model(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"])


def digest(samples: list[dict[str, np.ndarray]]) -> str:
    hasher = hashlib.sha256()
    for sample in samples:
        for name, array in sample.items():
            hasher.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return hasher.hexdigest()


def test_samples_are_pinned_bit_by_bit_so_that_no_upgrade_changes_them_unnoticed() -> None:
    assert digest(make_samples(EVERY_DTYPE, 2, 7)) == (
        "a474d0badf44add659366fe0f7886acd9713000c64e56e86d40da638d5648877"
    )


def test_samples_have_the_dtypes_and_shapes_of_their_inputs() -> None:
    (sample,) = make_samples(EVERY_DTYPE, 1, 7)
    for example in EVERY_DTYPE:
        array = sample[example.name]
        assert (array.dtype, array.shape) == (example.dtype.numpy, (2, 5))
        assert array.flags.c_contiguous


def test_another_seed_another_sample_and_another_input_have_other_values() -> None:
    one = Example("a", DType.F32, (8,), None)
    first, second = make_samples([one, Example("b", DType.F32, (8,), None)], 2, 1)
    (other,) = make_samples([one], 1, 2)
    arrays = [first["a"], first["b"], second["a"], other["a"]]
    assert len({array.tobytes() for array in arrays}) == 4
    assert make_samples([one], 1, 1)[0]["a"].tobytes() == first["a"].tobytes()


def test_floats_are_from_minus_one_to_one_and_integers_small() -> None:
    examples = [Example("f", DType.F32, (1000,), None), Example("i", DType.I64, (1000,), None)]
    (sample,) = make_samples(examples, 1, 3)
    assert sample["f"].min() < -0.9
    assert 0.9 < sample["f"].max() < 1
    assert (sample["i"].min(), sample["i"].max()) == (0, 64)


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [
        (DType.I8, (-128, 127)),
        (DType.U8, (250, 255)),
        (DType.I64, (-(2**63), 2**63 - 1)),
        (DType.U64, (2**63, 2**64 - 1)),
        (DType.I32, (5, 5)),
        (DType.F64, (10, 11)),
    ],
)
def test_values_stay_in_the_given_range(dtype: DType, bounds: tuple[int, int]) -> None:
    (sample,) = make_samples([Example("x", dtype, (300,), None)], 1, 3, {"x": bounds})
    values = [v if dtype is DType.F64 else int(v) for v in sample["x"]]
    assert bounds[0] <= min(values)
    assert max(values) <= bounds[1]
    if dtype is not DType.I32:
        assert len(set(values)) > 5


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ({"y": (0, 1)}, "names 'y'; the inputs are x, flag"),
        ({"x": (0, 300)}, "is u8, which reaches from 0 to 255"),
        ({"x": (-1, 3)}, "not from -1 to 3"),
        ({"x": (3, 1)}, "which is empty"),
        ({"x": (0.5, 2)}, "not from 0.5 to 2"),
        ({"flag": (0, 1)}, "is bool, which has no range"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(ranges: Any, says: str) -> None:
    inputs = [Example("x", DType.U8, (1,), None), Example("flag", DType.BOOL, (1,), None)]
    with pytest.raises(ExportError, match=says):
        make_samples(inputs, 1, 0, ranges)


def test_ranges_are_read_from_the_command_line() -> None:
    assert parse_range("ids=0:30521") == ("ids", (0, 30521))
    assert parse_range("x=-1.5:2") == ("x", (-1.5, 2))
    for text in ("ids", "ids=5", "=0:1", "ids=a:b", "ids=3:1", "ids=nan:1"):
        with pytest.raises(UsageError, match="NAME=LOW:HIGH"):
            parse_range(text)


def test_one_row_is_enough_where_rows_are_independent() -> None:
    assert golden_batches([1, 8], coalesces=True) == (1,)
    assert golden_batches([1, 8], coalesces=False) == (1, 8)
    assert golden_batches(None, coalesces=False) == (None,)


@pytest.fixture(scope="module")
def process() -> Iterator[AuditProcess]:
    with AuditProcess(backend="cpu") as process:
        yield process


@pytest.fixture
def export(pool: CompilePool) -> Any:
    def call(path: Path, fn: Any, inputs: Any, params: Any = PARAMS, **options: Any) -> Path:
        defaults = {"dir": path, "collect_git": False, "golden": 2, "pool": pool}
        return export_bundle("jax", fn, params, inputs, **{**defaults, **options})

    return call


def test_an_export_stores_what_jax_answers_and_says_how_it_was_proved(
    tmp_path: Path, export: Any, process: AuditProcess
) -> None:
    path = export(tmp_path / "net", model, {"x": np.zeros((1, 4), np.float32)}, batch_sizes=[1, 4])
    goldens = read_golden(path / "golden.safetensors")
    assert len(goldens) == 2
    for golden in goldens:
        assert golden.inputs["x"].shape == (1, 4)
        np.testing.assert_array_equal(golden.outputs["output"], jax.jit(model)(PARAMS, golden.inputs["x"]))
    manifest = load_manifest(path)
    assert manifest.provenance["parity"] == {"samples": 2, "seed": 1234, "tolerances": {"f32": 1e-5}}
    assert manifest.files is not None
    assert "golden.safetensors" in manifest.files
    assert verify_bundle(path, process=process).passed(strict=True)


def test_without_golden_nothing_is_stored(tmp_path: Path, export: Any) -> None:
    path = export(tmp_path / "net", model, {"x": np.zeros((1, 4), np.float32)}, golden=0)
    assert not (path / "golden.safetensors").exists()
    assert "parity" not in load_manifest(path).provenance


def test_a_function_that_answers_differently_when_it_is_called_again_is_refused(tmp_path: Path, export: Any) -> None:
    calls: list[int] = []

    def unsteady(params: Any, x: Any) -> Any:
        calls.append(1)
        return x @ params["w"] * len(calls)

    with pytest.raises(ParityMismatch, match="does not compute what the framework computed"):
        export(tmp_path / "net", unsteady, {"x": np.zeros((1, 4), np.float32)})
    assert list(tmp_path.iterdir()) == []


def test_rows_that_depend_on_each_other_are_refused_although_the_shapes_look_right(tmp_path: Path, export: Any) -> None:
    def normalised(params: Any, x: Any) -> Any:
        return (x - x.mean(0, keepdims=True)) @ params["w"] + 1

    with pytest.raises(ParityMismatch, match=r"model\.b4\.mlir"):
        export(tmp_path / "net", normalised, {"x": np.zeros((1, 4), np.float32)}, batch_sizes=[1, 4], row_check=False)


def test_an_output_without_a_batch_axis_gets_goldens_for_every_size(
    tmp_path: Path, export: Any, process: AuditProcess
) -> None:
    path = export(
        tmp_path / "net",
        lambda params, x: (x @ params["w"]).sum(0),
        {"x": np.zeros((1, 4), np.float32)},
        batch_sizes=[1, 3],
    )
    assert [golden.inputs["x"].shape[0] for golden in read_golden(path / "golden.safetensors")] == [1, 1, 3, 3]
    report = verify_bundle(path, process=process)
    assert [len(program.samples) for program in report.programs] == [2, 2]
    assert report.passed(strict=True)


def test_a_program_without_a_batch_axis_has_goldens_too(tmp_path: Path, export: Any, process: AuditProcess) -> None:
    path = export(tmp_path / "net", model, {"x": np.zeros((5, 4), np.float32)}, batch_sizes=None)
    assert verify_bundle(path, process=process).passed(strict=True)


def test_inputs_that_are_left_out_are_not_in_the_goldens(tmp_path: Path, export: Any, process: AuditProcess) -> None:
    path = export(
        tmp_path / "net",
        lambda params, x, unused: x @ params["w"],
        {"x": np.zeros((1, 4), np.float32), "unused": np.zeros((1, 2), np.float32)},
        drop_unused_inputs=True,
    )
    assert list(read_golden(path / "golden.safetensors")[0].inputs) == ["x"]
    assert verify_bundle(path, process=process).passed(strict=True)


def test_integers_are_drawn_from_the_given_range(tmp_path: Path, export: Any) -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = export(
        tmp_path / "net",
        lambda params, ids: params["table"][ids],
        {"ids": np.zeros((1, 50), np.int32)},
        {"table": table},
        input_ranges={"ids": (0, 2)},
    )
    for golden in read_golden(path / "golden.safetensors"):
        assert set(golden.inputs["ids"].ravel().tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "look_up",
    [
        lambda params, ids: params["table"][ids],
        lambda params, ids: jnp.take(params["table"], ids.T, axis=0).swapaxes(0, 1),
        lambda params, ids: jax.jit(lambda table, i: table[i[:, ::-1]])(params["table"], ids.astype(jnp.int32)),
    ],
)
def test_integers_that_index_a_table_are_drawn_from_its_rows(tmp_path: Path, export: Any, look_up: Any) -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = export(tmp_path / "net", look_up, {"ids": np.zeros((1, 50), np.int32)}, {"table": table})
    for golden in read_golden(path / "golden.safetensors"):
        assert set(golden.inputs["ids"].ravel().tolist()) == {0, 1, 2}
    assert load_manifest(path).provenance["parity"]["ranges"] == {"ids": [0, 2]}


def test_every_shape_variant_has_goldens(tmp_path: Path, export: Any, process: AuditProcess) -> None:
    path = export(
        tmp_path / "net",
        lambda params, x: jnp.cumsum(x, -1) * params["w"][0, 0],
        None,
        shape_variants=[{"x": np.zeros((1, size), np.float32)} for size in (3, 5)],
        batch_sizes=[1, 2],
    )
    assert [golden.inputs["x"].shape for golden in read_golden(path / "golden.safetensors")] == [
        (1, 3),
        (1, 3),
        (1, 5),
        (1, 5),
    ]
    report = verify_bundle(path, process=process)
    assert [len(program.samples) for program in report.programs] == [2, 2, 2, 2]
    assert report.passed(strict=True)


def test_64_bit_models_are_proved_with_64_bits(tmp_path: Path, export: Any, process: AuditProcess) -> None:
    path = export(
        tmp_path / "net",
        lambda params, x: x @ params["w"],
        {"x": np.zeros((1, 4), np.float64)},
        {"w": PARAMS["w"].astype(np.float64) / 3},
        x64=True,
    )
    assert load_manifest(path).provenance["parity"]["tolerances"] == {"f64": 1e-12}
    assert verify_bundle(path, process=process).passed(strict=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"golden": -1}, "golden is -1"),
        ({"golden": True}, "golden is True"),
        ({"extra_files": {"golden.safetensors": b""}}, "which golden=2 writes"),
        ({"input_ranges": {"z": (0, 1)}}, "names 'z'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, export: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ExportError, match=says):
        export(tmp_path / "net", model, {"x": np.zeros((1, 4), np.float32)}, **options)
    assert list(tmp_path.iterdir()) == []


EXPORT = """
import sys
import numpy as np, jax.numpy as jnp
from rsrv.export import export_bundle
w = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
export_bundle(
    "jax", lambda p, x, i: {"y": jnp.tanh(x @ p["w"]) @ p["w"], "z": p["w"][i].sum(-1)}, {"w": w},
    {"x": np.zeros((1, 64), np.float32), "i": np.zeros((1,), np.int32)},
    dir=sys.argv[1], batch_sizes=[1, 4], golden=3, input_ranges={"i": (0, 63)}, collect_git=False,
)
"""


def test_two_processes_write_the_same_goldens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is this one, with another hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", EXPORT, str(tmp_path / "1" / "net")]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "2" / "net")])
    exec(EXPORT, {})
    one, other = (tmp_path / seed / "net" / "golden.safetensors" for seed in ("1", "2"))
    assert one.read_bytes() == other.read_bytes()
