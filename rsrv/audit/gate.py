"""The gate in front of a new bundle: `write_bundle` runs it on the staged files before anything appears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rsrv.audit.check import check_bundle
from rsrv.audit.golden import require_parity
from rsrv.audit.parity import Tolerances
from rsrv.audit.process import AuditProcess
from rsrv.audit.programs import programs_of
from rsrv.bundle.directory import open_bundle
from rsrv.bundle.golden import Golden
from rsrv.core.errors import BundleError, SignatureMismatch
from rsrv.runtime.compile_pool import CompilePool


def bundle_gate(
    pool: CompilePool | None = None,
    *,
    goldens: Sequence[Golden] = (),
    tolerances: Tolerances = None,
    backend: str = "auto",
) -> Callable[[Path], None]:
    """A gate that refuses a staged bundle with any error, or with any part that could not be checked (X-31).

    Args:
        goldens: what every program has to compute, whether or not the bundle carries them; none: nothing is run.
        tolerances: for `goldens`.
        backend: the device that the programs run on, as in ``runtime.backend``.

    It raises SignatureMismatch when a program does not fit manifest and weights, ParityMismatch when one computes
    something else, else BundleError, with all errors.
    """

    def gate(staged: Path) -> None:
        report = check_bundle(staged, pool=pool, digests=False)
        if report.errors:
            kind = SignatureMismatch if any(finding.rule == "B-11" for finding in report.errors) else BundleError
            first = report.errors[0]
            text = "; ".join(finding.message for finding in report.errors)
            raise kind(f"the bundle was not written: {text}", rule=first.rule, file=first.file, hint=first.hint)
        if report.skipped:
            missing = report.skipped[0]
            raise BundleError(f"the bundle was not written: {missing.check} cannot be checked: {missing.reason}")
        if goldens:
            with AuditProcess(backend=backend) as process:
                bundle = open_bundle(staged)
                try:
                    require_parity(bundle, programs_of(bundle), goldens, process, tolerances)
                except BundleError as error:
                    raise type(error)(
                        f"the bundle was not written: {error.message}",
                        rule=error.rule,
                        file=error.file,
                        hint=error.hint,
                    ) from error

    return gate
