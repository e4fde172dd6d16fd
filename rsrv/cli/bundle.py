"""``rsrv bundle``: check, seal, compare and look at bundles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import convert, output, verify
from rsrv.cli.reports import require_writable

if TYPE_CHECKING:
    from rsrv.audit import CheckReport
    from rsrv.bundle import BundleDescription

app = typer.Typer(no_args_is_help=True, help="Check, seal, compare and look at bundles.")

Directories = Annotated[list[Path], typer.Argument(metavar="DIR…", help="Directories of bundles.")]


@app.command()
def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR…", help="Directories of bundles.", show_default=False)
    ] = None,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed", help="The arguments are files: check the bundles that they lie in, which may be none."
        ),
    ] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Also run every program on the goldens, and import the hooks.")
    ] = False,
    hooks: Annotated[bool, typer.Option("--hooks", help="Also import the hooks, in a process of their own.")] = False,
    tolerance: verify.ToleranceOption = None,
    backend: verify.BackendOption = "auto",
    timeout: verify.TimeoutOption = 600.0,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings and skipped parts fail, too.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Find everything that is wrong with bundles, without running any of them unless you say so.

    Digests, manifest, files, weights, the entry of every program against manifest and weights, custom calls, hooks
    (compiled). With --run every program also has to answer the goldens (`golden.safetensors`) as the framework did that
    it was exported from. What is run, runs in a process of its own. Exit code 1 when a bundle has an error, with
    --strict on any finding.

    Example:
        rsrv bundle check models/*
        rsrv bundle check models/net --run --strict --junit build/report.xml
        rsrv bundle check --changed $(git diff --name-only main)
    """
    from rsrv.audit import AuditProcess, check_bundle, parse_pool, to_junit
    from rsrv.audit.parity import parse_tolerances

    directories = _bundles_of(paths or []) if changed else _named(paths or [])
    verify.require_backend(backend)
    require_writable("--junit", junit)
    tolerances = parse_tolerances(tolerance or [])
    with parse_pool() as pool, AuditProcess(backend=backend, timeout_seconds=timeout) as process:
        reports = [
            check_bundle(directory, pool=pool, run=run, hooks=hooks, process=process, tolerances=tolerances)
            for directory in directories
        ]
    if junit is not None:
        junit.write_text(to_junit(reports, strict=strict), encoding="utf-8")
    ok = all(report.passed(strict=strict) for report in reports)
    if output.is_json():
        output.json({"ok": ok, "strict": strict, "bundles": [report.to_json() for report in reports]})
    else:
        _print_reports(reports, strict)
    if not ok:
        raise typer.Exit(1)


@app.command()
def seal(directories: Directories, as_json: output.JsonOption = False) -> None:
    """Write the digests of all files into the manifests: accept the files as they are.

    Example:
        rsrv bundle seal models/net
    """
    from rsrv.bundle import seal as write_digests

    _require_directories(directories)
    sealed = {str(directory): write_digests(directory) for directory in directories}
    if output.is_json():
        output.json({path: {name: digest.sha256 for name, digest in files.items()} for path, files in sealed.items()})
        return
    for path, files in sealed.items():
        output.note(f"{path}: {len(files)} files")
        output.data(path)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a bundle.")],
    as_json: output.JsonOption = False,
) -> None:
    """Show what a bundle takes and returns, its programs, weights and provenance.

    Example:
        rsrv bundle inspect models/net --json
    """
    from rsrv.bundle import describe_bundle

    _require_directories([directory])
    bundle = describe_bundle(directory)
    if output.is_json():
        output.json(bundle.to_json())
    else:
        _print_description(bundle)


@app.command()
def ls(
    repository: Annotated[Path, typer.Argument(metavar="REPO", help="Directory that holds bundles.")],
    as_json: output.JsonOption = False,
) -> None:
    """List the bundles of a repository; one that cannot be opened is listed with the reason.

    Example:
        rsrv bundle ls models
    """
    from rsrv.bundle import describe_bundle, discover
    from rsrv.core.errors import BundleError

    _require_directories([repository])
    rows: list[tuple[object, ...]] = []
    for found in discover([repository]):
        try:
            bundle = describe_bundle(found.path)
        except BundleError as error:
            rows.append((found.name, None, None, None, None, None, error.message))
            continue
        rows.append(
            (
                found.name,
                bundle.kind,
                ", ".join(f"{tensor.name} {tensor.text}" for tensor in bundle.client_inputs),
                ", ".join(f"{tensor.name} {tensor.text}" for tensor in bundle.client_outputs),
                ",".join(map(str, bundle.batch_sizes)) or None,
                bundle.bytes,
                None,
            )
        )
    output.table(None, ["name", "kind", "inputs", "outputs", "batch sizes", "bytes", "problem"], rows)


