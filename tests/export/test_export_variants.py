"""Shape variants of the JAX front end: what is declared, what is compiled, what is refused (§1.7, X-17, B-48)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from rsrv.audit import check_bundle
from rsrv.bundle import open_bundle, read_header
from rsrv.cli.main import main
from rsrv.core.errors import ExportError, UsageError
from rsrv.export import export_bundle, parse_variant_spec

W = np.arange(3, dtype=np.float32)


@pytest.fixture
def export(tmp_path: Path, pool: Any) -> Any:
    def call(fn: Any, inputs: Any, variants: Any, params: Any = None, **options: Any) -> Path:
        return export_bundle(
            "jax",
            fn,
            {"w": W} if params is None else params,
            inputs,
            **{"dir": tmp_path / "net", "shape_variants": variants, "collect_git": False, "pool": pool, **options},
        )

    return call


def scaled(params: Any, x: Any) -> Any:
    """f32[n,h,w,3] → the scaled image, and its mean colour."""
    return {"image": x * params["w"], "mean": (x * params["w"]).mean((1, 2))}


def test_every_variant_has_a_program_per_batch_size_and_all_share_the_weights(export: Any, pool: Any) -> None:
    path = export(scaled, "x=f32[1,8,8,3]", ["x=f32[1,4,6,3]", "x=f32[1,8,6,3]", "x=f32[1,8,4,3]"], batch_sizes=[2, 1])
    assert sorted(p.name for p in path.glob("*.mlir")) == [f"model.v{i}.b{n}.mlir" for i in (0, 1, 2) for n in (1, 2)]
    manifest = open_bundle(path).manifest
    assert manifest.input_shapes == ((4, 6), (8, 6), (8, 4))
    assert [spec.describe() for spec in manifest.executable_inputs] == ["f32[n,?,?,3]"]
    assert [spec.describe() for spec in manifest.executable_outputs] == ["f32[n,?,?,3]", "f32[n,3]"]
    assert list(read_header(path / "weights.safetensors").argument_order) == ["w"]
    found = pool.inspect((path / "model.v2.b2.mlir").read_bytes()).signature
    assert [str(t) for t in (*found.arguments, *found.results)] == [
        "f32[2,8,4,3]",
        "f32[3]",
        "f32[2,8,4,3]",
        "f32[2,3]",
    ]
    assert check_bundle(path, pool=pool).passed(strict=True)


def test_two_inputs_with_the_same_letter_get_qualified_keys(export: Any) -> None:
    path = export(
        lambda p, q, k: (q @ p["w"][:, None], k.sum(1)),
        {"q": np.zeros((1, 5, 3), "f4"), "k": np.zeros((1, 9), "f4")},
        [{}, {"k": np.zeros((1, 7), "f4")}, {"q": np.zeros((1, 6, 3), "f4")}],
    )
    raw = yaml.safe_load((path / "manifest.yaml").read_text())
    assert raw["input_shapes"] == [{"q.a": 5, "k.a": 9}, {"q.a": 5, "k.a": 7}, {"q.a": 6, "k.a": 9}]
    assert open_bundle(path).manifest.variant_of({"q": (4, 6, 3), "k": (4, 9)}) == (6, 9)


def test_letters_that_differ_stay_bare(export: Any) -> None:
    path = export(
        lambda p, x: x * p["w"],
        None,
        ["x=f32[1,4,6,3]", "x=f32[1,6,4,3]"],
        axis_letters={"x": "hwc"},
    )
    assert yaml.safe_load((path / "manifest.yaml").read_text())["input_shapes"] == [{"h": 4, "w": 6}, {"h": 6, "w": 4}]


def test_variants_work_without_a_batch_axis(export: Any) -> None:
    path = export(lambda p, x: x.sum() * p["w"], None, ["x=f32[4]", "x=f32[6]"], batch_sizes=None)
    assert sorted(p.name for p in path.glob("*.mlir")) == ["model.v0.mlir", "model.v1.mlir"]
    assert open_bundle(path).manifest.input_shapes == ((4,), (6,))


def test_a_constant_that_depends_on_the_variant_stays_in_its_program(export: Any) -> None:
    def positions(params: Any, x: Any) -> Any:
        return x * params["w"][0] + jnp.asarray(np.linspace(0, 1, 17 * x.shape[1], dtype=np.float32)).sum()

    path = export(positions, None, ["x=f32[1,4]", "x=f32[1,6]"])
    assert list(read_header(path / "weights.safetensors").argument_order) == ["w"]


def test_the_order_of_the_examples_wins_over_that_of_a_variant(export: Any) -> None:
    path = export(
        lambda p, q, k: q * k * p["w"][0],
        {"q": np.zeros((1, 5), "f4"), "k": np.zeros((1, 5), "f4")},
        [{n: np.zeros((1, size), "f4") for n in ("k", "q")} for size in (5, 6)],
    )
    assert [spec.name for spec in open_bundle(path).manifest.executable_inputs] == ["q", "k"]


def test_one_variant_is_a_bundle_with_a_single_shape(export: Any) -> None:
    path = export(scaled, None, ["x=f32[1,4,6,3]"])
    assert sorted(p.name for p in path.glob("*.mlir")) == ["model.b1.mlir"]
    assert open_bundle(path).manifest.input_shapes == ()


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ([], "not a list"),
        ({"x": "x=f32[1,4]"}, "not a list"),
        (["x=f32[1,4]", "x=f32[2,4]"], "variants 0 and 1 do not differ in any shape of x"),
        (["x=f32[1,4]", "x=f16[1,5]"], "variant 1: input 'x' is f16.* dtype and rank of f32"),
        (["x=f32[1,4]", "x=f32[1,4,4]"], r"variant 1: input 'x' is f32\[1, 4, 4\]"),
        (["x=f32[1,4]", "y=f32[1,5]"], "variant 1 has the inputs y, want x"),
        (["x=f32[1,4]", [np.zeros((1, 5), "f4")] * 2], "variant 1 has the inputs input_0, input_1"),
        (["x=f32[1,4]", {"x": 3}], "variant 1: input 'x' is a int"),
    ],
)
def test_variants_that_are_not_one_model_are_refused(export: Any, tmp_path: Path, variants: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(lambda p, x: x * p["w"][0], None, variants)
    assert not list(tmp_path.iterdir())


def test_a_variant_of_an_unknown_input_names_the_inputs(export: Any) -> None:
    with pytest.raises(ExportError, match="variant 0: there is no input 'y'; the inputs are x"):
        export(lambda p, x: x * p["w"][0], "x=f32[1,4]", [{"y": np.zeros((1, 5), "f4")}])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda p, x: x.reshape(-1, 2) if x.shape[1] == 4 else x, "not the batch size itself"),
        (lambda p, x: x if x.shape[1] == 4 else x.T, "output 'output' has another batch axis"),
        (lambda p, x: x if x.shape[1] == 4 else x[:, None], "changes its rank with the shapes"),
        (lambda p, x: x if x.shape[1] == 4 else (x > 0), "other outputs at shape variant 1, batch size 1: output bool"),
        (lambda p, x: x if x.shape[1] == 4 else (x, x), "other outputs at shape variant 1"),
        (lambda p, x: x if x.shape[1] == 4 else 1 / 0, "ZeroDivisionError"),
    ],
)
def test_outputs_that_are_not_the_same_in_every_variant_are_refused(export: Any, fn: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(fn, None, ["x=f32[1,4]", "x=f32[1,6]"], {})


def test_variants_that_differ_only_in_a_dropped_input_are_refused(export: Any) -> None:
    sets = [{"x": np.zeros((1, 4), "f4"), "unused": np.zeros((1, size), "f4")} for size in (2, 3)]
    with pytest.raises(ExportError, match="variants 0 and 1 do not differ in any shape of x"):
        export(lambda p, x, unused: x * p["w"][0], None, sets, drop_unused_inputs=True)


def test_an_input_that_only_one_variant_uses_is_in_all_programs(export: Any, pool: Any) -> None:
    sets = [{"x": np.zeros((1, size), "f4"), "m": np.zeros((1, 2), "f4")} for size in (2, 3)]
    path = export(lambda p, x, m: x + m * p["w"][0] if x.shape[1] == 2 else x * p["w"][0], None, sets)
    assert len(pool.inspect((path / "model.v1.b1.mlir").read_bytes()).signature.arguments) == 3


def test_variants_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "net.py").write_text(
        "import numpy as np\n"
        "def make():\n"
        "    return {'fn': lambda p, x, s: x * s * p['w'], 'params': {'w': np.ones(3, 'f4')},\n"
        "            'inputs': {'x': np.zeros((1, 4, 3), 'f4'), 's': np.zeros((1, 1, 1), 'f4')}}\n"
    )
    variants = ["--shape-variant", "x=f32[1,4,3]", "--shape-variant", "x=f32[1,6,3] s=f32[1,6,1]"]
    assert main(["export", "jax", f"{tmp_path}/net.py:make", "--out", str(tmp_path / "net"), *variants]) == 0
    assert "2 shape variants" in capsys.readouterr().err
    assert open_bundle(tmp_path / "net").manifest.input_shapes == ((4, 1), (6, 6))


def test_a_variant_text_says_which_part_is_wrong() -> None:
    assert list(parse_variant_spec("x=f32[1,4]  y=i8[2]")) == ["x", "y"]
    for text, message in [("", "names no input"), ("x=f32[1] x=f32[2]", "'x' twice"), ("x", "not NAME=DTYPE")]:
        with pytest.raises(UsageError, match=message):
            parse_variant_spec(text)


def test_every_variant_proves_itself_on_goldens_of_its_own(export: Any, pool: Any) -> None:
    path = export(scaled, None, ["x=f32[1,4,6,3]", "x=f32[1,6,4,3]"], batch_sizes=[1, 2], golden=2)
    report = check_bundle(path, pool=pool, run=True)
    assert report.passed(strict=True)
    assert {f"model.v{i}.b{n}.mlir goldens" for i in (0, 1) for n in (1, 2)} <= set(report.checks)
