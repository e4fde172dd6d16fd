"""What ``rsrv bundle verify`` does with its options: one bundle after the other, the files it keeps, what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.cli import output

if TYPE_CHECKING:
    from rsrv.audit import AuditProcess, ParityReport, VerifyReport
    from rsrv.audit.results import Result
    from rsrv.export.verification import Verification


def bundles_of(directories: Sequence[Path], repo: Path | None, exclude: Sequence[str]) -> list[Path]:
    """The bundles that were named, and those in `repo`, without those in `exclude`. Raises UsageError."""
    from rsrv.bundle import discover
    from rsrv.core.errors import UsageError

    found = list(directories)
    if repo is not None:
        if not repo.is_dir():
            raise UsageError(f"--repo {repo}: no such directory")
        found += [repo / bundle.name for bundle in discover([repo])]
    if not found:
        raise UsageError(
            f"{repo} holds no bundle" if repo is not None else "name bundles to verify: DIR…, or --repo DIR"
        )
    names = {directory.absolute().name for directory in found}
    left_out = {name.strip() for text in exclude for name in text.split(",")}
    if unknown := sorted(left_out - names):
        raise UsageError(f"--exclude names {unknown[0]!r}; the bundles are {', '.join(sorted(names))}")
    return [directory for directory in dict.fromkeys(found) if directory.absolute().name not in left_out]


@dataclass(frozen=True)
class Run:
    """The bundles to verify, and everything that does not change between them; `timeout` in seconds."""

    bundles: Sequence[Path]
    verification: Verification
    batches: Sequence[int] | None
    tolerances: dict[str, float] | None
    backend: str
    timeout: float

    def verify(self, process: AuditProcess, *, served: bool, results: Path | None, report: Path | None) -> Outcome:
        """Verify the bundles that the file `results` does not know; it and `report` are written after each of them."""
        from rsrv.audit.report import markdown
        from rsrv.audit.results import append_results, read_results, replace_text, results_of

        outcome = Outcome(list(read_results(results)) if results is not None else [])
        known = {result.model for result in outcome.results}
        for directory in self.bundles:
            if (name := directory.absolute().name) in known:
                output.note(f"{directory}: skipped, {results} has {name!r} already")
                outcome.names.add(name)
                continue
            done = self._verify(directory, process, served=served)
            outcome.reports.append(done)
            outcome.results += results_of(done) if results is None else append_results(results, done)
            if report is not None:
                replace_text(report, markdown(outcome.results, outcome.reports))
        if report is not None:
            replace_text(report, markdown(outcome.results, outcome.reports))
        return outcome

    def _verify(self, directory: Path, process: AuditProcess, *, served: bool) -> VerifyReport:
        from rsrv.audit import VerifyReport
        from rsrv.bundle import open_bundle
        from rsrv.cli.served import served as serving
        from rsrv.core.errors import BundleError

        with ExitStack() as stack:
            ask = None
            if served and directory.is_dir():
                try:
                    if not open_bundle(directory).manifest.is_meta:
                        output.note(f"{directory}: serving it …")
                        ask = stack.enter_context(serving(directory, backend=self.backend, timeout=self.timeout))
                except BundleError as error:
                    label = self.verification.label
                    return VerifyReport(directory.absolute().name, directory, label, problem=error.message)
            return self.verification.verify(
                directory, process=process, batches=self.batches, tolerances=self.tolerances, ask=ask
            )


@dataclass
class Outcome:
    """What came of a run. `results` has the lines of earlier runs, too, `names` the bundles of those alone."""

    results: list[Result]
    reports: list[VerifyReport] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def passed(self, *, strict: bool) -> bool:
        """Nothing failed in this run, nor in the earlier ones for the bundles that were named again."""
        now = all(report.passed(strict=strict) for report in self.reports)
        return now and all(result.passed(strict=strict) for result in self.results if result.model in self.names)

    def write_junit(self, path: Path, *, strict: bool) -> None:
        from rsrv.audit import to_junit

        checks = [report.as_check() for report in self.reports]
        path.write_text(to_junit(checks, strict=strict, name="rsrv bundle verify"), encoding="utf-8")

    def show(self, *, strict: bool, each_sample: bool) -> None:
        """How much passed, then the numbers."""
        if output.is_json():
            bundles = [report.to_json() for report in self.reports]
            output.json({"ok": self.passed(strict=strict), "strict": strict, "bundles": bundles})
            return
        for report in self.reports:
            verdict = "ok" if report.passed(strict=strict) else "failed"
            right, total = report.counts
            counted = f"{right} of {total} samples passed, {len(report.programs)} programs"
            if report.is_meta:
                counted = "kind meta, which has no programs"
            how = ("served, " if report.served else "") + ("through the hooks, " if report.hooks else "")
            output.note(f"{report.path}: {verdict} against {report.against} ({how}{report.problem or counted})")
        rows = [row for report in self.reports for row in _rows(report, each_sample=each_sample)]
        if rows:
            head = ["bundle", "program", "sample" if each_sample else "samples", "output", "verdict"]
            output.table(None, [*head, "max abs", "mean abs", "rel", "ulp", "worst", "note"], rows)


def show_originals(run: Run, process: AuditProcess) -> None:
    """Shapes, dtypes and ranges of what the originals of the bundles return."""
    from rsrv.core.errors import UsageError

    rows: list[tuple[object, ...]] = []
    for directory in run.bundles:
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
        name = directory.absolute().name
        for answer in run.verification.outputs_of_original(directory, process=process, batches=run.batches):
            for row in answer.rows:
                shape = "x".join(map(str, row.shape)) or "scalar"
                numbers = (row.lowest, row.highest, row.non_finite)
                rows.append((name, answer.batch_size, answer.sample, row.name, row.dtype, shape, *numbers))
    columns = ["bundle", "rows", "sample", "output", "dtype", "shape", "lowest", "highest", "not finite"]
    output.table(None, columns, rows)


def _rows(report: VerifyReport, *, each_sample: bool) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for program in report.programs:
        what = (
            report.bundle,
            program.file if not program.batch_key or "." in program.file else f"{program.batch_key} rows",
        )
        if program.problem is not None:
            rows.append((*what, None, None, "failed", None, None, None, None, None, program.problem))
        elif each_sample:
            for sample, parity in program.samples.items():
                rows += _numbers(what, report.sample_name(sample), parity)
        else:
            rows += _numbers(what, str(len(program.samples)), program.parity)
    rows += [
        (report.bundle, skipped.check, None, None, "skipped", None, None, None, None, None, skipped.reason)
        for skipped in report.skipped
    ]
    return rows


def _numbers(what: tuple[str, str], sample: str, parity: ParityReport) -> list[tuple[object, ...]]:
    return [
        (*what, sample, row.name, row.verdict, row.max_abs, row.mean_abs, row.rel, row.ulp, worst, row.note)
        for row in parity.rows
        for worst in [None if row.worst is None else ",".join(map(str, row.worst)) or "-"]
    ]
