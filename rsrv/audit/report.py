"""What `verify` found, as a Markdown page: how much passed, what failed, and a line for each sample (X-53, X-55)."""

from __future__ import annotations

from collections.abc import Sequence

from rsrv.audit.parity import ParityReport, ParityRow
from rsrv.audit.results import NO_PROGRAM, Result
from rsrv.audit.verify import VerifyReport


def markdown(results: Sequence[Result], reports: Sequence[VerifyReport] = ()) -> str:
    """The page.

    Args:
        results: a line per program, of this run and of earlier ones: the programs that failed and the worst error of
            each model that passed.
        reports: the bundles of this run, whose samples are listed one by one.
    """
    failed = [result for result in results if not result.ok]
    worst: dict[str, float] = {}
    for result in results:
        worst[result.model] = max(worst.get(result.model, 0.0), *result.rels, 0.0)
    compared = sum(result.batch != NO_PROGRAM for result in results)
    passed = {model: rel for model, rel in worst.items() if model not in {result.model for result in failed}}
    lines = ["# Parity", "", f"{len(passed)} of {len(worst)} models passed, {compared} programs compared.", ""]
    counts = [report.counts for report in reports]
    if counts:
        right, total = (sum(column) for column in zip(*counts, strict=True))
        lines[2] = f"{right} of {total} samples passed in this run. {lines[2]}"
    if failed:
        lines += ["## Failed", "", "| model | batch | rel | note |", "|---|---|---|---|"]
        lines += [
            f"| {_cell(r.model)} | {r.batch} | {', '.join(f'{rel:.3g}' for rel in r.rels)} | {_cell(r.note)} |"
            for r in failed
        ]
        lines.append("")
    if passed:
        lines += ["## Passed", "", "| model | worst rel |", "|---|---|"]
        lines += [f"| {_cell(model)} | {rel:.3g} |" for model, rel in sorted(passed.items())]
        lines.append("")
    for report in reports:
        lines += _samples(report)
    return "\n".join(lines)


def _samples(report: VerifyReport) -> list[str]:
    right, total = report.counts
    how = (", served" if report.served else "") + (", through the hooks" if report.hooks else "")
    lines = [f"## {_cell(report.bundle)} against {_cell(report.against)}{how}: {right} of {total} samples passed", ""]
    if report.problem is not None:
        lines += [_cell(report.problem), ""]
    for program in report.programs:
        lines += [f"### {program.label}: {program.verdict}", ""]
        lines += [f"- {_cell(report.sample_name(i))}: {_sample(parity)}" for i, parity in program.samples.items()]
        lines += [f"- {_cell(program.problem)}"] if program.problem is not None else []
        lines.append("")
    lines += [f"- {skipped.check} skipped: {_cell(skipped.reason)}" for skipped in report.skipped]
    return [*lines, ""] if report.skipped else lines


def _sample(parity: ParityReport) -> str:
    return f"{'passed' if parity.ok else 'FAILED'} ({'; '.join(map(_output, parity.rows))})"


def _output(row: ParityRow) -> str:
    if row.problem is not None:
        return f"{_cell(row.name)}: {row.verdict}, {_cell(row.problem)}"
    at = "" if row.worst is None else f" at {list(row.worst)}"
    numbers = f"max abs {row.max_abs:.3g}{at}, mean abs {row.mean_abs:.3g}, rel {row.rel:.3g}"
    return f"{_cell(row.name)}: {row.verdict}, {numbers}"


def _cell(text: str) -> str:
    """`text` on one line, without what Markdown would take for a table or HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
