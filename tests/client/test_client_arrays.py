"""Arrays as people have them: what requests cannot say is refused, and numbers arrive as they are or not at all."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
from support.client_stub import INLINE_ONCE

from rsrv.client import AsyncKServeModel, InferInput
from rsrv.client.arrays import array_of, fitted, is_of_python
from rsrv.core.errors import InvalidRequest, UsageError

X = np.arange(8, dtype=np.float32).reshape(2, 4)
pytestmark = pytest.mark.usefixtures("small_pools")


def masked():
    return np.ma.masked_array(X, X > 6)


async def awaited(server, work):
    async with AsyncKServeModel(server.url, "twice", **INLINE_ONCE) as handle:
        return await work(handle)


WAYS_IN = {
    "infer": lambda model, server, x: model.infer({"x": x}),
    "infer in a list": lambda model, server, x: model.infer({"x": list(x)}),
    "explicit": lambda model, server, x: InferInput("x", x),
    "explicit elements": lambda model, server, x: InferInput("x", [8], x),
    "call": lambda model, server, x: model(x),
    "call by name": lambda model, server, x: model({"x": x}),
    "map": lambda model, server, x: model.map(x),
    "map by name": lambda model, server, x: model.map({"x": x}),
    "map of lists": lambda model, server, x: model.map({"x": list(x)}),
    "map of items": lambda model, server, x: list(model.map(iter(x))),
    "map of items by name": lambda model, server, x: list(model.map([{"x": x[0]}, {"x": x[1]}])),
    "awaited infer": lambda model, server, x: asyncio.run(awaited(server, lambda it: it.infer({"x": x}))),
    "awaited map": lambda model, server, x: asyncio.run(awaited(server, lambda it: it.map(x))),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_masked_array_is_refused_wherever_it_comes_in(server, model, way):
    with pytest.raises(UsageError, match="input 'x' is a masked array") as caught:
        WAYS_IN[way](model, server, masked())
    assert ".filled(value)" in caught.value.hint
    assert "ModelInfer" not in server.calls


def test_a_filled_array_is_sent(model):
    np.testing.assert_array_equal(model.infer({"x": masked().filled(0)})["y"], 2 * np.where(X > 6, 0, X))


def test_a_masked_element_in_a_list_is_refused_without_a_warning():
    with pytest.raises(UsageError, match="input 'x' is a masked array"):
        InferInput("x", [[1.0, 2.0], [3.0, np.ma.masked]])


class OfAnotherLibrary:
    """A tensor that does not give its elements, as one on a device, or one that has a gradient."""

    def __init__(self, error):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


def test_a_tensor_that_does_not_give_its_elements_is_refused_by_name_and_in_its_own_words(server, model):
    tensor = OfAnotherLibrary(RuntimeError("use tensor.detach().numpy()"))
    with pytest.raises(TypeError, match=r"input 'x' is no array: use tensor.detach\(\).numpy\(\)"):
        model.infer({"x": tensor})
    for work in (model, model.map):
        with pytest.raises(InvalidRequest, match=r"the data: input 'x' is no array: use tensor.detach\(\).numpy\(\)"):
            work(tensor)
    assert "ModelInfer" not in server.calls


@pytest.mark.parametrize(
    "array",
    [
        X.astype(">f4"),
        np.asfortranarray(X),
        X.view(np.matrix),
        X.astype(np.dtype("f4", metadata={"unit": "K"})),
        np.broadcast_to(X[:1], (2, 4)),
    ],
    ids=["big-endian", "column-major", "matrix", "dtype with metadata", "broadcast"],
)
def test_numbers_arrive_whatever_their_layout(model, array):
    for found in (model.infer({"x": array})["y"], model(array, "y"), model.map(array)):
        np.testing.assert_array_equal(found, 2 * np.array(array, np.float32))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 4), [("a", np.float32)]),
        np.full((2, 4), None),
        np.full((2, 4), np.datetime64("2026-01-01")),
        np.full((2, 4), np.timedelta64(1)),
        np.zeros((2, 4), np.complex64),
        np.full((2, 4), "1"),
        np.zeros((2, 4), np.void(b"abcd").dtype),
        np.zeros((2, 4), ml_dtypes.int4),
        np.zeros((2, 4), np.longdouble),
        np.zeros((2, 4), np.dtype(np.longdouble).newbyteorder(">")),
    ],
    ids=lambda array: str(array.dtype),
)
def test_elements_that_are_not_numbers_of_the_wire_are_refused(server, model, array):
    if array.dtype == np.float64:
        pytest.skip("a long double is a double here")
    with pytest.raises(TypeError, match="input 'x': dtype"):
        model.infer({"x": array})
    for work in (model, model.map, lambda data: list(model.map(list(data)))):
        with pytest.raises(InvalidRequest, match="input 'x' is"):
            work(array)
    assert "ModelInfer" not in server.calls


# --- numbers of Python --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([0, 255], np.uint8),
        ([-128, 127], np.int8),
        ([2**63, 2**64 - 1], np.uint64),
        ([1, 2**24], np.float32),
        ([1, 2**53], np.float64),
        ([2**63], np.float64),
        ([1, 256], ml_dtypes.bfloat16),
        ([1, 2048], np.float16),
        ([True, False], np.float32),
        ([True, False], np.int8),
        ([0.5, float("inf"), float("-inf")], np.float16),
        ([], np.int32),
        (7, np.uint16),
    ],
)
def test_numbers_of_python_become_what_the_model_takes(numbers, dtype):
    assert is_of_python(numbers)
    found = fitted(np.asarray(numbers), np.dtype(dtype))
    assert found.dtype == dtype
    assert found.tolist() == numbers


def test_floats_of_python_are_rounded():
    assert fitted(np.asarray([0.1]), np.dtype(np.float32)).tolist() == [float(np.float32(0.1))]
    assert np.isnan(fitted(np.asarray([float("nan")]), np.dtype(np.float32))).all()


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([256], np.uint8),
        ([-1], np.uint8),
        ([-1], np.uint64),
        ([2**63], np.int64),
        ([2**24 + 1], np.float32),
        ([2**53 + 1], np.float64),
        ([2**63 - 1], np.float64),
        ([2**64 - 1], np.float64),
        ([257], ml_dtypes.bfloat16),
        ([70000], np.float16),
        ([70000.0], np.float16),
        ([1e300], np.float32),
        ([1e39], ml_dtypes.bfloat16),
        ([float("nan")], np.int32),
        ([1.0], np.int32),
        ([1], np.bool_),
        ([2**70], np.float32),
        ([1j], np.float32),
        (["1"], np.float32),
    ],
)
def test_numbers_that_do_not_fit_are_not_made_to(numbers, dtype):
    assert fitted(np.asarray(numbers), np.dtype(dtype)) is None


def test_numbers_with_a_width_are_not_rounded(server, model):
    for data in ({"x": [np.full(4, 0.1), np.full(4, 0.1)]}, {"x": [[np.float64(0.1)] * 4]}):
        with pytest.raises(InvalidRequest, match="'x' is float64") as caught:
            model.map(data)
        assert "np.float32" in caught.value.hint
    assert "ModelInfer" not in server.calls


def test_numbers_that_do_not_fit_are_refused_with_the_reason(server, model):
    with pytest.raises(InvalidRequest, match="'x' is int64, model 'twice' takes x FP32") as caught:
        model.map({"x": [[2**24 + 1] * 4]})
    assert caught.value.hint == "not all of its numbers fit into np.float32"
    assert "ModelInfer" not in server.calls


def test_a_list_that_holds_itself_is_no_array():
    endless = [1.0]
    endless.append(endless)
    with pytest.raises(ValueError, match="input 'x' is no array"):
        array_of("input 'x'", endless)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [[X], X, None, "x", 3])
def test_inputs_without_names_are_refused_with_a_way_out(server, model, inputs):
    for infer in (model.infer, lambda data: asyncio.run(awaited(server, lambda it: it.infer(data)))):
        with pytest.raises(UsageError, match="wanted arrays by name") as caught:
            infer(inputs)
        assert "model(x)" in caught.value.hint


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        ({1: X}, {}, "the name of an input is 1; wanted text"),
        ({"\ud800": X}, {}, "the name of an input is .*; wanted text"),
        ({"x": X}, {"outputs": 3}, "outputs=3 are no names"),
        ({"x": X}, {"outputs": ["y", 3]}, "the name of an output is 3; wanted text"),
        ({"x": X}, {"id": 5}, "id is 5; wanted text"),
    ],
)
def test_names_are_text(server, model, inputs, options, text):
    with pytest.raises(UsageError, match=text):
        model.infer(inputs, **options)
    assert "ModelInfer" not in server.calls
    np.testing.assert_array_equal(model.infer({"x": X}, id="ä")["y"], 2 * X)
