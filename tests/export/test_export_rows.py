"""A row's answer must not depend on the rows beside it, nor on its place; models that fail this are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.bundle import open_bundle
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export import export_bundle
from rsrv.export.inputs import Example
from rsrv.export.rows import require_independent_rows
from rsrv.runtime import CompilePool

W = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
X = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture(scope="module")
def pool():
    with CompilePool(parse_only=True) as pool:
        yield pool


@pytest.fixture
def export(tmp_path, pool):
    def run(fn, inputs=X, **more):
        options = {"batch_sizes": [1, 4], "collect_git": False, "pool": pool, **more}
        return export_bundle("jax", fn, {"w": W}, inputs, dir=tmp_path / "net", **options)

    return run


def mean_free(p, x):
    return (x - x.mean(0)) @ p["w"]


def one_mask(p, x):
    return jnp.where(jax.random.bernoulli(jax.random.PRNGKey(0), 0.5, x.shape), x, 0) @ p["w"]


def numbered(p, x):
    return x @ p["w"] + jnp.arange(x.shape[0], dtype=jnp.float32)[:, None]


def shifted(p, x):
    return jnp.roll(x, 1, 0) @ p["w"]


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (mean_free, "depends on the other rows of its batch"),
        (shifted, "depends on the other rows of its batch"),
        (one_mask, "depends on its place in the batch"),
        (numbered, "depends on its place in the batch"),
    ],
)
def test_a_model_that_mixes_its_rows_is_refused_with_the_ways_out(export, tmp_path, fn, problem):
    with pytest.raises(ExportError, match=f"output 'output' {problem}") as raised:
        export(fn)
    assert "--no-batch" in str(raised.value.hint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "more", [{"batch_sizes": [1]}, {"batch_sizes": None}, {"row_check": False}], ids=["one row", "no batch", "told so"]
)
def test_such_a_model_is_exported_where_nothing_is_merged_or_the_user_knows_better(export, more):
    provenance = open_bundle(export(mean_free, **more)).manifest.provenance
    assert provenance.get("row_check") == more.get("row_check")


def test_indices_flags_and_a_batch_axis_that_is_not_the_first_are_checked_too(export):
    def fn(p, ids, keep, x):
        return {"a": (p["w"][ids] * keep[:, None]), "b": x - x[:1], "c": jnp.argmax(x, 0)}

    inputs = {
        "ids": np.zeros(1, np.int32),
        "keep": np.zeros(1, bool),
        "x": jax.ShapeDtypeStruct((4, 1), np.float16),
    }
    axes = {"x": 1}
    manifest = open_bundle(export(fn, inputs, input_batch_axes=axes)).manifest
    assert [spec.batch_axis for spec in manifest.executable_outputs] == [0, 1, 0]
    with pytest.raises(ExportError, match="output 'b' depends on the other rows"):
        export(
            lambda p, ids, keep, x: {**fn(p, ids, keep, x), "b": x - x[:, :1]},
            inputs,
            input_batch_axes=axes,
            overwrite=True,
        )


def test_rounding_at_another_place_and_not_a_number_are_no_dependence():
    examples = [Example("x", DType.F32, (1, 3), 0)]

    def run(inputs):
        (x,) = inputs
        noise = 1 + 1e-5 * np.arange(len(x), dtype=np.float32)[:, None]
        return [np.log(x) * noise]

    require_independent_rows(run, examples, [("y", 0)], 4)
    with pytest.raises(ExportError, match="'y' depends on the other rows"):
        require_independent_rows(lambda inputs: [np.cumsum(inputs[0][::-1], 0)[::-1]], examples, [("y", 0)], 4)
