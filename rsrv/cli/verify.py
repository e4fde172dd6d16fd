"""``rsrv bundle verify`` and ``rsrv bundle diff``: the numbers of bundles, and what differs between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output

if TYPE_CHECKING:
    from rsrv.audit import AuditProcess, ParityReport, VerifyReport

ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tolerance",
        metavar="X | DTYPE=X | OUTPUT=X",
        help="Largest max|Δ|/max|reference| (repeatable). Default: what the bundle states, else f64 1e-12, f32 1e-5, "
        "f16 2e-3, bf16 1e-2; integers and booleans are exact.",
    ),
]
BackendOption = Annotated[
    str, typer.Option("--backend", metavar="B", help="Device to run programs on: auto, cpu or cuda.")
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Time for compiling and running one program, or for importing hooks."
    ),
]


def verify(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Directories of bundles.")],
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="golden | torch:SPEC | jax:SPEC",
            help="The goldens of the bundle, or the original model: SPEC as in `rsrv export`.",
        ),
    ] = "golden",
    batch: Annotated[
        str, typer.Option("--batch", metavar="all | N,N,…", help="Only the programs for these batch sizes.")
    ] = "all",
    tolerance: ToleranceOption = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            "--samples",
            metavar="DIR",
            help="With an original: compare these samples (NAME.npy, or a directory with INPUT.npy for each sample) "
            "instead of random ones.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--max", metavar="N", min=1, help="Only the first N samples.")] = None,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="Random samples for each program (with an original).")
    ] = 1,
    input_range: Annotated[
        list[str] | None,
        typer.Option("--input-range", metavar="NAME=LOW:HIGH", help="Values of a random input (repeatable)."),
    ] = None,
    backend: BackendOption = "auto",
    timeout: TimeoutOption = 600.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Unproven outputs and programs without a sample fail, too.")
    ] = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")] = None,
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="FILE", help="Add a line per program to this TSV, and skip models in it."),
    ] = None,
    summary: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="With --results: write a summary in Markdown.")
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Compare the numbers of every program with goldens or with the original model, on this machine.

    Goldens and samples are packed into batches as the server packs requests. Exit code 1 when an output is off, when a
    program cannot be run, or when there is nothing to compare with. An output is unproven when its reference is the
    same number everywhere, or not finite.

    Example:
        rsrv bundle verify models/*
        rsrv bundle verify models/net --against jax:model.py:make --batch 1,8 --tolerance f32=1e-4
        rsrv bundle verify models/* --results parity.tsv --report parity.md
    """
    from rsrv.audit import AuditProcess, to_junit
    from rsrv.audit.parity import parse_tolerances
    from rsrv.audit.results import append_results, markdown, read_results
    from rsrv.core.errors import UsageError
    from rsrv.export.golden import parse_range

    if against == "golden" and (samples is not None or input_range or count != 1):
        raise UsageError("--samples, --count and --input-range need an original: --against jax:SPEC or torch:SPEC")
    if summary is not None and results is None:
        raise UsageError("--report summarises a file of results: --results FILE")
    require_backend(backend)
    tolerances = parse_tolerances(tolerance or [])
    ranges = dict(parse_range(text) for text in input_range or [])
    sizes = _batches(batch)
    source = _Source(against, samples, limit, count, ranges)
    known = read_results(results) if results is not None else []
    done = {result.model for result in known}
    reports: list[VerifyReport] = []
    with AuditProcess(backend=backend, timeout_seconds=timeout) as process:
        for directory in directories:
            if (name := directory.absolute().name) in done:
                output.note(f"{directory}: skipped, {results} has {name!r} already")
                continue
            reports.append(source.verify(directory, sizes, tolerances, process))
            if results is not None:
                known += append_results(results, reports[-1])
    if summary is not None:
        summary.write_text(markdown(known), encoding="utf-8")
    if junit is not None:
        checks = [report.as_check() for report in reports]
        junit.write_text(to_junit(checks, strict=strict, name="rsrv bundle verify"), encoding="utf-8")
    names = {directory.absolute().name for directory in directories} & done
    ok = all(report.passed(strict=strict) for report in reports)
    ok = ok and all(result.ok for result in known if result.model in names)
    if output.is_json():
        output.json({"ok": ok, "strict": strict, "bundles": [report.to_json() for report in reports]})
    else:
        _print(reports, strict, each_sample=samples is not None)
    if not ok:
        raise typer.Exit(1)


