"""The report of a conversion, and what of an error it shows."""

from __future__ import annotations

import json
from pathlib import Path

from rsrv.core.errors import ExportError
from rsrv.export.repository import ConversionReport, ConversionResult
from rsrv.export.repository.report import short_error, with_hint

REPORT = ConversionReport(
    (
        ConversionResult("a", "a", Path("/m/a"), "generic", "success", (1, 3), seconds=1.23456),
        ConversionResult("b", "b", Path("/m/b"), "generic", "partial", (1,), (2, 4), "RuntimeError: `x|y`\nmore"),
        ConversionResult("c", "c", None, "handler", "failed", reason="no <weights>"),
        ConversionResult("d", "d__dynamic", Path("/m/d"), "excluded", "skipped", reason="excluded: old"),
        ConversionResult("e", "e", Path("/m/e"), "generic", "success", was_there=True, note="one row"),
    )
)


def test_the_page_has_counts_and_a_table_for_each_outcome() -> None:
    page = REPORT.to_markdown()
    assert "| success | 2 |\n| partial | 1 |\n| failed | 1 |\n| skipped | 1 |" in page
    assert "## Failed\n\n| bundle | from | reason |\n| --- | --- | --- |\n| c | c | no \\<weights> |" in page
    assert "| d\\_\\_dynamic | /m/d | excluded: old |" in page
    assert "| b | 1 | 2, 4 | RuntimeError: \\`x\\|y\\` more |" in page
    assert "| a | 1, 3 |  |\n| e | no batch axis | was there; one row |" in page


def test_both_forms_are_written_as_a_whole(tmp_path: Path) -> None:
    REPORT.write(tmp_path / "deep/report.md", tmp_path / "deep/report.json")
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["report.json", "report.md"]
    found = json.loads((tmp_path / "deep/report.json").read_text())
    assert (found["ok"], found["counts"]["partial"]) == (False, 1)
    assert found["models"][1] == {
        "model": "b", "bundle": "b", "source": "/m/b", "disposition": "generic", "outcome": "partial",
        "batch_sizes": [1], "dropped_batch_sizes": [2, 4], "reason": "RuntimeError: `x|y`\nmore",
        "was_there": False, "note": None, "seconds": 0.0,
    }  # fmt: skip


def test_an_error_is_trimmed_to_the_lines_that_name_it() -> None:
    trace = (
        "Traceback (most recent call last):\n  File 'm.py', line 3, in forward\n"
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode: Could not guard on data-dependent u0 > 0\n"
        "Caused by: (m.py:3)\n\nRuntimeError: later\n"
    )
    assert short_error(trace) == (
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode: Could not guard on data-dependent u0 > 0; "
        "RuntimeError: later"
    )
    assert short_error(ValueError("bad\nsecond")) == "ValueError: bad"
    assert short_error(ExportError("the model draws numbers\n  model.py:3")) == "the model draws numbers"
    framed = 'raised ValueError: no\n  File "h.py", line 1, in handler\n    raise ValueError("no")'
    assert short_error(framed) == "raised ValueError: no"
    assert short_error("") == "no message"
    long = short_error(ValueError("x" * 900))
    assert (len(long), long[-1]) == (500, "…")


def test_a_hint_is_kept_where_there_is_room() -> None:
    assert with_hint("bad", "do this") == "bad (do this)"
    assert with_hint("b" * 499, "do this") == "b" * 499
    assert with_hint("bad", None) == "bad"
