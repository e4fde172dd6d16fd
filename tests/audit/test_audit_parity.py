"""`compare`: what agrees, what does not, and what proves nothing."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest

from rsrv.audit import TOLERANCES, compare
from rsrv.audit.parity import ParityReport, merge, parse_tolerances
from rsrv.core.errors import UsageError

Y = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)


def only(report: ParityReport):
    (row,) = report.rows
    return row


def test_equal_arrays_agree_without_a_note() -> None:
    report = compare({"y": Y}, {"y": Y.copy()})
    assert report.ok
    assert report.unproven == ()
    assert (only(report).verdict, only(report).note, only(report).ulp) == ("ok", None, 0)
    assert str(report) == ""


def test_the_difference_is_measured_against_the_largest_reference() -> None:
    off = Y.copy()
    off[0, 1] += 3e-5
    row = only(compare({"y": Y}, {"y": off}))
    assert row.verdict == "ok"
    assert row.max_abs == pytest.approx(3e-5, rel=1e-2)
    assert row.rel == pytest.approx(row.max_abs / 4)
    assert row.worst == (0, 1)
    assert row.mean_abs == pytest.approx(row.max_abs / 4)


def test_a_difference_above_the_tolerance_is_a_mismatch_that_says_where() -> None:
    off = Y.copy()
    off[1, 0] += 1e-3
    report = compare({"y": Y}, {"y": off})
    assert not report.ok
    assert "at [1, 0]" in str(report)
    assert "above 1e-05" in str(report)
    assert compare({"y": Y}, {"y": off}, 1e-3).ok
    assert compare({"y": Y}, {"y": off}, {"f32": 1e-3}).ok
    assert compare({"y": Y}, {"y": off}, {"y": 1e-3, "f32": 0.0}).ok
    assert not compare({"y": Y}, {"y": off}, {"f16": 1.0}).ok


@pytest.mark.parametrize(
    ("dtype", "token"),
    [(np.float64, "f64"), (np.float32, "f32"), (np.float16, "f16"), (ml_dtypes.bfloat16, "bf16")],
)
def test_each_float_has_its_own_tolerance_and_neighbours_are_one_ulp_apart(dtype: type, token: str) -> None:
    one = np.array([1.0, 2.0], dtype)
    bits = one.view(f"u{one.itemsize}").copy()
    bits[0] += 1
    row = only(compare({"y": one}, {"y": bits.view(dtype)}))
    assert (row.dtype, row.tolerance, row.ulp) == (token, TOLERANCES[token], 1)
    assert row.verdict == "ok"


def test_zero_and_minus_zero_are_the_same_place() -> None:
    row = only(compare({"y": np.array([0.0, 1.0], np.float32)}, {"y": np.array([-0.0, 1.0], np.float32)}))
    assert (row.verdict, row.ulp) == ("ok", 0)


def test_the_smallest_numbers_around_zero_are_two_ulp_apart() -> None:
    tiny = np.float32(np.nextafter(np.float32(0), np.float32(1)))
    row = only(compare({"y": np.array([tiny, 1], np.float32)}, {"y": np.array([-tiny, 1], np.float32)}))
    assert row.ulp == 2


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8, np.bool_])
def test_integers_and_booleans_have_to_be_equal_whatever_the_tolerance(dtype: type) -> None:
    one = np.array([0, 1, 1], dtype)
    other = np.array([0, 1, 0], dtype)
    assert compare({"y": one}, {"y": one}).ok
    row = only(compare({"y": one}, {"y": other}, 10.0))
    assert row.verdict == "mismatch"
    assert (row.max_abs, row.worst, row.ulp) == (1, (2,), None)
    assert "has to be equal" in str(row.note)


def test_large_integers_that_float64_cannot_tell_apart_differ() -> None:
    big = np.array([2**63 - 1, 0], np.int64)
    assert not compare({"y": big}, {"y": big - 1}).ok
    unsigned = np.array([2**64 - 1, 0], np.uint64)
    assert not compare({"y": unsigned}, {"y": unsigned - np.uint64(1)}).ok


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_a_constant_reference_is_unproven_and_says_so(value: float) -> None:
    constant = np.full((2, 3), value, np.float32)
    report = compare({"y": constant}, {"y": constant})
    assert report.ok
    assert report.unproven == ("y",)
    assert f"is {value:g} everywhere" in str(report)


def test_a_single_number_proves_something_unless_it_is_zero() -> None:
    assert compare({"y": np.float32([3])}, {"y": np.float32([3])}).unproven == ()
    assert compare({"y": np.float32([0])}, {"y": np.float32([0])}).unproven == ("y",)


def test_anything_but_zero_where_the_reference_is_zero_is_a_mismatch() -> None:
    row = only(compare({"y": np.zeros(3, np.float32)}, {"y": np.array([0, 1e-30, 0], np.float32)}))
    assert (row.verdict, row.rel) == ("mismatch", math.inf)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reference_that_is_not_finite_is_unproven_when_it_is_met(bad: float) -> None:
    one = np.array([1, 2, bad], np.float32)
    report = compare({"y": one}, {"y": one})
    assert report.ok
    assert report.unproven == ("y",)
    assert "1 of 3 values that are not finite" in str(report)


@pytest.mark.parametrize(
    ("reference", "candidate"), [(1.0, np.nan), (1.0, np.inf), (np.inf, -np.inf), (np.nan, 1.0), (np.inf, np.nan)]
)
def test_where_one_is_not_finite_the_other_has_to_be_the_same(reference: float, candidate: float) -> None:
    report = compare({"y": np.float32([2, reference])}, {"y": np.float32([2, candidate])}, 1e9)
    assert not report.ok
    assert "at [1]" in str(report)


def test_missing_surplus_and_differently_shaped_outputs_are_mismatches() -> None:
    assert "there is no such output" in str(compare({"y": Y}, {}))
    assert "reference has no such output" in str(compare({"y": Y}, {"y": Y, "z": Y}))
    assert "has shape [4], want [2, 2]" in str(compare({"y": Y}, {"y": Y.reshape(4)}))
    assert "is f64, want f32" in str(compare({"y": Y}, {"y": Y.astype(np.float64)}))
    for candidate in ({}, {"y": Y, "z": Y}, {"y": Y.reshape(4)}, {"y": Y.astype(np.float64)}):
        assert not compare({"y": Y}, candidate, 1e9).ok


def test_empty_and_equal_passes_and_proves_nothing() -> None:
    report = compare({"y": np.zeros((0, 3), np.float32)}, {"y": np.zeros((0, 3), np.float32)})
    assert report.ok
    assert report.unproven == ("y",)


def test_a_scalar_output_is_compared_too() -> None:
    assert compare({"y": np.float32(2.5)}, {"y": np.float32(2.5)}).ok
    assert not compare({"y": np.float32(2.5)}, {"y": np.float32(2.4)}).ok


def test_samples_are_merged_into_the_worst_and_dispel_each_others_doubts() -> None:
    low, high = np.zeros(2, np.float32), np.full(2, 4, np.float32)
    merged = merge([compare({"y": low}, {"y": low}), compare({"y": high}, {"y": high + np.float32(1e-6)})])
    assert merged.ok
    assert merged.unproven == ()
    assert only(merged).count == 4
    same = merge([compare({"y": low}, {"y": low}), compare({"y": low}, {"y": low})])
    assert same.unproven == ("y",)


@pytest.mark.parametrize("order", [1, -1])
def test_one_bad_sample_spoils_the_merged_report(order: int) -> None:
    reports = [compare({"y": Y}, {"y": Y}), compare({"y": Y}, {"y": np.full_like(Y, np.nan)})][::order]
    assert not merge(reports).ok


def test_a_report_is_json_without_infinities_and_survives_the_pipe() -> None:
    report = compare({"y": np.zeros(2, np.float32), "z": Y}, {"y": np.ones(2, np.float32), "z": Y})
    text = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(text)["outputs"][0]["rel"] == "inf"
    assert ParityReport.from_transport(json.loads(json.dumps(report.to_transport()))) == report


def test_tolerances_are_read_from_the_command_line() -> None:
    assert parse_tolerances([]) is None
    assert parse_tolerances(["1e-3"]) == dict.fromkeys(TOLERANCES, 1e-3)
    assert parse_tolerances(["f32=1e-4,bf16=0.1", "scores=0"]) == {"f32": 1e-4, "bf16": 0.1, "scores": 0.0}
    for text in ("f32=", "f32=-1", "many", "f32=nan", "f32=inf", ""):
        with pytest.raises(UsageError, match="tolerance"):
            parse_tolerances([text])


def test_an_output_without_values_is_unproven() -> None:
    empty = np.zeros((0, 4), np.float32)
    report = compare({"boxes": empty}, {"boxes": empty})
    assert (report.ok, report.unproven) == (True, ("boxes",))
    assert report.rows[0].note == "the reference holds no value"
    one = compare({"boxes": np.array([[1, 2, 3, 4]], np.float32)}, {"boxes": np.array([[1, 2, 3, 4]], np.float32)})
    assert merge([report, one]).unproven == ()
