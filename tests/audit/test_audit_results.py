"""Results of `verify` in a file that grows, and its summary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rsrv.audit import VerifyReport, compare
from rsrv.audit.findings import Skipped
from rsrv.audit.report import markdown
from rsrv.audit.results import Result, append_results, read_results, results_of
from rsrv.audit.verify import VerifiedProgram
from rsrv.core.errors import UsageError

Y = np.array([1, 2], np.float32)


def report(name: str, off: float = 0.0) -> VerifyReport:
    parity = compare({"y": Y, "z": Y}, {"y": Y + np.float32(off), "z": Y})
    programs = [
        VerifiedProgram("model.v0.b4.mlir", (8, 16), 4, {0: parity}),
        VerifiedProgram("model.mlir", (), 0, problem="it\tended\nbadly"),
    ]
    return VerifyReport(name, Path(name), "golden", programs)


def test_results_are_appended_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "parity.tsv"
    assert read_results(file) == []
    added = append_results(file, report("a", 0.5)) + append_results(file, report("b"))
    assert read_results(file) == added
    assert [(r.model, r.batch, r.ok) for r in added] == [
        ("a", "4@8x16", False),
        ("a", "1", False),
        ("b", "4@8x16", True),
        ("b", "1", False),
    ]
    assert added[0].rels == (0.25, 0.0)
    assert added[1].note == "it ended badly"


def test_a_bundle_that_could_not_be_compared_has_a_line_too(tmp_path: Path) -> None:
    append_results(tmp_path / "r", VerifyReport("a", tmp_path, "golden", problem="there are no goldens"))
    assert read_results(tmp_path / "r") == [Result("a", "-", False, (), "there are no goldens")]


@pytest.mark.parametrize("text", ["", "junk\n", "model\tbatch\tok\trel\tnote\na\tb\n", "\xff"])
def test_a_file_of_something_else_is_not_touched(tmp_path: Path, text: str) -> None:
    (tmp_path / "r").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="is no file of results"):
        read_results(tmp_path / "r")


def test_a_line_that_a_killed_run_left_unfinished_makes_its_model_new_again(tmp_path: Path) -> None:
    file = tmp_path / "r"
    append_results(file, report("a"))
    whole = file.read_text()
    append_results(file, report("b"))
    for end in (len(whole) + 3, len(file.read_text()) - 1, len(file.read_text()) - 20):
        file.write_text(file.read_text()[:end])
        assert {result.model for result in read_results(file)} == {"a"}
        append_results(file, report("b"))
        assert [result.model for result in read_results(file)] == ["a", "a", "b", "b"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_of_which_only_half_the_head_was_written_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("model\tba")
    assert read_results(tmp_path / "r") == []
    append_results(tmp_path / "r", report("a"))
    assert len(read_results(tmp_path / "r")) == 2


def test_names_with_line_separators_stay_in_their_cell(tmp_path: Path) -> None:
    added = append_results(tmp_path / "r", report("a\u2028b\x85c"))
    assert read_results(tmp_path / "r") == added


def test_the_page_has_a_line_for_each_sample_and_the_count_up_front() -> None:
    one = compare({"y": Y, "z": Y}, {"y": Y + np.float32(0.5), "z": Y})
    two = compare({"y": Y}, {"y": Y})
    broken = VerifiedProgram("model.b4.mlir", (), 4, {0: one, 1: two}, problem="it <b>ended</b>\nbadly | so")
    page = markdown(
        [], [VerifyReport("net", Path("net"), "jax:m:f", [broken], hooks=True, sample_names=("cat", "dog"))]
    )
    assert "1 of 2 samples passed in this run. 0 of 0 models passed" in page
    assert "## net against jax:m:f, through the hooks: 1 of 2 samples passed" in page
    assert "- cat: FAILED (y: mismatch, max abs 0.5 at [0], mean abs 0.5, rel 0.25; z: ok, max abs 0" in page
    assert "- dog: passed (y: ok, max abs 0, mean abs 0, rel 0)" in page
    assert "- it &lt;b>ended&lt;/b> badly \\| so" in page


def test_the_summary_lists_failures_and_the_worst_error_of_every_model_that_passed() -> None:
    text = markdown(
        [
            Result("good", "1", True, (1e-7,), ""),
            Result("good", "8", True, (3e-7, 0.0), ""),
            Result("bad", "1", True, (0.0,), ""),
            Result("bad", "8", False, (0.5, float("inf")), "a | b"),
        ]
    )
    assert "1 of 2 models passed, 4 programs compared." in text
    assert "| bad | 8 | 0.5, inf | a \\| b |" in text
    assert "| good | 3e-07 |" in text


def test_what_was_unproven_or_left_out_in_an_earlier_run_fails_a_strict_one() -> None:
    constant = VerifiedProgram("model.b1.mlir", (), 1, {0: compare({"y": Y * 0}, {"y": Y * 0})})
    proven = VerifiedProgram("model.b1.mlir", (), 1, {0: compare({"y": Y}, {"y": Y})})
    skipped = [Skipped("model.b8.mlir", "no sample has the shapes of this program")]
    reports = [
        VerifyReport("a", Path("a"), "golden", [constant]),
        VerifyReport("b", Path("b"), "golden", [proven], skipped),
        VerifyReport("c", Path("c"), "golden", [proven]),
        VerifyReport("d", Path("d"), "golden", is_meta=True),
    ]
    for strict in (False, True):
        earlier = [all(result.passed(strict=strict) for result in results_of(report)) for report in reports]
        assert earlier == [report.passed(strict=strict) for report in reports]
        assert earlier == [not strict, not strict, True, True]
    assert "2 of 2 models passed, 2 programs compared." in markdown([*results_of(reports[0]), *results_of(reports[1])])
