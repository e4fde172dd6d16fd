from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.inputs import Example, resolve_examples

F32 = np.zeros((2, 3), np.float32)


def test_one_example_needs_no_tuple_and_is_called_input() -> None:
    assert resolve_examples(F32) == (Example("input", DType.F32, (2, 3), 0),)


def test_several_examples_are_numbered_from_zero() -> None:
    assert [e.name for e in resolve_examples((F32, F32))] == ["input_0", "input_1"]


def test_a_mapping_brings_its_names_in_its_order() -> None:
    assert [e.name for e in resolve_examples({"z": F32, "a": F32})] == ["z", "a"]


@pytest.mark.parametrize(
    "example", [jax.ShapeDtypeStruct((2, 3), "int8"), np.zeros((2, 3), np.int8), jax.numpy.zeros((2, 3), "int8")]
)
def test_arrays_and_shapes_mean_the_same(example: Any) -> None:
    assert resolve_examples([example], names=["x"]) == (Example("x", DType.I8, (2, 3), 0),)


def test_a_text_brings_its_name() -> None:
    assert resolve_examples("x=u8[4,2]") == (Example("x", DType.U8, (4, 2), 0),)
    assert resolve_examples(["x=u8[4,2]", F32])[1].name == "input_1"


def test_the_batch_axis_is_rebuilt_and_everything_else_kept() -> None:
    (example,) = resolve_examples({"x": np.zeros((5, 2, 3))}, batch_axes=[-2])
    assert example.batch_axis == 1
    assert example.shape_at(8) == (5, 8, 3)
    assert example.shape_at(None) == (5, 2, 3)


def test_batch_axes_may_be_given_by_name() -> None:
    found = resolve_examples({"x": F32, "y": F32}, batch_axes={"y": 1})
    assert [e.batch_axis for e in found] == [0, 1]


def test_without_batching_shapes_stay_as_they_are() -> None:
    (example,) = resolve_examples(np.float32(1), batched=False)
    assert example == Example("input", DType.F32, (), None)
    assert example.shape_at(4) == ()


@pytest.mark.parametrize(
    ("inputs", "options", "says"),
    [
        ((), {}, "at least one input"),
        ({}, {}, "at least one input"),
        (3, {}, "inputs is a int"),
        ([[1.0, 2.0]], {}, "input 'input' is a list, want an array"),
        ([F32], {"names": ["a", "b"]}, "there are 1 inputs"),
        ([F32], {"names": "x"}, "input_names is 'x'"),
        ([F32, F32], {"names": ["a", "a"]}, "two inputs are named 'a'"),
        ({"x": F32}, {"names": ["y"]}, "example named 'x' is called 'y'"),
        ([F32], {"batch_axes": [2]}, "no axis 2"),
        ([F32], {"batch_axes": [True]}, "no axis True"),
        ([np.float32(1)], {}, "has shape [], which has no axis 0"),
        ([F32], {"batch_axes": [0, 0]}, "2 entries for 1 inputs"),
        ({"x": F32}, {"batch_axes": {"z": 0}}, "names 'z'; the inputs are x"),
        ({"x": F32, "y": F32}, {"batch_axes": {"y": None}}, "input 'y' has no batch axis"),
        ([F32], {"batch_axes": [0], "batched": False}, "no meaning with batch_sizes=None"),
        ([np.zeros(2, np.complex64)], {}, "input 'input': dtype complex64 is not supported"),
        ([jax.random.key(0)], {"batched": False}, "input 'input'"),
    ],
)
def test_a_bad_example_is_refused_by_name(inputs: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ExportError) as raised:
        resolve_examples(inputs, **options)
    assert says in raised.value.message
