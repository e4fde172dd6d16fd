"""Results of long runs of `verify`: a file that grows by a line for each program, so that a run can be taken up again.

Tab-separated: model, batch, ok, relative errors (by output, in order), note (X-55).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rsrv.audit.verify import VerifiedProgram, VerifyReport
from rsrv.core.errors import UsageError

_HEAD = ("model", "batch", "ok", "rel", "note")


@dataclass(frozen=True)
class Result:
    """One program of one bundle; `batch` is the batch size, with the sizes of a shape variant behind an ``@``."""

    model: str
    batch: str
    ok: bool
    rels: tuple[float, ...]
    note: str


def read_results(path: Path | str) -> list[Result]:
    """The lines of the file, none when it is not there. Raises UsageError for a file that holds something else."""
    file = Path(path)
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        if lines[:1] != ["\t".join(_HEAD)]:
            raise ValueError("its first line is another")
        return [_parse(line) for line in lines[1:]]
    except ValueError as error:
        raise UsageError(f"{path} is no file of results: {error}", hint="name another file, or remove it") from None


def append_results(path: Path | str, report: VerifyReport) -> list[Result]:
    """Add the programs of `report` to the file, which is made if need be; returns what was added."""
    file = Path(path)
    results = [_result(report.bundle, program) for program in report.programs]
    if report.problem is not None:
        results.append(Result(report.bundle, "-", False, (), _line(report.problem)))
    with file.open("a", encoding="utf-8") as stream:
        if not stream.tell():
            stream.write("\t".join(_HEAD) + "\n")
        stream.writelines(_format(result) + "\n" for result in results)
    return results


def markdown(results: Sequence[Result]) -> str:
    """A summary: the programs that failed, and the worst error of every model that passed."""
    failed = [result for result in results if not result.ok]
    worst: dict[str, float] = {}
    for result in results:
        worst[result.model] = max(worst.get(result.model, 0.0), *result.rels, 0.0)
    passed = {model: rel for model, rel in worst.items() if model not in {result.model for result in failed}}
    lines = ["# Parity", "", f"{len(passed)} of {len(worst)} models passed, {len(results)} programs compared.", ""]
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
    return "\n".join(lines)


def _result(model: str, program: VerifiedProgram) -> Result:
    batch = str(program.batch_key or 1)
    if program.variant:
        batch += "@" + "x".join(map(str, program.variant))
    rows = program.parity.rows
    note = program.problem or "; ".join(f"{row.name}: {row.note}" for row in rows if row.note is not None)
    return Result(model, batch, program.verdict in ("ok", "unproven"), tuple(row.rel for row in rows), _line(note))


def _format(result: Result) -> str:
    rels = ",".join(repr(rel) for rel in result.rels)
    return "\t".join((result.model, result.batch, "true" if result.ok else "false", rels, result.note))


def _parse(line: str) -> Result:
    cells = line.split("\t")
    if len(cells) != len(_HEAD) or cells[2] not in ("true", "false"):
        raise ValueError(f"{line[:80]!r} has not the columns {', '.join(_HEAD)}")
    rels = tuple(float(part) for part in cells[3].split(",") if part)
    return Result(cells[0], cells[1], cells[2] == "true", rels, cells[4])


def _line(text: str) -> str:
    """`text` in one cell of one line."""
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
