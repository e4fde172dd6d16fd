import numpy as np
import pytest

from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest
from rsrv.core.tensors import BATCH, VARIABLE, Dim, DimKind, OutputTarget, TensorSpec
from rsrv.serve.validate import OutputCheck, RowCheck, RowSizes, TensorCheck


def fixed(n):
    return Dim(DimKind.FIXED, n)


X = TensorSpec("x", DType.F32, (BATCH, fixed(3)), "nc", 0)
MASK = TensorSpec("mask", DType.BOOL, (fixed(2), BATCH), "an", 1)
IMAGE = TensorSpec("image", DType.U8, (BATCH, VARIABLE, VARIABLE), "nhw", 0)
SCALAR = TensorSpec("t", DType.I32, (), "", None)


def x(rows=1, dtype=np.float32, columns=3):
    return ("x", np.zeros((rows, columns), dtype))


def mask(rows=1):
    return ("mask", np.zeros((2, rows), np.bool_))


CHECK = TensorCheck([X, MASK], model="m")


def test_a_sound_request_comes_back_as_arrays_by_name_and_any_batch_extent_is_accepted():
    for rows in (0, 1, 7):
        tensors = [mask(rows), x(rows)]
        arrays = CHECK.tensors(tensors)
        assert list(arrays) == ["mask", "x"]
        assert arrays["x"] is tensors[1][1]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([x(), mask(), ("y", np.zeros(1))], r"model 'm' has no input 'y'; it has: x, mask"),
        (
            [x(dtype=np.int32), mask()],
            r"'x' of model 'm' has datatype INT32; declared f32\[n,3\], got i32\[1,3\]",
        ),
        ([("x", np.zeros(3, np.float32)), mask()], r"'x' of model 'm' has rank 1; declared f32\[n,3\]"),
        ([x(columns=4), mask()], r"'x' of model 'm' has extent 4 at axis 1, wanted 3; declared .*, got f32\[1,4\]"),
        ([x()], r"input 'mask' of model 'm' is missing"),
        ([], r"input 'x', 'mask' of model 'm' is missing"),
        ([x(), x(), mask()], r"input 'x' of model 'm' is given twice"),
        ([x(2), mask(3)], r"disagree on the number of rows: 'x' has 2, 'mask' has 3 \(axis 1\)"),
        ([("x", np.zeros((1, 3), ">f4")), mask()], r"has datatype >f4"),
        ([("x", np.zeros((1, 3), "S4")), mask()], r"has datatype \|S4.*got \|S4\[1,3\]"),
    ],
)
def test_a_bad_request_is_refused_by_name_value_and_what_was_wanted(tensors, text):
    with pytest.raises(InvalidRequest, match=text) as error:
        CHECK.tensors(tensors)
    assert error.value.reason == "invalid"


def test_scalars_and_empty_lists_are_checked_too():
    scalar = TensorCheck([SCALAR], model="m")
    assert scalar.tensors([("t", np.array(3, np.int32))])["t"].shape == ()
    with pytest.raises(InvalidRequest, match=r"has rank 1; declared i32\[\]"):
        scalar.tensors([("t", np.zeros(1, np.int32))])
    assert TensorCheck([], model="m").tensors([]) == {}
    with pytest.raises(InvalidRequest, match=r"it has: \(none\)"):
        TensorCheck([], model="m").tensors([x()])


def test_outputs_use_their_own_word_in_messages():
    with pytest.raises(InvalidRequest, match="output 'x' of model 'm' has rank 1"):
        TensorCheck([X], model="m", what="output").arrays({"x": np.zeros(3, np.float32)})


def rows(sizes, exact=False, specs=(X, MASK)):
    return RowCheck(list(specs), {(): RowSizes(tuple(sizes), exact)}, model="m")


def test_rows_come_from_the_first_batched_input_along_its_own_axis():
    assert rows([1, 4], specs=(SCALAR, MASK)).plan({"t": np.array(0), "mask": np.zeros((2, 3))}) == (3, ())
    assert rows([], specs=(SCALAR,)).plan({"t": np.array(0)}) == (1, ())


def test_rows_up_to_the_largest_size_are_taken_and_more_or_none_are_refused():
    check = rows([1, 4, 8])
    for n in (1, 3, 8):
        assert check.plan({"x": np.zeros((n, 3)), "mask": np.zeros((2, n))}) == (n, ())
    with pytest.raises(InvalidRequest, match=r"'x' of model 'm' has 9 rows \(axis 0\); at most 8 can run at once"):
        check.plan({"x": np.zeros((9, 3))})
    with pytest.raises(InvalidRequest, match="has 0 rows"):
        check.plan({"x": np.zeros((0, 3))})


def test_a_program_that_cannot_be_padded_takes_its_exact_sizes_only():
    check = rows([2, 4], exact=True)
    assert check.plan({"x": np.zeros((4, 3))}) == (4, ())
    with pytest.raises(InvalidRequest, match=r"has 3 rows.*exactly 2 or 4 can run"):
        check.plan({"x": np.zeros((3, 3))})


def test_a_variant_that_is_not_compiled_is_refused_and_the_compiled_ones_are_named():
    sizes = RowSizes((1, 2), False)
    check = RowCheck([IMAGE], {(4, 6): sizes, (8, 8): sizes}, model="m")
    assert check.plan({"image": np.zeros((2, 8, 8), np.uint8)}) == (2, (8, 8))
    with pytest.raises(
        InvalidRequest,
        match=r"no program for image.h=5, image.w=5; compiled: image.h=4, image.w=6 or image.h=8, image.w=8",
    ):
        check.plan({"image": np.zeros((1, 5, 5), np.uint8)})


Y = TensorSpec("y", DType.F32, (BATCH, fixed(10)), "nk", 0)
BOXES = TensorSpec("boxes", DType.F32, (BATCH, VARIABLE, fixed(4)), "nac", 0)
LOSS = TensorSpec("loss", DType.F64, (), "", None)


def test_requested_outputs_default_to_all_and_must_exist_once():
    check = OutputCheck([Y, LOSS], model="m", rows_known=True)
    assert check.names_of([]) == ("y", "loss")
    assert check.names_of(["loss"]) == ["loss"]
    with pytest.raises(InvalidRequest, match="model 'm' has no output 'z'; it has: y, loss"):
        check.names_of(["y", "z"])
    with pytest.raises(InvalidRequest, match="output 'y' of model 'm' is requested twice"):
        check.names_of(["y", "y"])


def test_a_window_too_small_for_an_output_of_known_size_is_refused_before_it_runs():
    check = OutputCheck([Y, BOXES, LOSS], model="m", rows_known=True)
    check.windows({"y": OutputTarget("r", 0, 80), "boxes": OutputTarget("r", 0, 1), "loss": OutputTarget("r", 0, 8)}, 2)
    with pytest.raises(InvalidRequest, match="output 'y' of model 'm' needs 80 bytes, its window in region 'r' has 79"):
        check.windows({"y": OutputTarget("r", 0, 79)}, 2)
    with pytest.raises(InvalidRequest, match="output 'loss' of model 'm' needs 8 bytes"):
        check.windows({"loss": OutputTarget("r", 0, 7)}, 2)


def test_a_hook_may_change_the_rows_so_only_unbatched_outputs_are_checked():
    check = OutputCheck([Y, LOSS], model="m", rows_known=False)
    check.windows({"y": OutputTarget("r", 0, 1)}, 2)
    with pytest.raises(InvalidRequest, match="'loss'"):
        check.windows({"loss": OutputTarget("r", 0, 7)}, 2)
