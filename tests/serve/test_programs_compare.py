"""What the shadow's outputs came to: rows that count, tolerances, and a record of what happened."""

import math

import ml_dtypes
import numpy as np
import pytest
from sched_support import spec

from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest
from rsrv.serve.programs.compare import Tally, compare_rows, require_tolerances

Y = [spec("y", "n", 2)]


def rel_of(reference, candidate, specs=Y, rows=2, tolerances=None):
    (row,) = compare_rows(specs, {"y": reference}, {"y": candidate}, rows, tolerances).rows
    return row


def test_padding_is_not_compared_whatever_axis_the_rows_are_on():
    reference = np.array([[1, 2], [3, 4], [0, 0]], np.float32)
    candidate = reference.copy()
    candidate[2] = np.nan
    assert rel_of(reference, candidate).verdict == "ok"
    assert rel_of(reference, candidate, rows=3).verdict == "mismatch"
    across = [spec("y", 2, "n")]
    assert rel_of(reference.T, candidate.T, across).verdict == "ok"
    assert rel_of(reference.T, candidate.T, across, rows=3).verdict == "mismatch"


def test_an_output_without_rows_is_compared_whole():
    total = [spec("y", 3)]
    assert rel_of(np.float32([1, 2, 3]), np.float32([1, 2, 4]), total, rows=1).verdict == "mismatch"


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (np.float32, 0.9e-5, 1.2e-5),
        (np.float16, 1.5e-3, 3e-3),
        (ml_dtypes.bfloat16, 0.8e-2, 1.6e-2),
    ],
)
def test_the_largest_difference_over_the_largest_value_has_to_be_within_the_tolerance_of_the_dtype(
    dtype, within, beyond
):
    reference = np.array([[1, 1], [1, 0.5]], dtype)
    for by, verdict in ((within, "ok"), (beyond, "mismatch")):
        candidate = (reference.astype(np.float64) + np.array([[by, 0], [0, 0]])).astype(dtype)
        row = rel_of(reference, candidate)
        assert row.verdict == verdict
        expected = float(candidate[0, 0]) - 1.0  # over a maximum of 1
        assert math.isclose(row.rel, expected, rel_tol=1e-9)


def test_integers_and_booleans_have_to_be_equal_and_nan_equals_nan():
    whole = [spec("y", "n", dtype=DType.I32)]
    assert rel_of(np.int32([7, 8]), np.int32([7, 8]), whole).verdict == "ok"
    assert rel_of(np.int32([7, 10**6]), np.int32([7, 10**6 + 1]), whole).verdict == "mismatch"
    nan = np.array([[np.nan, 1], [2, 3]], np.float32)
    assert rel_of(nan, nan).verdict != "mismatch"
    assert rel_of(nan, np.nan_to_num(nan)).verdict == "mismatch"


def test_tolerances_are_by_dtype_or_output_and_checked_before_they_are_used():
    reference = np.float32([[1, 2], [3, 4]])
    candidate = reference * np.float32(1.01)
    assert rel_of(reference, candidate, tolerances=require_tolerances({"f32": 0.02}, Y)).verdict == "ok"
    assert rel_of(reference, candidate, tolerances=require_tolerances({"y": 0.02}, Y)).verdict == "ok"
    assert require_tolerances({}, Y) is None
    for wrong in ({"z": 0.1}, {"i32": 0.1}, {"y": -1.0}, {"f32": math.inf}, {"f32": math.nan}):
        with pytest.raises(InvalidRequest, match=r"tolerances: '"):
            require_tolerances(wrong, Y)


def test_a_record_counts_and_keeps_the_first_mismatch_the_first_error_and_the_largest_difference():
    tally = Tally(against=1)
    assert not tally.record(10.0).clean  # nothing proves nothing
    one = np.ones((2, 2), np.float32)
    tally.compared("batch 4", compare_rows(Y, {"y": one}, {"y": one}, 2))
    assert tally.record(10.0).clean
    tally.skipped()
    assert tally.record(10.0).clean
    for by in (1.5, 1.25):
        tally.compared(f"batch {by}", compare_rows(Y, {"y": one}, {"y": one * np.float32(by)}, 2))
    tally.failed("batch 1", MemoryError())
    tally.failed("batch 4", ValueError("second"))
    record = tally.record(0.0)
    assert (record.percent, record.against) == (0.0, 1)
    assert (record.batches, record.skipped, record.mismatches, record.errors) == (3, 1, 2, 2)
    assert record.largest == {"y": 0.5}
    assert record.first_mismatch.startswith("batch 1.5: output 'y': rel 0.5 is above 1e-05")
    assert record.first_error == "batch 1: MemoryError"
    assert not record.clean
