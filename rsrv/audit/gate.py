"""The gate in front of a new bundle: `write_bundle` runs it on the staged files before anything appears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rsrv.audit.check import check_bundle
from rsrv.core.errors import BundleError, SignatureMismatch
from rsrv.runtime.compile_pool import CompilePool


def bundle_gate(pool: CompilePool | None = None) -> Callable[[Path], None]:
    """A gate that refuses a staged bundle with any error, or with any part that could not be checked (X-31).

    It raises SignatureMismatch when a program does not fit manifest and weights, else BundleError, with all errors.
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

    return gate
