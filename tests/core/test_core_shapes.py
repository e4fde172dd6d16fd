"""The letter grammar: every error with its rule, and what a correct shape comes to."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.core.errors import ManifestError
from rsrv.core.shapes import AUTO_LETTERS, auto_letters, letter_problems, parse_letters
from rsrv.core.tensors import BATCH, VARIABLE, Dim, DimKind


def fixed(size: int) -> Dim:
    return Dim(DimKind.FIXED, size)


def test_letters_are_read_in_row_major_order():
    axes, batch_axis = parse_letters("nchw", {"c": 3, "h": 224, "w": -1}, tensor="x")
    assert axes == (BATCH, fixed(3), fixed(224), VARIABLE)
    assert batch_axis == 0


def test_b_and_n_mean_the_same_and_may_stand_anywhere():
    assert parse_letters("sb", {"s": 5}, tensor="x") == ((fixed(5), BATCH), 1)
    assert parse_letters("sn", {"s": 5}, tensor="x") == ((fixed(5), BATCH), 1)


def test_the_empty_shape_is_rank_zero():
    assert parse_letters("", {}, tensor="x") == ((), None)


def test_upper_and_lower_case_are_different_letters():
    axes, _ = parse_letters("hH", {"h": 1, "H": 2}, tensor="x")
    assert axes == (fixed(1), fixed(2))


@pytest.mark.parametrize(
    ("letters", "dims", "rule", "named"),
    [
        ("c", [3], "B-16", "[3]"),
        ("c", None, "B-16", "None"),
        ("c1", {"c": 3}, "B-17", "'1'"),
        ("c_", {"c": 3}, "B-17", "'_'"),
        ("c ", {"c": 3}, "B-17", "' '"),
        ("é", {}, "B-17", "'é'"),
        ("cc", {"c": 3}, "B-18", "'c'"),
        ("nn", {}, "B-18", "'n'"),
        ("nb", {}, "B-19", "'nb'"),
        ("bcn", {"c": 1}, "B-19", "'bcn'"),
        ("c", {"c": 3, "ch": 3}, "B-20", "'ch'"),
        ("c", {"c": 3, 1: 3}, "B-20", "1"),
        ("c", {"c": 3, "é": 3}, "B-20", "'é'"),
        ("nc", {"c": 3, "n": 1}, "B-21", "'n'"),
        ("bc", {"c": 3, "b": 1}, "B-21", "'b'"),
        ("c", {"c": 0}, "B-22", "0"),
        ("c", {"c": -2}, "B-22", "-2"),
        ("c", {"c": True}, "B-22", "True"),
        ("c", {"c": 3.0}, "B-22", "3.0"),
        ("c", {"c": -1.0}, "B-22", "-1.0"),
        ("c", {"c": "3"}, "B-22", "'3'"),
        ("c", {"c": 2**63}, "B-22", str(2**63)),
        ("c", {"c": 3, "z": 1, "a": 1}, "B-23", "'a', 'z'"),
        ("chw", {"c": 3}, "B-24", "'h', 'w'"),
        ("Nc", {"c": 3, "N": 1}, "B-28", "'N'"),
        ("cB", {"c": 3, "B": 1}, "B-28", "'B'"),
    ],
)
def test_each_violation_names_its_rule_the_tensor_and_the_value(letters, dims, rule, named):
    with pytest.raises(ManifestError) as raised:
        parse_letters(letters, dims, tensor="image")
    assert raised.value.rule == rule
    assert "'image'" in raised.value.message
    assert named in raised.value.message


def test_all_violations_of_one_tensor_are_found_in_rule_order():
    problems = list(letter_problems("x", "nbcc1", {"n": 1, "zz": 1, "c": 0, "q": 1}))
    assert [problem.rule for problem in problems] == ["B-17", "B-18", "B-19", "B-20", "B-21", "B-22", "B-23"]


def test_older_manifests_may_use_upper_case_n_and_b():
    axes, batch_axis = parse_letters("Nn", {"N": 4}, tensor="x", row_major=False)
    assert axes == (fixed(4), BATCH)
    assert batch_axis == 1


def test_automatic_letters_leave_out_the_batch_letters():
    assert auto_letters(0) == ""
    assert auto_letters(3) == "acd"
    assert auto_letters(24) == AUTO_LETTERS == "".join(c for c in string.ascii_lowercase if c not in "nb")


@pytest.mark.parametrize("count", [25, -1])
def test_more_axes_than_letters_are_refused(count):
    with pytest.raises(ManifestError, match=str(count)) as raised:
        auto_letters(count)
    assert raised.value.rule == "B-29"


@settings(deadline=None)
@given(
    letters=st.text(alphabet="abcnNxé1 ", max_size=6),
    dims=st.dictionaries(
        st.text(alphabet="abcnNx12", max_size=2), st.sampled_from([-2, -1, 0, 1, 7, True]), max_size=5
    ),
)
def test_what_has_no_violation_parses_to_exactly_its_letters(letters, dims):
    if list(letter_problems("x", letters, dims)):
        with pytest.raises(ManifestError):
            parse_letters(letters, dims, tensor="x")
        return
    axes, batch_axis = parse_letters(letters, dims, tensor="x")
    assert len(axes) == len(letters) == len(set(letters))
    assert set(dims) == {c for c in letters if c not in "nb"}
    assert [i for i, axis in enumerate(axes) if axis is BATCH] == ([] if batch_axis is None else [batch_axis])
    for letter, axis in zip(letters, axes, strict=True):
        if letter not in "nb":
            assert axis == (VARIABLE if dims[letter] == -1 else fixed(dims[letter]))
