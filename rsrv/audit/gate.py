"""The gate in front of a new bundle: `write_bundle` runs it on the staged files before anything appears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rsrv.audit.check import check_bundle
from rsrv.audit.golden import require_parity
from rsrv.audit.parity import Tolerances
from rsrv.audit.process import AuditProcess
from rsrv.audit.programs import runnable_programs
from rsrv.bundle.directory import open_bundle
from rsrv.bundle.golden import Golden
from rsrv.bundle.staging import final_name
from rsrv.core.errors import BundleError, SignatureMismatch
from rsrv.runtime.compile_pool import CompilePool


def bundle_gate(
    pool: CompilePool | None = None,
    *,
    goldens: Sequence[Golden] = (),
    tolerances: Tolerances = None,
    backend: str = "auto",
    process: AuditProcess | None = None,
) -> Callable[[Path], None]:
    """A gate that refuses a staged bundle with any error, or with any part that could not be checked (X-31).

    Args:
        goldens: what every program has to compute, whether or not the bundle carries them; none: nothing is run.
        tolerances: for `goldens`.
        backend: the device that the programs run on, as in ``runtime.backend``.
        process: where they run, in place of a process of its own on `backend`; it stays open for the next bundle.

    It raises SignatureMismatch when a program does not fit manifest and weights, ParityMismatch when one computes
    something else, else BundleError, with all errors. They name the bundle as it is going to be called.
    """

    def gate(staged: Path) -> None:
        report = check_bundle(staged, pool=pool, digests=False)
        if report.errors:
            kind = SignatureMismatch if any(finding.rule == "B-11" for finding in report.errors) else BundleError
            first = report.errors[0]
            raise _refusal(
                kind,
                staged,
                "; ".join(finding.message for finding in report.errors),
                first.rule,
                first.file,
                first.hint,
            )
        if report.skipped:
            missing = report.skipped[0]
            raise _refusal(BundleError, staged, f"{missing.check} cannot be checked: {missing.reason}")
        if goldens:
            with AuditProcess(backend=backend) if process is None else nullcontext(process) as runner:
                bundle = replace(open_bundle(staged), name=final_name(staged))
                try:
                    require_parity(bundle, runnable_programs(bundle), goldens, runner, tolerances)
                except BundleError as error:
                    raise _refusal(type(error), staged, error.message, error.rule, error.file, error.hint) from error

    return gate


def _refusal(
    kind: type[BundleError],
    staged: Path,
    text: str,
    rule: str | None = None,
    file: str | None = None,
    hint: str | None = None,
) -> BundleError:
    """The error, with the name of the bundle in place of that of the staged directory, which is about to go."""
    final = final_name(staged)
    text, hint = text.replace(staged.name, final), hint and hint.replace(staged.name, final)
    return kind(f"the bundle was not written: {text}", rule=rule, file=file, hint=hint)
