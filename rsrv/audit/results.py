"""Results of long runs of `verify`: a file that grows by a line for each program, so that a run can be taken up again.

Tab-separated: model, batch, ok, relative errors (by output, in order), note (X-55).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rsrv.audit.verify import VerifiedProgram, VerifyReport
from rsrv.core.errors import UsageError

_HEAD = ("model", "batch", "ok", "rel", "note")
NO_PROGRAM = "-"
"""In place of the batch: the line says what was not compared."""


@dataclass(frozen=True)
class Result:
    """One program of one bundle; `batch` is the batch size, with the sizes of a shape variant behind an ``@``."""

    model: str
    batch: str
    ok: bool
    rels: tuple[float, ...]
    note: str

    def passed(self, *, strict: bool = False) -> bool:
        """As `VerifyReport.passed`: a line that is all right and has a note was unproven, or left out."""
        return self.ok and not (strict and self.note)


def read_results(path: Path | str) -> list[Result]:
    """The lines of the file, none when it is not there. Raises UsageError for a file that holds something else.

    Of a line that a killed run left unfinished, nothing counts, nor do the other lines of that model: it is to be
    verified again.
    """
    try:
        return _read(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UsageError(f"{path} is no file of results: {error}", hint="name another file, or remove it") from None


def results_of(report: VerifyReport) -> list[Result]:
    """A line for each program, and one with the batch ``-`` for a bundle of which nothing, or not all, was compared."""
    model = _line(report.bundle)
    results = [_result(model, program) for program in report.programs]
    if report.problem is not None or report.skipped or not results:
        passed = report.problem is None and (bool(results) or report.passed())
        results.append(Result(model, NO_PROGRAM, passed, (), _line(report.problem or _left_out(report))))
    return results


def append_results(path: Path | str, report: VerifyReport) -> list[Result]:
    """Add the programs of `report` to the file, which is made if need be; returns what was added.

    They appear together, in one write. What a killed run left unfinished there is removed first.
    """
    file = Path(path)
    results = results_of(report)
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if text and not text.endswith("\n"):
        replace_text(file, _text(_read(text)))
    lines = "".join(_format(result) + "\n" for result in results)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(lines if stream.tell() else _text([]) + lines)
    return results


def replace_text(path: Path, text: str) -> None:
    """Write a file anew, in one step: a run that is killed leaves the old one or the new one."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def _read(text: str) -> list[Result]:
    *lines, unfinished = text.split("\n")
    if lines[:1] != ["\t".join(_HEAD)] and (lines or not "\t".join(_HEAD).startswith(unfinished) or not unfinished):
        raise ValueError("its first line is another")
    results = [_parse(line) for line in lines[1:]]
    if unfinished and results and results[-1].model.startswith(unfinished.partition("\t")[0]):
        return [result for result in results if result.model != results[-1].model]
    return results


def _left_out(report: VerifyReport) -> str:
    """Empty for a meta bundle, which has nothing to compare and is all right."""
    if report.is_meta:
        return ""
    return "; ".join(f"{skipped.check}: {skipped.reason}" for skipped in report.skipped) or "nothing was compared"


def _text(results: Sequence[Result]) -> str:
    return "".join(line + "\n" for line in ("\t".join(_HEAD), *map(_format, results)))


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
