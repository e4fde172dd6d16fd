"""What a dry run finds: `Finding` and the list that collects them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rsrv.core.errors import IOMismatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or looks wrong.

    Attributes:
        severity: ``"error"`` for what a server refuses or would answer with nonsense, else ``"warning"``.
        subject: the tensor or method that it is about, ``input 'x'`` for example.
        message: what was found and what was wanted.
        hint: a way out, or None.
    """

    severity: Literal["error", "warning"]
    subject: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.subject}: {self.message}"
        return f"{text} ({self.hint})" if self.hint else text


class Findings:
    """Everything that was found so far about the use of one model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._found: list[Finding] = []

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    @property
    def failed(self) -> bool:
        return any(finding.severity == "error" for finding in self._found)

    def error(self, subject: str, message: str, hint: str | None = None) -> None:
        self._found.append(Finding("error", subject, message, hint))

    def warning(self, subject: str, message: str, hint: str | None = None) -> None:
        self._found.append(Finding("warning", subject, message, hint))

    def report(self) -> list[Finding]:
        """Log the warnings and return them. Raises IOMismatch, with everything in its text, if there is any error."""
        if self.failed:
            listed = "\n".join(f"  {finding.severity}: {finding}" for finding in self._found)
            raise IOMismatch(f"the IO does not fit model {self.model!r}:\n{listed}", findings=tuple(self._found))
        for finding in self._found:
            log.warning("model=%s event=validate_io %s", self.model, finding)
        return list(self._found)

    @contextmanager
    def calling(self, call: str, advice: str) -> Iterator[None]:
        """Around a `call` of the user's code: its exceptions go on with notes on what was called and found before."""
        try:
            yield
        except Exception as error:
            error.add_note(f"raised by {call} in the dry run of validate_io: {advice}")
            for finding in self._found:
                error.add_note(f"validate_io found before: {finding}")
            raise
