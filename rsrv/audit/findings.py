"""What an audit found: plain values, and their JSON form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (error) or suspicious (warning).

    Attributes:
        check: the part of the audit that found it: ``manifest``, ``files``, ``weights``, ``hooks`` or a program's file.
        rule: the violated rule of the bundle format ("B-18"), or None.
        file: name of the file inside the bundle, or None.
        message: what is there and what was wanted.
        hint: what to do about it, or None.
    """

    severity: Severity
    check: str
    message: str
    rule: str | None = None
    file: str | None = None
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "severity": self.severity,
            "check": self.check,
            "rule": self.rule,
            "file": self.file,
            "message": self.message,
            "hint": self.hint,
        }


@dataclass(frozen=True)
class Skipped:
    """A part of the audit that did not run, and why: nothing is known about it."""

    check: str
    reason: str


@dataclass
class CheckReport:
    """Everything that one audit of one bundle found; `checks` lists the parts that ran, in order."""

    bundle: str
    path: Path
    checks: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "warning"]

    def passed(self, *, strict: bool = False) -> bool:
        """No error; with `strict` nothing at all, and nothing left out either."""
        return not (self.findings or self.skipped) if strict else not self.errors

    def of(self, check: str) -> list[Finding]:
        """The findings of one part."""
        return [finding for finding in self.findings if finding.check == check]

    def add(self, check: str, findings: Iterable[Finding]) -> None:
        """Record that `check` ran and what it found."""
        self.checks.append(check)
        self.findings.extend(findings)

    def skip(self, check: str, reason: str) -> None:
        self.skipped.append(Skipped(check, reason))

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "path": str(self.path),
            "ok": self.passed(),
            "checks": list(self.checks),
            "findings": [finding.to_json() for finding in self.findings],
            "skipped": [{"check": skipped.check, "reason": skipped.reason} for skipped in self.skipped],
        }