app.command()(verify.verify)
app.command()(verify.diff)
app.command()(convert.convert)


def _named(directories: list[Path]) -> list[Path]:
    from rsrv.core.errors import UsageError

    if not directories:
        raise UsageError("name bundles to check: DIR…", hint="rsrv bundle check models/*")
    _require_directories(directories)
    return directories


def _bundles_of(files: list[Path]) -> list[Path]:
    """The bundles that `files` lie in, each once."""
    from rsrv.bundle import enclosing_bundle

    found = list(dict.fromkeys(directory for directory in map(enclosing_bundle, files) if directory is not None))
    if not found:
        output.note("no bundle has changed")
    return found


def _require_directories(directories: list[Path]) -> None:
    from rsrv.core.errors import UsageError

    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")


def _print_reports(reports: list[CheckReport], strict: bool) -> None:
    rows: list[tuple[object, ...]] = []
    for report in reports:
        rows += [
            (report.bundle, f.severity, f.check, f.rule, f.message + (f" ({f.hint})" if f.hint else ""))
            for f in report.findings
        ]
        rows += [(report.bundle, "skipped", skipped.check, None, skipped.reason) for skipped in report.skipped]
    if rows:
        output.table(None, ["bundle", "severity", "check", "rule", "message"], rows)
    for report in reports:
        verdict = "failed" if not report.passed(strict=strict) else "incomplete" if report.skipped else "ok"
        output.note(
            f"{report.path}: {verdict} ({len(report.checks)} checks, {len(report.errors)} errors, "
            f"{len(report.warnings)} warnings, {len(report.skipped)} skipped)"
        )


def _print_description(bundle: BundleDescription) -> None:
    tensors = [("input", tensor) for tensor in bundle.client_inputs]
    tensors += [("output", tensor) for tensor in bundle.client_outputs]
    if bundle.client_inputs != bundle.executable_inputs:
        tensors += [("program input", tensor) for tensor in bundle.executable_inputs]
    if bundle.client_outputs != bundle.executable_outputs:
        tensors += [("program output", tensor) for tensor in bundle.executable_outputs]
    output.table(
        bundle.name,
        ["tensor", "is", "type", "letters"],
        [(tensor.name, role, tensor.text, tensor.letters) for role, tensor in tensors],
    )
    if bundle.programs:
        output.table(
            "programs",
            ["file", "batch sizes", "variant", "bytes", "format"],
            [
                (
                    program.file,
                    ", ".join(str(key) for key in program.batch_keys if key) or None,
                    ", ".join(map(str, program.variant)) or None,
                    program.bytes,
                    program.format,
                )
                for program in bundle.programs
            ],
        )
    facts: list[tuple[str, object]] = [
        ("description", bundle.description or None),
        ("kind", bundle.kind),
        ("format version", bundle.format_version),
        ("batch sizes", ", ".join(map(str, bundle.batch_sizes)) or None),
        ("batch axis", "symbolic: programs are made for these sizes at load" if bundle.dynamic_batch else None),
        ("requests are merged", "yes" if bundle.coalesces else "no"),
        ("hooks", ", ".join(bundle.hooks) or None),
        ("calls", ", ".join(bundle.meta_calls) or None),
        ("digests", "sealed" if bundle.sealed else None),
        ("files", f"{bundle.files}, {bundle.bytes} bytes"),
    ]
    if (weights := bundle.weights) is not None:
        types = ", ".join(f"{dtype} {count}" for dtype, count in weights.bytes_by_dtype.items())
        facts.append(("weights", f"{weights.tensors} tensors, {weights.parameters} numbers, {weights.bytes} bytes"))
        facts.append(("weight bytes by dtype", types or None))
        facts.append(("weight bytes used in place", weights.aligned_bytes))
    output.table("bundle", ["what", "value"], [fact for fact in facts if fact[1] is not None])
    if bundle.provenance:
        output.table("provenance", ["what", "value"], list(bundle.provenance.items()))