def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="Directory of a bundle.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Directory of another.")],
    as_json: output.JsonOption = False,
) -> None:
    """Show what differs between two bundles: manifests, signatures of programs, weights, other files.

    Exit code 0 when they are the same but for their provenance, 1 when they are not.

    Example:
        rsrv bundle diff models/net models.old/net
    """
    from rsrv.audit import diff_bundles
    from rsrv.core.errors import UsageError

    for directory in (left, right):
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
    found = diff_bundles(left, right)
    if output.is_json():
        output.json(found.to_json())
    else:
        if found.differences:
            rows = [(d.section, d.what, d.left, d.right, d.note) for d in found.differences]
            output.table(None, ["section", "what", "A", "B", "note"], rows)
        elsewhere = sum(d.section != "provenance" for d in found.differences)
        output.note("the same" if found.same else f"{elsewhere} differences besides provenance")
    if not found.same:
        raise typer.Exit(1)


def require_backend(backend: str) -> None:
    from rsrv.core.errors import UsageError

    if backend not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--backend {backend} is none of auto, cpu and cuda")


class _Source:
    """Where the numbers to compare with come from."""

    def __init__(
        self,
        against: str,
        samples: Path | None,
        limit: int | None,
        count: int,
        ranges: dict[str, tuple[float, float]],
    ) -> None:
        self._against = against
        self._samples = samples
        self._limit = limit
        self._count = count
        self._ranges = ranges

    def verify(
        self,
        directory: Path,
        batches: list[int] | None,
        tolerances: dict[str, float] | None,
        process: AuditProcess,
    ) -> VerifyReport:
        from rsrv.audit import VerifyReport, verify_bundle
        from rsrv.bundle import open_bundle
        from rsrv.core.errors import BundleError, UsageError

        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
        if self._against == "golden":
            return verify_bundle(directory, batches=batches, tolerances=tolerances, process=process, limit=self._limit)
        from rsrv.audit.golden import stated_ranges
        from rsrv.audit.samples import read_samples
        from rsrv.export.reference import answered, load_reference, sweep

        try:
            bundle = open_bundle(directory)
        except BundleError as error:
            return VerifyReport(directory.absolute().name, directory, self._against, problem=error.message)
        reference = load_reference(self._against, bundle.manifest)
        if self._samples is None:
            made = sweep(reference, count=self._count, ranges={**stated_ranges(bundle), **self._ranges})
            return verify_bundle(
                directory, against=self._against, sweep=made, batches=batches, tolerances=tolerances, process=process
            )
        goldens = answered(reference, read_samples(self._samples, bundle.manifest.executable_inputs, self._limit))
        return verify_bundle(
            directory, against=self._against, goldens=goldens, batches=batches, tolerances=tolerances, process=process
        )


def _batches(text: str) -> list[int] | None:
    from rsrv.core.errors import UsageError

    if text == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--batch {text} is neither all nor a list of sizes", hint="for example 1,8")
    return [int(part) for part in parts]


def _print(reports: list[VerifyReport], strict: bool, *, each_sample: bool) -> None:
    rows: list[tuple[object, ...]] = []
    for report in reports:
        for program in report.programs:
            if program.problem is not None:
                rows.append((report.bundle, program.file, None, None, "failed", None, None, None, program.problem))
                continue
            if each_sample:
                for sample, parity in program.samples.items():
                    rows += _rows(report.bundle, program.file, str(sample), parity)
            else:
                rows += _rows(report.bundle, program.file, str(len(program.samples)), program.parity)
        rows += [
            (report.bundle, skipped.check, None, None, "skipped", None, None, None, skipped.reason)
            for skipped in report.skipped
        ]
    if rows:
        head = ["bundle", "program", "sample" if each_sample else "samples", "output", "verdict"]
        output.table(None, [*head, "max abs", "rel", "ulp", "note"], rows)
    for report in reports:
        samples = [parity for program in report.programs for parity in program.samples.values()]
        verdict = "ok" if report.passed(strict=strict) else "failed"
        passed = sum(parity.ok for parity in samples)
        counted = f"{passed} of {len(samples)} samples passed, {len(report.programs)} programs"
        if report.is_meta:
            counted = "kind meta, which has no programs"
        output.note(f"{report.path}: {verdict} against {report.against} ({report.problem or counted})")


def _rows(bundle: str, file: str, sample: str, parity: ParityReport) -> list[tuple[object, ...]]:
    return [
        (bundle, file, sample, row.name, row.verdict, row.max_abs, row.rel, row.ulp, row.note) for row in parity.rows
    ]
