"""``dynamic_batch=True``: one program with a symbolic batch axis, or the reason why there is none."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.bundle import open_bundle
from rsrv.core.errors import ExportError
from rsrv.export import export_bundle
from rsrv.runtime import CompilePool, PjrtDevice, execute
from rsrv.stablehlo import report, specialised

W = np.arange(12, dtype=np.float32).reshape(3, 4) / 10


@pytest.fixture
def export(tmp_path: Path, pool: CompilePool) -> Any:
    def call(fn: Any, inputs: Any = "x=f32[1,3]", **options: Any) -> Path:
        options = {"batch_sizes": (1, 4), "collect_git": False, "pool": pool, **options}
        return export_bundle("jax", fn, {"w": W}, inputs, dir=tmp_path / "net", dynamic_batch=True, **options)

    return call


def answers(device: PjrtDevice, path: Path, batch: int, *inputs: np.ndarray) -> list[np.ndarray]:
    return execute(device, device.compile(specialised((path / "model.mlir").read_bytes(), batch)), [*inputs, W])


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_one_program_computes_what_jax_jit_computes_at_any_size(export: Any, device: PjrtDevice, batch: int) -> None:
    def fn(params: Any, x: Any) -> Any:
        return {"y": jax.nn.relu(x @ params["w"]), "mean": x.mean(1), "index": jnp.argmax(x, 1)}

    path = export(fn)
    x = np.random.default_rng(batch).standard_normal((batch, 3), dtype=np.float32)
    wanted = jax.jit(fn)({"w": W}, x)
    for name, found in zip(["y", "mean", "index"], answers(device, path, batch, x), strict=True):
        np.testing.assert_allclose(found, wanted[name], rtol=1e-6)


def test_the_manifest_lists_the_sizes_and_the_program_has_one_symbol(export: Any) -> None:
    path = export(lambda p, x, y: (x + y) @ p["w"], ("x=f32[1,3]", "y=f32[1,3]"), batch_sizes=(8, 2))
    bundle = open_bundle(path)
    assert bundle.manifest.batching.dynamic
    assert bundle.manifest.batching.compiled_batch_sizes == (2, 8)
    assert bundle.manifest.provenance["batch_export"] == "symbolic"
    assert [file.name for file in bundle.program_files()] == ["model.mlir"]
    found = report((path / "model.mlir").read_bytes())
    assert [str(tensor) for tensor in found.signature.arguments] == ["f32[?,3]", "f32[?,3]", "f32[3,4]"]
    assert found.custom_calls == ()


def test_a_batch_axis_may_lie_anywhere(export: Any, device: PjrtDevice) -> None:
    path = export(lambda p, x: p["w"].T @ x, "x=f32[3,1]", input_batch_axes=[-1])
    x = np.ones((3, 5), np.float32)
    (found,) = answers(device, path, 5, x)
    np.testing.assert_allclose(found, W.T @ x, rtol=1e-6)


def test_every_shape_variant_has_one_program(export: Any) -> None:
    variants = ["x=f32[1,5,3]", "x=f32[1,7,3]"]
    path = export(lambda p, x: (x @ p["w"]).sum(1), None, shape_variants=variants, golden=1)
    assert [file.name for file in open_bundle(path).program_files()] == ["model.v0.mlir", "model.v1.mlir"]


def test_a_captured_table_becomes_a_weight_all_the_same(export: Any) -> None:
    table = jnp.asarray(np.random.default_rng(0).standard_normal((3, 30)), jnp.float32)
    path = export(lambda p, x: (x @ table)[:, :4] + x @ p["w"])
    arguments = report((path / "model.mlir").read_bytes()).signature.arguments
    assert [str(tensor) for tensor in arguments] == ["f32[?,3]", "f32[3,4]", "f32[3,30]"]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda p, x: x @ p["w"] * (2 if x.shape[0] > 4 else 3), "dimension comparison 'b' > '4' is inconclusive"),
        (lambda p, x: x @ p["w"] + np.ones((x.shape[0], 4), np.float32), "batch size b raised"),
    ],
)
def test_a_model_in_which_the_number_matters_is_refused(export: Any, fn: Any, why: str) -> None:
    with pytest.raises(ExportError, match="no program for every batch size: tracing the function") as raised:
        export(fn)
    assert why in raised.value.message
    assert raised.value.hint == "without dynamic_batch (--dynamic-batch) every batch size gets a program of its own"


def test_rows_are_proven_independent_here_too(export: Any) -> None:
    with pytest.raises(ExportError, match="depends on the other rows of its batch"):
        export(lambda p, x: (x - x.mean(0)) @ p["w"])


def test_a_symbolic_batch_axis_needs_batch_sizes(export: Any) -> None:
    with pytest.raises(ExportError, match="dynamic_batch wants the batch sizes that a server is to compile"):
        export(lambda p, x: x @ p["w"], batch_sizes=None)
