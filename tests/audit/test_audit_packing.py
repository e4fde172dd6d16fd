"""Packing goldens into batches as the server packs requests, without a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rsrv.audit.packing import Span, answer, fitting, golden_problem, pack
from rsrv.bundle import IOSpec, Manifest
from rsrv.bundle.golden import Golden


def manifest(*, y_axis: int | None = 0, shapes: tuple[tuple[int, ...], ...] = ()) -> Manifest:
    width = -1 if shapes else 2
    return Manifest(
        name="net",
        executable_inputs=(
            IOSpec("x", "f32", (1, width), batch_axis=0).spec,
            IOSpec("s", "i32", (3, 1), batch_axis=1).spec,
        ),
        executable_outputs=(IOSpec("y", "f32", (1, width), batch_axis=y_axis).spec,),
        input_shapes=shapes,
    )


def golden(rows: int, first: int = 0, width: int = 2) -> Golden:
    x = np.arange(first, first + rows * width, dtype=np.float32).reshape(rows, width)
    return Golden({"x": x, "s": np.zeros((3, rows), np.int32)}, {"y": x + 1})


def test_rows_fill_batches_one_golden_after_the_other() -> None:
    assert pack({0: 1, 1: 1, 2: 1}, 2) == [[Span(0, 0, 1, 0), Span(1, 0, 1, 1)], [Span(2, 0, 1, 0)]]
    assert pack({0: 5}, 2) == [[Span(0, 0, 2, 0)], [Span(0, 2, 2, 0)], [Span(0, 4, 1, 0)]]
    assert pack({4: 3, 7: 2}, 4) == [[Span(4, 0, 3, 0), Span(7, 0, 1, 3)], [Span(7, 1, 1, 0)]]
    assert pack({}, 4) == []


def test_answers_are_put_together_from_the_batches_along_each_tensors_own_axis() -> None:
    seen: list[list[np.ndarray]] = []

    def run(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        seen.append(list(inputs))
        assert [array.shape for array in inputs] == [(4, 2), (3, 4)]
        return [inputs[0] + 1]

    goldens = {0: golden(1), 1: golden(5, 10), 2: golden(1, 50)}
    answers = answer(manifest(), 4, goldens, run)
    for index, one in goldens.items():
        np.testing.assert_array_equal(answers[index]["y"], one.outputs["y"])
    assert len(seen) == 2
    np.testing.assert_array_equal(seen[1][0][3], [0, 0])  # filled up with zeros


def test_where_rows_may_not_be_packed_only_goldens_of_exactly_that_size_run() -> None:
    goldens = {0: golden(1), 1: golden(4)}
    answers = answer(manifest(y_axis=None), 4, goldens, lambda inputs: [inputs[0]])
    assert list(answers) == [1]


def test_a_program_without_a_batch_size_takes_goldens_as_they_are() -> None:
    answers = answer(manifest(), 0, {0: golden(3)}, lambda inputs: [inputs[0] + 1])
    np.testing.assert_array_equal(answers[0]["y"], golden(3).outputs["y"])


def test_goldens_belong_to_the_variant_of_their_shapes() -> None:
    spec = manifest(shapes=((2,), (5,)))
    goldens = [golden(1), golden(1, width=5), golden(1, width=7)]
    assert fitting(spec, (2,), goldens) == [0]
    assert fitting(spec, (5,), goldens) == [1]
    assert [golden_problem(spec, one) is None for one in goldens] == [True, True, False]


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"x": np.zeros((1, 2), np.float32)}, "has the inputs x, want s, x"),
        ({"x": np.zeros((1, 2)), "s": np.zeros((3, 1), np.int32)}, "input 'x' is f64[1,2], want f32[n,2]"),
        ({"x": np.zeros((1, 3), np.float32), "s": np.zeros((3, 1), np.int32)}, "input 'x' is f32[1,3]"),
        ({"x": np.zeros(2, np.float32), "s": np.zeros((3, 1), np.int32)}, "input 'x' is f32[2]"),
        (
            {"x": np.zeros((1, 2), np.float32), "s": np.zeros((3, 2), np.int32)},
            "has 1 rows of 'x', 2 rows of 's'",
        ),
        ({"x": np.zeros((0, 2), np.float32), "s": np.zeros((3, 0), np.int32)}, "has 0 rows of 'x'"),
    ],
)
def test_a_golden_that_fits_no_program_says_why(inputs: dict[str, np.ndarray], says: str) -> None:
    problem = golden_problem(manifest(), Golden(inputs, {"y": np.zeros(1, np.float32)}))
    assert problem is not None
    assert says in problem
