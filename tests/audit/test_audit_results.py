"""Results of `verify` in a file that grows, and its summary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rsrv.audit import VerifyReport, compare
from rsrv.audit.results import Result, append_results, markdown, read_results
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
