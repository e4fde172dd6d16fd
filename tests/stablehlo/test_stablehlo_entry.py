import ml_dtypes
import numpy as np
import pytest

from rsrv.core.errors import ProgramError
from rsrv.runtime import PjrtDevice
from rsrv.runtime.device import execute
from rsrv.stablehlo import report, serialize, tensor_type
from rsrv.stablehlo.entry import with_entry

# (w, x, i, v) → (x - w) / v and i + 1; w, x and v are told apart by what is computed with them.
PROGRAM = """module @m {
  func.func public @main(%w: tensor<2xf32> {mhlo.sharding = "{replicated}"}, %x: tensor<2xf32>, %i: tensor<3xi64>,
                         %v: tensor<2xf32>) -> (tensor<2xf32> {jax.result_info = "a"}, tensor<3xi64>) {
    %0 = stablehlo.subtract %x, %w : tensor<2xf32>
    %1 = stablehlo.divide %0, %v : tensor<2xf32>
    %one = stablehlo.constant dense<1> : tensor<3xi64>
    %2 = stablehlo.add %i, %one : tensor<3xi64>
    return %1, %2 : tensor<2xf32>, tensor<3xi64>
  }
}"""
F32, I64, I32 = tensor_type("f32", (2,)), tensor_type("i64", (3,)), tensor_type("i32", (3,))
W, X, N, V = (
    np.array([1, 2], np.float32),
    np.array([5, 7], np.float32),
    np.array([1, 2, 3]),
    np.array([4, 2], np.float32),
)


def run(program, *arrays):
    device = PjrtDevice("cpu")
    try:
        return execute(device, device.compile(serialize(program)), arrays)
    finally:
        device.close()


@pytest.mark.parametrize("form", [PROGRAM, serialize(PROGRAM)], ids=["text", "artifact"])
def test_a_program_with_its_arguments_in_another_order_computes_the_same(form):
    quotient, sums = run(with_entry(form, [F32, I64, F32, F32], [2, 0, 1, 3], [F32, I64]), X, N, W, V)
    assert quotient.tolist() == ((X - W) / V).tolist()
    assert sums.tolist() == [2, 3, 4]


def test_arguments_can_be_unused_and_can_be_taken_twice():
    unused = tensor_type("bf16", (5, 0))
    program = with_entry(PROGRAM, [F32, unused, I64, F32], [0, 3, 2, 0], [F32, I64])
    quotient, _ = run(program, W, np.zeros((5, 0), ml_dtypes.bfloat16), N, X)
    assert quotient.tolist() == ((X - W) / W).tolist()


def test_element_types_are_converted_at_the_border():
    program = with_entry(PROGRAM, [F32, F32, I32, F32], [0, 1, 2, 3], [F32, I32])
    signature = report(serialize(program)).signature
    assert (signature.arguments, signature.results) == ((F32, F32, I32, F32), (F32, I32))
    _, sums = run(program, W, X, N.astype(np.int32), V)
    assert (sums.dtype, sums.tolist()) == (np.int32, [2, 3, 4])


def test_attributes_that_name_old_arguments_are_dropped():
    text = str(with_entry(PROGRAM, [F32, F32, I64, F32], [0, 1, 2, 3], [F32, I64]))
    assert "sharding" not in text
    assert "result_info" not in text


@pytest.mark.parametrize(
    ("arguments", "places", "results", "message"),
    [
        ([F32, F32], [0, 1], [F32, I64], r"takes 4 arguments, which cannot be taken from places \[0, 1\] of 2"),
        ([F32, I64], [0, 0, 1, 2], [F32, I64], r"cannot be taken from places \[0, 0, 1, 2\] of 2"),
        ([F32, I64], [0, 1, 1, 0], [F32, I64], r"argument 1 is f32\[2\], wanted i64\[3\]"),
        ([F32, I64], [0, 0, 1, 0], [F32], "returns 2 results, wanted 1"),
        ([F32, I64], [0, 0, 1, 0], [F32, F32], r"result 1 is i64\[3\], wanted f32\[2\]"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(arguments, places, results, message):
    with pytest.raises(ProgramError, match=message):
        with_entry(PROGRAM, arguments, places, results)
