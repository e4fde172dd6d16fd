"""Collects what is wrong with a manifest in the order of the checks, so that one pass serves both load and check."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rsrv.core.errors import BundleError, ManifestError

KeyPath = tuple[str | int, ...]
"""Where in the manifest: ``("executable_inputs", 0, "dims")``."""


MAX_TEXT = 2000
"""Characters of a message: strangers choose the values that messages quote."""

E = TypeVar("E", bound=BundleError)


def violation(kind: type[E], rule: str, text: str, *, file: str | None = None, hint: str | None = None) -> E:
    """The error that says what is wrong and which rule says so; of a text that quotes a huge value, the beginning."""
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return kind(f"{shown} ({rule})", rule=rule, file=file, hint=hint)


@dataclass(frozen=True, slots=True)
class Problem:
    rule: str
    text: str
    at: KeyPath
    hint: str | None


class Problems:
    """Problems in validation order; the first is what a load raises, all of them are what a check reports.

    `lenient`: unknown keys are warnings, as in bundles of the older format (B-13).
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self._found: list[Problem] = []
        self._warnings: list[Problem] = []
        self._lenient = lenient

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, rule: str, text: str, *, at: KeyPath = (), hint: str | None = None) -> None:
        self._found.append(Problem(rule, text, at, hint))

    def take(self, errors: Iterable[ManifestError], *, at: KeyPath) -> None:
        for error in errors:
            self.add(error.rule or "", error.message, at=at, hint=error.hint)

    def touched(self, *keys: str) -> bool:
        """Whether something under one of these top-level keys could not be read, so that nothing follows from it."""
        return any(problem.at[:1] == (key,) for problem in self._found for key in keys)

    def unknown_keys(self, mapping: Mapping[object, object], known: Iterable[str], *, at: KeyPath) -> None:
        """B-13: every key that is not known, with the known one that was probably meant."""
        allowed = list(known)
        for key in mapping:
            if key in allowed:
                continue
            close = difflib.get_close_matches(str(key), allowed, n=1)
            where = f" in {dotted(at)}" if at else ""
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(allowed)}"
            place = (*at, key) if isinstance(key, str) else at
            if self._lenient:
                self._warnings.append(Problem("B-13", f"unknown key {key!r}{where} is ignored", place, hint))
            else:
                self.add("B-13", f"unknown key {key!r}{where}", at=place, hint=hint)

    def errors(self, *, file: str | None = None, lines: Mapping[KeyPath, int] | None = None) -> list[ManifestError]:
        """As errors that name their rule, and `file` and line where these are known."""
        return [self._error(problem, file, lines or {}) for problem in self._found]

    def warnings(self, *, file: str | None = None, lines: Mapping[KeyPath, int] | None = None) -> list[ManifestError]:
        """What is wrong without being a reason to refuse the manifest, in the form of `errors`."""
        return [self._error(problem, file, lines or {}) for problem in self._warnings]

    @staticmethod
    def _error(problem: Problem, file: str | None, lines: Mapping[KeyPath, int]) -> ManifestError:
        line = next((lines[problem.at[:n]] for n in range(len(problem.at), 0, -1) if problem.at[:n] in lines), None)
        place = "" if file is None else f"{file}: " if line is None else f"{file}:{line}: "
        return violation(ManifestError, problem.rule, place + problem.text, file=file, hint=problem.hint)


def dotted(at: KeyPath) -> str:
    """``executable_inputs[0].dims``"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).removeprefix(".")
