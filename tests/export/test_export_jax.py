"""`export_bundle("jax" | "jax-fn")` on small functions: what ends up in the bundle, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from rsrv.bundle import IOSpec, open_bundle, read_header
from rsrv.core.errors import BundleError, ExportError, ManifestError, SignatureMismatch
from rsrv.export import export_bundle
from rsrv.runtime import CompilePool, PjrtDevice, execute
from rsrv.stablehlo import ProgramReport, ProgramSignature, TensorType, parse
from rsrv.stablehlo.artifact import DEFAULT_VERSION, artifact_version

W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
X = "x=f32[1,4]"


@pytest.fixture
def export(tmp_path: Path, pool: CompilePool) -> Any:
    def call(fn: Any, params: Any = None, inputs: Any = X, **options: Any) -> Path:
        return export_bundle(
            "jax", fn, params, inputs, **{"dir": tmp_path / "net", "collect_git": False, "pool": pool, **options}
        )

    return call


def linear(params: Any, x: Any) -> Any:
    return x @ params["w"]


def programs(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.mlir"))


def signature(path: Path, pool: CompilePool, file: str = "model.b1.mlir") -> ProgramSignature:
    return pool.inspect((path / file).read_bytes()).signature


def test_one_program_per_batch_size_is_written_in_ascending_order(export: Any, pool: CompilePool) -> None:
    path = export(linear, {"w": W}, batch_sizes=[np.int64(8), 1])
    assert programs(path) == ["model.b1.mlir", "model.b8.mlir"]
    assert open_bundle(path).manifest.batching.compiled_batch_sizes == (1, 8)
    assert [str(t) for t in signature(path, pool, "model.b8.mlir").arguments] == ["f32[8,4]", "f32[4,3]"]
    np.testing.assert_array_equal(load_file(path / "weights.safetensors")["w"], W)


def test_without_batch_sizes_there_is_one_program_with_the_examples_own_shapes(export: Any, pool: CompilePool) -> None:
    path = export(
        lambda p, x, s: x @ p["w"] * s,
        {"w": W},
        {"x": np.zeros((5, 4), "f4"), "s": 2.0 * np.ones(())},
        batch_sizes=None,
        x64=True,
    )
    assert programs(path) == ["model.mlir"]
    manifest = open_bundle(path).manifest
    assert manifest.batching.compiled_batch_sizes == ()
    assert [spec.describe() for spec in manifest.executable_inputs] == ["f32[5,4]", "f64[]"]
    assert [str(t) for t in signature(path, pool, "model.mlir").arguments] == ["f32[5,4]", "f64[]", "f32[4,3]"]


def test_exporting_again_with_fewer_sizes_leaves_no_stale_program(export: Any) -> None:
    export(linear, {"w": W}, batch_sizes=[1, 4, 8])
    path = export(linear, {"w": W}, batch_sizes=[4], overwrite=True)
    assert programs(path) == ["model.b4.mlir"]
    assert export(linear, {"w": W}, batch_sizes=None, overwrite=True) == path
    assert programs(path) == ["model.mlir"]


def test_an_existing_bundle_is_not_touched_without_overwrite(export: Any) -> None:
    path = export(linear, {"w": W})
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(ExportError, match="exists") as raised:
        export(linear, {"w": 2 * W})
    assert "overwrite" in str(raised.value.hint)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_batch_axis_may_be_anywhere(export: Any, pool: CompilePool, device: PjrtDevice) -> None:
    path = export(
        lambda p, x: (p["w"].T @ x, (x * 2).T),
        {"w": W},
        {"x": jax.ShapeDtypeStruct((4, 1), "float32")},
        input_batch_axes=[-1],
        output_names=["down", "up"],
        output_batch_axes={"down": -1},
        batch_sizes=[2],
        axis_letters={"x": "c", "up": "f"},
    )
    manifest = open_bundle(path).manifest
    assert [spec.letters for spec in manifest.executable_inputs] == ["cn"]
    assert [(spec.name, spec.letters, spec.batch_axis) for spec in manifest.executable_outputs] == [
        ("down", "an", 1),
        ("up", "nf", 0),
    ]
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    down, up = execute(device, device.compile((path / "model.b2.mlir").read_bytes()), [x, W])
    np.testing.assert_allclose(down, W.T @ x, rtol=1e-6)
    np.testing.assert_array_equal(up, 2 * x.T)


def test_an_output_that_is_not_what_was_declared_is_refused(export: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="output 'output' is declared with batch axis 1, but axis 0 changes"):
        export(linear, {"w": W}, output_batch_axes=[1])
    with pytest.raises(ExportError, match="2 axes that change with the batch size"):
        export(lambda _, x: x @ x.T)
    with pytest.raises(ExportError, match="output_batch_axes names 'z'"):
        export(linear, {"w": W}, output_batch_axes={"z": 0})
    with pytest.raises(ExportError, match="2 entries for 1 outputs"):
        export(linear, {"w": W}, output_batch_axes=[0, 0])
    assert not list(tmp_path.iterdir())


def test_an_output_that_ignores_the_batch_is_unbatched_and_said_to_prevent_merging(
    export: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rsrv.export"):
        path = export(lambda p, x: {"y": x @ p["w"], "norm": jnp.linalg.norm(p["w"])}, {"w": W}, batch_sizes=[1, 2])
    assert [spec.describe() for spec in open_bundle(path).manifest.executable_outputs] == ["f32[n,3]", "f32[]"]
    assert "never merged model=net output=norm" in caplog.text


def test_a_function_for_one_batch_size_only_is_told_how_to_be_exported(export: Any) -> None:
    with pytest.raises(ExportError, match="found by tracing at a second batch size") as raised:
        export(lambda _, x: x.reshape(3, 2, 2), batch_sizes=[3])
    assert "batch_sizes=None" in str(raised.value.hint)


def test_outputs_that_change_with_the_batch_size_are_refused(export: Any) -> None:
    with pytest.raises(ExportError, match="returns other outputs at batch size 2"):
        export(lambda _, x: x if x.shape[0] == 1 else x.astype(np.int32), batch_sizes=[1, 2])


def test_a_model_that_closes_over_its_parameters_gets_them_as_weights(export: Any, device: PjrtDevice) -> None:
    kernel, bias = jnp.asarray(np.vstack([W] * 3).T), jnp.ones(3, jnp.float32)
    model = jax.jit(lambda x: jnp.tanh(x @ kernel.T[:4]) + bias)
    path = export(lambda _, x: model(x), batch_sizes=[2])
    header = read_header(path / "weights.safetensors")
    assert header.argument_order == ("constant_0",)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    program = device.compile((path / "model.b2.mlir").read_bytes())
    (found,) = execute(device, program, [x, load_file(path / "weights.safetensors")["constant_0"]])
    np.testing.assert_allclose(found, np.asarray(model(x)), rtol=1e-6)


def test_a_model_without_weights_has_an_empty_weights_file(export: Any) -> None:
    assert read_header(export(lambda _, x: x + 1) / "weights.safetensors").argument_order == ()


def test_bfloat16_and_64_bit_types_survive(export: Any, pool: CompilePool) -> None:
    path = export(
        lambda p, ids: (p["table"][ids], ids + 1),
        {"table": jnp.ones((9, 4), jnp.bfloat16)},
        {"ids": np.zeros(1, np.int64)},
        x64=True,
    )
    found = signature(path, pool)
    assert [str(t) for t in found.arguments] == ["i64[1]", "bf16[9,4]"]
    assert [str(t) for t in found.results] == ["bf16[1,4]", "i64[1]"]
    assert read_header(path / "weights.safetensors").tensors["table"].dtype.numpy == ml_dtypes.bfloat16


def test_a_program_is_what_jit_makes_in_the_64_bit_mode_that_jax_is_in(export: Any, pool: CompilePool) -> None:
    def scaled(_: Any, x: Any) -> Any:
        return x * np.sqrt(2.0)  # a float64 scalar, which makes the product float64 in 64-bit mode only

    found = signature(export(scaled), pool)
    assert [str(t) for t in found.results] == ["f32[1,4]"]
    assert not jax.config.jax_enable_x64


def test_64_bit_mode_lasts_for_one_export_and_accidental_float64_is_said(
    export: Any, pool: CompilePool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rsrv.export"):
        found = signature(export(lambda _, x: x + jnp.ones(4), x64=True), pool)
    assert [str(t) for t in found.results] == ["f64[1,4]"]
    assert not jax.config.jax_enable_x64
    assert "computes in float64" in caplog.text


def test_outside_of_64_bit_mode_a_64_bit_input_is_refused_with_both_ways_out(export: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"input 'ids' is i64.*would compute with i32") as raised:
        export(lambda _, ids: ids + 1, None, {"ids": np.zeros(1, np.int64)})
    assert "int32" in str(raised.value.hint)
    assert "--x64" in str(raised.value.hint)
    assert not list(tmp_path.iterdir())


def test_outside_of_64_bit_mode_64_bit_parameters_are_narrowed_as_jit_does_and_it_is_said(
    export: Any, caplog: pytest.LogCaptureFixture
) -> None:
    w = np.random.default_rng(0).standard_normal((4, 3))
    with caplog.at_level(logging.WARNING, logger="rsrv.export"):
        path = export(linear, {"w": w})
    assert "weights=w" in caplog.text
    assert read_header(path / "weights.safetensors").tensors["w"].dtype.value == "f32"


def test_an_8_bit_float_output_is_refused_by_the_rule_for_the_wire(export: Any, tmp_path: Path) -> None:
    with pytest.raises(BundleError) as raised:
        export(lambda _, x: x.astype(jnp.float8_e5m2))
    assert raised.value.rule == "B-51"
    assert not list(tmp_path.iterdir())


def test_the_precision_of_products_is_frozen_and_recorded(export: Any, tmp_path: Path) -> None:
    path = export(linear, {"w": W}, matmul_precision="highest")
    assert "HIGHEST" in str(parse((path / "model.b1.mlir").read_bytes()))
    assert open_bundle(path).manifest.provenance["matmul_precision"] == "highest"
    plain = export(linear, {"w": W}, dir=tmp_path / "plain")
    assert "HIGHEST" not in str(parse((plain / "model.b1.mlir").read_bytes()))
    assert open_bundle(plain).manifest.provenance["matmul_precision"] == "default"
    with pytest.raises(ExportError, match="matmul_precision is 'tf32'"):
        export(linear, {"w": W}, matmul_precision="tf32", dir=tmp_path / "other")


def test_the_stablehlo_version_is_the_default_or_the_one_asked_for(export: Any, tmp_path: Path) -> None:
    assert artifact_version((export(linear, {"w": W}) / "model.b1.mlir").read_bytes()) == DEFAULT_VERSION
    older = export(linear, {"w": W}, dir=tmp_path / "older", stablehlo_version="1.9.0")
    assert artifact_version((older / "model.b1.mlir").read_bytes()) == "1.9.0"
    assert open_bundle(older).manifest.provenance["stablehlo_version"] == "1.9.0"
    with pytest.raises(ExportError, match="stablehlo_version '99'"):
        export(linear, {"w": W}, dir=tmp_path / "newer", stablehlo_version="99")


def test_a_program_may_be_lowered_for_another_platform(export: Any) -> None:
    def fn(_: Any, x: Any) -> Any:
        return jax.lax.platform_dependent(x, cpu=lambda x: x * 3, cuda=lambda x: x * 7)

    path = export(fn, platform="cuda")
    text = str(parse((path / "model.b1.mlir").read_bytes()))
    assert "7.000000e+00" in text
    assert "3.000000e+00" not in text
    assert open_bundle(path).manifest.provenance["export_platform"] == "cuda"


def test_hooks_and_client_tensors_and_further_files_travel_along(export: Any) -> None:
    path = export(
        linear,
        {"w": W},
        hooks="def preprocess(inputs):\n    return {'x': inputs['image'].reshape(-1, 4)}\n",
        client_inputs=[IOSpec("image", "f32", (1, 2, 2), batch_axis=0)],
        extra_files={"labels.txt": b"a\nb\n"},
        description="a test",
    )
    bundle = open_bundle(path)
    assert [spec.name for spec in bundle.manifest.wire_inputs] == ["image"]
    assert bundle.hooks_path is not None
    assert (path / "labels.txt").read_bytes() == b"a\nb\n"
    assert bundle.manifest.description == "a test"


def test_provenance_names_the_framework_and_what_was_left_out_and_the_caller_wins(export: Any) -> None:
    path = export(
        lambda p, x, unused: x @ p["w"],
        {"w": W, "off": W},
        [X, "unused=i32[1]"],
        drop_unused_inputs=True,
        provenance={"converter": "mine", "ticket": 7},
    )
    found = open_bundle(path).manifest.provenance
    assert found["source_framework"] == "jax"
    assert found["jax_version"] == jax.__version__
    assert found["dropped_inputs"] == ["unused"]
    assert found["dropped_weights"] == ["off"]
    assert found["converter"] == "mine"
    assert found["ticket"] == 7
    assert not [key for key in found if key.startswith("git_")]


def test_weights_may_be_named_and_ordered_by_the_caller(tmp_path: Path, pool: CompilePool) -> None:
    path = export_bundle(
        "jax-fn",
        lambda x, second, first: x @ first + second,
        X,
        [("z", np.ones(3, np.float32)), ("a", W)],
        dir=tmp_path / "net",
        collect_git=False,
        pool=pool,
    )
    assert read_header(path / "weights.safetensors").argument_order == ("z", "a")
    assert [str(t) for t in signature(path, pool).arguments] == ["f32[1,4]", "f32[3]", "f32[4,3]"]


class _Liar(CompilePool):
    """A pool that finds a random key in front of the arguments of every program."""

    def __init__(self, honest: CompilePool) -> None:
        self._honest = honest

    def inspect(self, program: bytes) -> ProgramReport:
        found = self._honest.inspect(program).signature
        return ProgramReport(ProgramSignature((TensorType("ui32", (2,)), *found.arguments), found.results))


def test_nothing_appears_when_the_gate_refuses(export: Any, pool: CompilePool, tmp_path: Path) -> None:
    with pytest.raises(SignatureMismatch, match=r"the bundle was not written: .*most likely a random key"):
        export(linear, {"w": W}, pool=_Liar(pool))
    assert not list(tmp_path.iterdir())


def test_without_a_pool_the_gate_uses_one_of_its_own(tmp_path: Path) -> None:
    path = export_bundle("jax", linear, {"w": W}, X, dir=tmp_path / "net", collect_git=False)
    assert programs(path) == ["model.b1.mlir"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_sizes": []}, "batch_sizes is empty"),
        ({"batch_sizes": [0]}, "batch size 0 is not an integer from 1 to 2147483647"),
        ({"batch_sizes": [2**31]}, "batch size 2147483648 is not an integer from 1"),
        ({"batch_sizes": 4}, "batch_sizes is 4, want a list"),
        ({"batch_sizes": "1,4"}, "batch size '1' is not an integer"),
        ({"input_names": 5}, "input_names is 5, want a list of names"),
        ({"output_names": "y"}, "output_names is 'y', want a list of names"),
        ({"output_names": [5]}, "output_names is [5], want a list of names"),
        ({"input_batch_axes": 0}, "input_batch_axes is 0, want a list of axes"),
        ({"output_batch_axes": {"output": "first"}}, "want a list of axes"),
        ({"axis_letters": ["a"]}, "axis_letters is ['a'], want a mapping"),
        ({"axis_letters": {"x": 3}}, "want a mapping tensor name"),
        ({"platform": "tpu"}, "platform is 'tpu', want cpu or cuda"),
        ({"batch_sizes": [True]}, "batch size True"),
        ({"batch_sizes": [2, 2]}, "repeats a size"),
        ({"name": "other"}, "cannot be named 'other'"),
        ({"axis_letters": {"z": "c"}}, "axis_letters names 'z'; the tensors are output, x"),
        ({"output_names": ["a", "b"]}, "the function returns 1 outputs"),
        ({"input_names": ["a", "b"]}, "there are 1 inputs"),
        ({"batch_sizes": None, "output_batch_axes": [0]}, "no meaning with batch_sizes=None"),
        ({"axis_letters": {"x": "cd"}}, "letters"),
    ],
)
def test_options_that_contradict_the_model_are_refused(export: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((ExportError, ManifestError)) as raised:
        export(linear, {"w": W}, **options)
    assert says in raised.value.message


def test_an_unknown_front_end_and_a_wrong_number_of_arguments_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="unknown front end 'jx'") as raised:
        export_bundle("jx", linear, {}, X, dir=tmp_path / "net")
    assert raised.value.hint == "did you mean 'jax'?"
    with pytest.raises(ExportError, match=r"front end 'jax-fn' takes \(f, inputs, weights\), got 2 arguments"):
        export_bundle("jax-fn", linear, X, dir=tmp_path / "net")


@pytest.mark.parametrize("name", [".hidden", "net.partial", "net~", "__pycache__", "line\nbreak", "back\\slash"])
def test_a_name_that_no_server_would_find_is_refused_before_anything_is_traced(
    export: Any, tmp_path: Path, name: str
) -> None:
    traced: list[object] = []
    with pytest.raises(ExportError, match="cannot be called"):
        export(lambda params, x: traced.append(x), dir=tmp_path / name)
    assert not traced
    assert not list(tmp_path.iterdir())


def test_a_path_is_taken_as_the_file_system_takes_it(export: Any, tmp_path: Path) -> None:
    path = export(linear, {"w": W}, dir=tmp_path / "other" / ".." / "net")
    assert path == tmp_path / "net"


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"w": np.ma.masked_less(W, 0)}, "weight 'w' is a masked array"),
        ({"w": W, 0: W}, "flattening params raised ValueError"),
        ({"w": [[1.0, 2.0]]}, "params holds no array, only float"),
        ({"w": W.astype(np.complex64)}, "weight 'w': dtype complex64 is not supported"),
    ],
)
def test_parameters_that_would_lose_something_are_refused_with_a_way_out(export: Any, params: Any, says: str) -> None:
    with pytest.raises(ExportError, match=says) as raised:
        export(linear, params)
    assert raised.value.hint


@pytest.mark.parametrize("shape", [(1, 0), (1, 2**62), (1, 2**30, 2**30)])
def test_an_input_of_an_impossible_size_is_refused_by_name(export: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ExportError, match="input 'x' has shape"):
        export(lambda params, x: x, inputs={"x": jax.ShapeDtypeStruct(shape, np.float32)})


def test_a_function_that_one_batch_size_alone_fits_says_which(export: Any) -> None:
    with pytest.raises(ExportError, match="It can be traced at batch size 1") as raised:
        export(lambda params, x: x.reshape(1, 2, 2), batch_sizes=[1, 4])
    assert "x.shape[0]" in (raised.value.hint or "")
