"""The audit of one bundle: everything that is wrong with it. Nothing of it runs unless the caller asks for that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rsrv.audit.findings import CheckReport, Finding, Severity
from rsrv.audit.golden import audit_process, golden_file_findings, replay_findings
from rsrv.audit.parity import Tolerances
from rsrv.audit.process import AuditProcess
from rsrv.audit.programs import (
    bindings_missing,
    parse_pool,
    program_findings,
    program_label,
    programs_of,
    runnable_programs,
)
from rsrv.audit.weights import weights_findings
from rsrv.bundle.digests import read_verified_program, verify_files
from rsrv.bundle.directory import Bundle, inspect_bundle
from rsrv.bundle.files import GOLDEN, HOOKS, WEIGHTS
from rsrv.bundle.hookfile import inspect_hooks
from rsrv.bundle.manifest import FORMAT_VERSION
from rsrv.bundle.safetensors import WeightsHeader
from rsrv.core.errors import BundleError, DigestMismatch, ManifestError, UsageError
from rsrv.runtime.compile_pool import CompilePool


def check_bundle(
    directory: Path | str,
    *,
    pool: CompilePool | None = None,
    digests: bool = True,
    run: bool = False,
    hooks: bool = False,
    process: AuditProcess | None = None,
    tolerances: Tolerances = None,
) -> CheckReport:
    """Check the bundle in `directory`: manifest, files and digests, weights, every program, hooks.

    Programs are parsed in a process that may die; hooks are compiled and read. Only on demand is anything run, in a
    process of its own, which may die too.

    Args:
        pool: compile pool for the parsing; default: one of its own.
        digests: also hash every file and tensor and compare with what the bundle declares.
        run: let every program answer the goldens, and import the hooks.
        hooks: import the hooks.
        process: where to run them; default: a process of its own.
        tolerances: for the goldens, before those that the bundle states.

    Raises UsageError when `directory` is not a directory; whatever is wrong inside is a finding.
    """
    path = Path(os.path.abspath(directory))
    if not path.is_dir():
        raise UsageError(f"{directory}: no such directory", hint="name the directory of a bundle")
    report = CheckReport(bundle=path.name, path=path)
    bundle, problems = inspect_bundle(path)
    wrong = [error for error in problems if isinstance(error, ManifestError)]
    report.add("manifest", (_finding("manifest", error) for error in wrong))
    files = [_finding("files", error) for error in problems if error not in wrong]
    if bundle is None:
        report.add("files", files)
        report.skip("programs", "there is no manifest to compare them with")
    else:
        report.findings += [_finding("manifest", warning, "warning") for warning in bundle.manifest.warnings]
        files += [_finding("files", found, "warning") for found in bundle.warnings if found.rule == "B-33"]
        report.add("files", [*files, *_older_format(bundle), *(_digest_findings(bundle) if digests else ())])
    header = _check_weights(
        report, path, digests=digests, column_major=bundle is not None and bundle.manifest.column_major
    )
    if bundle is not None:
        _check_programs(report, bundle, header, pool, digests=digests, manifest_is_sound=not wrong)
    _check_hooks(report, bundle, path)
    if bundle is not None and (run or hooks):
        with audit_process(process) as runner:
            if path.joinpath(HOOKS).exists():
                _import_hooks(report, bundle, runner)
            if run and bundle.programs:
                _replay_goldens(report, bundle, runner, tolerances)
    return report


def _digest_findings(bundle: Bundle) -> Iterator[Finding]:
    if bundle.manifest.files is None:
        yield Finding(
            "warning",
            "files",
            "the manifest has no files: a damaged program would not be noticed",
            rule="B-15a",
            hint="rsrv bundle seal writes the digests",
        )
        return
    try:
        found = verify_files(bundle, "all")
    except BundleError as error:
        yield _finding("files", error)
        return
    for difference in found:
        yield Finding(
            difference.severity,
            "files",
            difference.message,
            rule="B-15a",
            file=difference.file,
            hint="rsrv bundle seal accepts the files as they are; a damaged bundle has to be exported again",
        )


def _check_weights(report: CheckReport, path: Path, *, digests: bool, column_major: bool) -> WeightsHeader | None:
    file = path / WEIGHTS
    if not file.exists():
        return None
    header, findings = weights_findings(file, digests=digests, column_major=column_major)
    report.add("weights", findings)
    return header


def _check_programs(
    report: CheckReport,
    bundle: Bundle,
    header: WeightsHeader | None,
    pool: CompilePool | None,
    *,
    digests: bool,
    manifest_is_sound: bool,
) -> None:
    jobs = programs_of(bundle)
    if not jobs:
        return
    if (reason := bindings_missing()) is not None:
        for file, _, _ in jobs:
            report.skip(file, reason)
        return
    with parse_pool(pool) as parser:
        for file, variant, batch_key in jobs:
            try:
                data = read_verified_program(bundle, bundle.path / file, "programs" if digests else "off")
            except DigestMismatch:
                report.skip(file, "it differs from its digest, so it was not parsed")
                continue
            except BundleError as error:
                report.add(file, [_finding(file, error)])
                continue
            findings = program_findings(
                file,
                data,
                parser,
                manifest=bundle.manifest if manifest_is_sound else None,
                variant=variant,
                batch_key=batch_key,
                weights=header,
            )
            report.add(file, findings)
            if not manifest_is_sound:
                report.skip(f"{file} signature", "the manifest has errors")
            elif header is None:
                report.skip(f"{file} weight arguments", f"{WEIGHTS} cannot be read")


def _check_hooks(report: CheckReport, bundle: Bundle | None, path: Path) -> None:
    file = path / HOOKS
    if not file.exists():
        return
    try:
        registrations = inspect_hooks(file)
    except BundleError as error:
        report.add("hooks", [_finding("hooks", error)])
        return
    if bundle is None:
        report.add("hooks", [])
        return
    found = [_finding("hooks", error) for error in registrations.problems(meta=bundle.manifest.is_meta)]
    if registrations.unclear:
        found.append(
            Finding("warning", "hooks", f"what {HOOKS} registers is known only when it runs", rule="B-72", file=HOOKS)
        )
    report.add("hooks", found)


def _import_hooks(report: CheckReport, bundle: Bundle, process: AuditProcess) -> None:
    if any(finding.severity == "error" for finding in report.of("hooks")) or bundle.hooks_path is None:
        report.skip("hooks import", f"{HOOKS} has errors")
        return
    # What could be told only by a run is told now.
    report.findings = [finding for finding in report.findings if finding.check != "hooks"]
    try:
        process.import_hooks(bundle)
    except BundleError as error:
        report.add("hooks import", [_finding("hooks import", error)])
    else:
        report.add("hooks import", [])


def _replay_goldens(report: CheckReport, bundle: Bundle, process: AuditProcess, tolerances: Tolerances) -> None:
    if (reason := bindings_missing()) is not None:
        report.skip("goldens", reason)
        return
    if not (bundle.path / GOLDEN).exists():
        report.skip("goldens", f"there is no {GOLDEN}; rsrv export … --golden N writes one")
        return
    if any(finding.check in ("manifest", "weights") for finding in report.errors):
        report.skip("goldens", "manifest or weights have errors")
        return
    goldens, findings = golden_file_findings(bundle)
    report.add("goldens", findings)
    broken = {finding.file for finding in report.errors}
    for program in runnable_programs(bundle) if goldens else ():
        check = f"{program_label(program)} goldens"
        if program[0] in broken:
            report.skip(check, "the program has errors, so it was not run")
        elif (found := replay_findings(bundle, program, process, tolerances)) is None:
            report.skip(check, "no golden has the shapes of this program")
        else:
            report.add(check, found)


def _older_format(bundle: Bundle) -> Iterator[Finding]:
    if bundle.manifest.column_major:
        yield Finding(
            "warning",
            "files",
            f"format {bundle.manifest.format_version} is column-major: every weight is transposed at every load",
            rule="B-66",
            hint=f"rsrv bundle convert --to {FORMAT_VERSION} writes the bundle anew, once",
        )


def _finding(check: str, error: BundleError, severity: Severity = "error") -> Finding:
    return Finding(severity, check, error.message, rule=error.rule, file=error.file, hint=error.hint)
