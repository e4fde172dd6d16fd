"""The audit of one bundle: everything that is wrong with it, without running any of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rsrv.audit.findings import CheckReport, Finding
from rsrv.audit.programs import bindings_missing, parse_pool, program_findings
from rsrv.audit.weights import weights_findings
from rsrv.bundle.digests import read_verified_program, verify_files
from rsrv.bundle.directory import Bundle, inspect_bundle
from rsrv.bundle.files import HOOKS, WEIGHTS
from rsrv.bundle.hookfile import inspect_hooks
from rsrv.bundle.safetensors import WeightsHeader
from rsrv.core.errors import BundleError, DigestMismatch, ManifestError, UsageError
from rsrv.runtime.compile_pool import CompilePool


def check_bundle(directory: Path | str, *, pool: CompilePool | None = None, digests: bool = True) -> CheckReport:
    """Check the bundle in `directory`: manifest, files and digests, weights, every program, hooks.

    Programs are parsed in a process that may die; hooks are compiled and read, not run.

    Args:
        pool: compile pool for the parsing; default: one of its own.
        digests: also hash every file and tensor and compare with what the bundle declares.

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
        report.add("files", [*files, *(_digest_findings(bundle) if digests else ())])
    header = _check_weights(report, path, digests=digests)
    if bundle is not None:
        _check_programs(report, bundle, header, pool, digests=digests, manifest_is_sound=not wrong)
    _check_hooks(report, bundle, path)
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


def _check_weights(report: CheckReport, path: Path, *, digests: bool) -> WeightsHeader | None:
    file = path / WEIGHTS
    if not file.exists():
        return None
    header, findings = weights_findings(file, digests=digests)
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
    jobs = _programs(bundle)
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


def _programs(bundle: Bundle) -> list[tuple[str, tuple[int, ...], int]]:
    """File, variant and batch key of every program; one that is specialised at load has key 0, as it is written."""
    jobs = {}
    for variant, programs in bundle.programs.items():
        for batch_key, path in programs.items():
            jobs[path.name] = (path.name, variant, 0 if bundle.manifest.batching.dynamic else batch_key)
    return list(jobs.values())


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


def _finding(check: str, error: BundleError) -> Finding:
    return Finding("error", check, error.message, rule=error.rule, file=error.file, hint=error.hint)
