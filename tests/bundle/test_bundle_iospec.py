"""`IOSpec`: shapes, letters and the tensor entry that it becomes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.bundle.entries import read_entries
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.problems import Problems
from rsrv.bundle.text import emit_manifest
from rsrv.core.dtypes import DType
from rsrv.core.errors import ManifestError
from rsrv.core.tensors import BATCH, VARIABLE, Dim, DimKind
from rsrv.core.yamlio import load_yaml


def test_the_batch_axis_is_written_n_and_the_others_get_letters():
    spec = IOSpec("image", "f32", (16, 3, 224, -1), batch_axis=0)
    assert spec.entry() == {"name": "image", "dtype": "f32", "shape": "nacd", "dims": {"a": 3, "c": 224, "d": -1}}
    assert spec.spec.dims == (BATCH, Dim(DimKind.FIXED, 3), Dim(DimKind.FIXED, 224), VARIABLE)
    assert (spec.spec.letters, spec.spec.batch_axis) == ("nacd", 0)


def test_a_negative_batch_axis_counts_from_the_end():
    spec = IOSpec("x", "f32", (5, 1), batch_axis=-1)
    assert (spec.batch_axis, spec.entry()["shape"]) == (1, "an")


def test_a_scalar_has_an_empty_shape_and_no_dims():
    assert IOSpec("x", "i64", ()).entry() == {"name": "x", "dtype": "i64", "shape": ""}


def test_what_stands_at_the_batch_axis_is_not_used():
    assert [IOSpec("x", "f32", (n, 2), batch_axis=0).entry() for n in (0, 1, -1, 7)] == [
        {"name": "x", "dtype": "f32", "shape": "na", "dims": {"a": 2}}
    ] * 4


def test_letters_can_be_chosen():
    spec = IOSpec("x", "f32", (1, 3, 8, 8), batch_axis=0, letters="chw")
    assert spec.entry()["shape"] == "nchw"
    assert IOSpec("x", "f32", (1, 3), batch_axis=0, letters=["k"]).letters == "k"


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (DType.BF16, DType.BF16),
        ("bf16", DType.BF16),
        ("f8_e4m3", DType.F8_E4M3),
        (np.float32, DType.F32),
        (np.dtype("int8"), DType.I8),
        (ml_dtypes.bfloat16, DType.BF16),
        (bool, DType.BOOL),
    ],
)
def test_dtypes_are_resolved_from_anything_that_names_one(dtype, wanted):
    assert IOSpec("x", dtype, ()).dtype is wanted


def test_numpy_integers_are_sizes():
    assert IOSpec("x", "f32", (np.int64(2), np.uint8(3), 4)).shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "rule", "named"),
    [
        (("", "f32", (1,)), {}, "X-1", "''"),
        (("x", "float32", (1,)), {}, "X-1", "'x': 'float32'"),
        (("x", np.complex64, (1,)), {}, "X-1", "complex64"),
        (("x", object(), (1,)), {}, "X-1", "'x'"),
        (("x", "f32", (0,)), {}, "X-1", "axis 0 of shape [0] is 0"),
        (("x", "f32", (3, -2)), {}, "X-1", "axis 1 of shape [3, -2] is -2"),
        (("x", "f32", (True,)), {}, "X-1", "True"),
        (("x", "f32", (1.0,)), {}, "X-1", "1.0"),
        (("x", "f32", (1, 2)), {"batch_axis": 2}, "X-1", "no batch axis 2"),
        (("x", "f32", ()), {"batch_axis": 0}, "X-1", "no batch axis 0"),
        (("x", "f32", (1,)), {"batch_axis": True}, "X-1", "no batch axis True"),
        (("x", "f32", (1, 2)), {"letters": "c"}, "X-2", "1 for 2 non-batch axes"),
        (("x", "f32", (1, 2)), {"letters": "cc"}, "X-2", "'c' is there twice"),
        (("x", "f32", (1, 2)), {"letters": "cn"}, "X-2", "'n' is reserved"),
        (("x", "f32", (1, 2)), {"letters": "Bc"}, "X-2", "'B' is reserved"),
        (("x", "f32", (1, 2)), {"letters": ["c", "hh"]}, "X-2", "'hh' is not one"),
        (("x", "f32", (1, 2)), {"letters": "cé"}, "X-2", "'é' is not one"),
        (("x", "f32", (1,) * 25), {}, "B-29", "'x': 25 non-batch axes"),
    ],
)
def test_a_bad_spec_names_its_tensor_and_rule(arguments, options, rule, named):
    with pytest.raises(ManifestError) as raised:
        IOSpec(*arguments, **options)
    assert raised.value.rule == rule
    assert named in raised.value.message


def test_a_spec_can_be_written_as_letters():
    assert IOSpec.parse("nchw", "f32", c=3, h=224, w=-1) == IOSpec(
        "input", "f32", (1, 3, 224, -1), batch_axis=0, letters="chw"
    )
    assert IOSpec.parse("sb", DType.I32, name="tokens", s=7).entry() == {
        "name": "tokens",
        "dtype": "i32",
        "shape": "sn",
        "dims": {"s": 7},
    }
    assert IOSpec.parse("", "f32", name="scale").shape == ()


@pytest.mark.parametrize(
    ("letters", "sizes", "rule", "named"),
    [
        ("nchw", {"c": 3}, "X-4", "'nchw' needs a size a letter, got c"),
        ("nc", {"c": 3, "n": 1}, "X-4", "got c, n"),
        ("nbc", {"c": 3}, "X-4", "more than one batch letter"),
        ("ncc", {"c": 3}, "X-2", "'c' is there twice"),
    ],
)
def test_letters_and_sizes_have_to_agree(letters, sizes, rule, named):
    with pytest.raises(ManifestError) as raised:
        IOSpec.parse(letters, "f32", **sizes)
    assert raised.value.rule == rule
    assert named in raised.value.message


@settings(deadline=None, max_examples=60)
@given(
    name=st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), min_size=1, max_size=8),
    dtype=st.sampled_from(list(DType)),
    shape=st.lists(st.integers(1, 2**40) | st.just(-1), max_size=5),
    batch=st.none() | st.integers(0, 4),
)
def test_a_spec_reads_back_as_itself_from_a_manifest(name, dtype, shape, batch):
    batch_axis = batch if batch is not None and batch < len(shape) else None
    spec = IOSpec(name, dtype, shape, batch_axis=batch_axis)
    text = emit_manifest({"executable_inputs": [spec.entry()]}, ())
    problems = Problems()
    mapping = load_yaml(text, what="text")
    assert read_entries(mapping["executable_inputs"], "executable_inputs", problems, row_major=True) == (spec.spec,)
    assert not problems
