"""The short form of ``make bench``: cases run and yield their numbers. How large they are is not judged here."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import CASES, main
from benchmarks.load import ModelResult
from benchmarks.report import Bound, Measurement, record

ROOT = Path(__file__).parents[2]
LONG = {
    "restart",
    "full-batches",
    "beside-loading",
    "catalogue",
    "shared-host-weights",
    "gateway-fleet",
    "gateway-packing",
    "dataset",
    "client-cpu",
}
"""Cases whose short form takes more than ten seconds; end-to-end tests do what they do, and look at the answers."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cases_of_the_short_run_yield_finite_numbers_and_a_json_file(tmp_path):
    cases = [case for case in CASES if case not in LONG]
    command = [sys.executable, "-m", "benchmarks", "--short", "--out", str(tmp_path), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert report["machine"]["packages"]["jaxlib"]
    measured = {m["name"]: m["value"] for m in report["measurements"]}
    assert len(measured) >= len(cases)
    # A difference of two measurements, of memory say, may be below zero in so short a run.
    assert {name: value for name, value in measured.items() if not math.isfinite(value)} == {}


def test_an_unknown_case_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["nonsense"])
    assert ended.value.code == 2
    assert "request-cost" in capsys.readouterr().err


def test_quantiles_are_nearest_rank_in_milliseconds_and_bounds_compare():
    row = ModelResult("m", latencies=[0.004, 0.001, 0.002, 0.003])
    assert [row.quantile(q) for q in (0.0, 0.5, 0.99)] == pytest.approx([1.0, 2.0, 4.0])
    assert Measurement("a", 2.0, Bound("≤", 2.0)).met is True
    assert Measurement("a", 4.0, Bound(">", 4.0)).met is False
    assert Measurement("a", 1.0).met is None


def test_a_recorded_run_replaces_the_last_one_and_leaves_the_text_around_it(tmp_path):
    file = tmp_path / "performance.md"
    file.write_text("# Performance\n\nText.\n")
    record([Measurement("old", 1.0)], file)
    with file.open("a") as more:
        more.write("\n## After\n")
    record([Measurement("new", 3.0, Bound("≤", 2.0), {"ms": 1.5})], file)
    text = file.read_text()
    assert text.startswith("# Performance\n\nText.\n")
    assert text.endswith("## After\n")
    assert "| old |" not in text
    assert "| new | **3** | ≤ 2 | ms 1.5 |" in text
