"""Whether programs may stand in for those of a model: the grid, what each takes and returns, what a refusal says."""

import pytest

from rsrv.core.errors import InvalidRequest
from rsrv.serve.programs.contract import describe, grid_problems, refusal, signature_problems
from rsrv.stablehlo.signature import ProgramSignature, TensorType

F32 = TensorType("f32", (4, 2))


def sig(arguments, results=(F32,)):
    return ProgramSignature(tuple(arguments), tuple(results))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (((), 8), "batch 8"),
        (((), 0), "the program without a batch size"),
        (((224, 224), 8), "variant 224x224 batch 8"),
        (((64,), 0), "variant 64"),
    ],
)
def test_a_program_is_called_by_its_shapes_and_its_batch_size(key, text):
    assert describe(key) == text


def test_a_grid_has_to_be_the_same_and_a_part_of_it_has_to_lie_inside():
    grid = [((), 1), ((), 8)]
    assert grid_problems(grid, grid) == []
    assert grid_problems(grid, [((), 8), ((), 16)]) == ["batch 16: the model has no such program", "batch 1: missing"]
    assert grid_problems(grid, [((), 8)], partial=True) == []
    assert grid_problems(grid, [((2,), 8)], partial=True) == ["variant 2 batch 8: the model has no such program"]


def test_equal_signatures_have_no_problems():
    assert signature_problems(((), 4), sig([F32, F32]), sig([F32, F32]), ["x"], ["y"]) == []


def test_each_argument_and_result_that_differs_is_named_with_what_came_and_what_was_wanted():
    wanted = sig([F32, TensorType("f32", (2,)), TensorType("i32", ())], [F32])
    found = sig([TensorType("f16", (4, 2)), TensorType("f32", (2,)), TensorType("i64", ())], [TensorType("f32", (4,))])
    assert signature_problems(((), 4), wanted, found, ["x"], ["y"]) == [
        "batch 4: argument 0 (input 'x') is f16[4,2], wanted f32[4,2]",
        "batch 4: argument 2 (weight 1) is i64[], wanted i32[]",
        "batch 4: result 0 (output 'y') is f32[4], wanted f32[4,2]",
    ]


def test_the_order_of_arguments_is_part_of_the_contract():
    other = TensorType("f32", (2,))
    problems = signature_problems(((), 4), sig([F32, other]), sig([other, F32]), ["x"], ["y"])
    assert [problem.partition(" is ")[0] for problem in problems] == [
        "batch 4: argument 0 (input 'x')",
        "batch 4: argument 1 (weight 0)",
    ]


def test_another_number_of_arguments_or_results_is_one_problem_and_not_many():
    assert signature_problems(((7,), 4), sig([F32]), sig([F32, F32], [F32, F32]), ["x"], ["y"]) == [
        "variant 7 batch 4: takes 2 arguments, wanted 1",
        "variant 7 batch 4: returns 2 results, wanted 1",
    ]


def test_a_refusal_names_model_and_directory_and_does_not_list_without_end():
    error = refusal("net", "/models/other", [f"batch {n}: missing" for n in range(1, 21)])
    assert isinstance(error, InvalidRequest)
    assert "the programs in /models/other do not fit model 'net': batch 1: missing; batch 2" in error.message
    assert error.message.endswith("batch 8: missing; and 12 more problems")
    assert "register it" in error.hint
