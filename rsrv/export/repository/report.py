"""What became of each model, as JSON and as a Markdown page for people (X-47)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import rsrv
from rsrv.core.errors import RsrvError

Outcome = Literal["success", "partial", "failed", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("success", "partial", "failed", "skipped")

MAX_ERROR = 500
_EXCEPTION = re.compile(
    r"\b[A-Za-z_.]*(?:Error|Exception|Exit|Interrupt|SymNode)\b:?|[Dd]ata-dependent|Could not guard"
)


@dataclass(frozen=True)
class ConversionResult:
    """One model.

    Attributes:
        outcome: ``success``; ``partial``, when not every batch size could be kept; ``failed``; ``skipped``.
        batch_sizes: the sizes that the bundle has programs for; empty without a batch axis.
        dropped: the sizes that could not be kept.
        reason: why it is not a success, at most 500 characters.
        was_there: the bundle was there already, and nothing was done.
        note: what is worth knowing about a bundle that was made.
        seconds: wall time.
    """

    model: str
    bundle: str
    source: Path | None
    disposition: str
    outcome: Outcome
    batch_sizes: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    reason: str = ""
    was_there: bool = False
    note: str = ""
    seconds: float = 0.0

    @property
    def sizes_text(self) -> str:
        if self.outcome in ("failed", "skipped"):
            return ""
        alone = "1, without a batch axis" if self.outcome == "partial" else "no batch axis"
        return ", ".join(map(str, self.batch_sizes)) or alone

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "bundle": self.bundle,
            "source": None if self.source is None else str(self.source),
            "disposition": self.disposition,
            "outcome": self.outcome,
            "batch_sizes": list(self.batch_sizes),
            "dropped_batch_sizes": list(self.dropped),
            "reason": self.reason or None,
            "was_there": self.was_there,
            "note": self.note or None,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class ConversionReport:
    """The results of a run, in the order of the worklist."""

    results: tuple[ConversionResult, ...]

    @property
    def counts(self) -> dict[Outcome, int]:
        return {outcome: len(self.of(outcome)) for outcome in OUTCOMES}

    @property
    def ok(self) -> bool:
        return not self.of("failed")

    def of(self, outcome: Outcome) -> list[ConversionResult]:
        return [result for result in self.results if result.outcome == outcome]

    def to_json(self) -> dict[str, Any]:
        return {
            "rsrv_version": rsrv.__version__,
            "finished_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "ok": self.ok,
            "counts": dict(self.counts),
            "models": [result.to_json() for result in self.results],
        }

    def to_markdown(self) -> str:
        made = self.to_json()
        lines = [
            "# Conversion of a model repository",
            "",
            f"Made by rsrv {made['rsrv_version']}, {made['finished_at']}.",
            "",
            *_table(("outcome", "models"), [(outcome, str(count)) for outcome, count in self.counts.items()]),
        ]
        for outcome in ("failed", "skipped"):
            if found := self.of(outcome):
                rows = [(one.bundle, _source(one), one.reason) for one in found]
                lines += ["", f"## {outcome.capitalize()}", "", *_table(("bundle", "from", "reason"), rows)]
        if found := self.of("partial"):
            rows_partial = [
                (one.bundle, one.sizes_text, ", ".join(map(str, one.dropped)), one.reason, _remark(one))
                for one in found
            ]
            columns = ("bundle", "batch sizes", "dropped", "reason", "remark")
            lines += ["", "## Partial", "", *_table(columns, rows_partial)]
        if found := self.of("success"):
            rows = [(one.bundle, one.sizes_text, _remark(one)) for one in found]
            lines += ["", "## Success", "", *_table(("bundle", "batch sizes", "remark"), rows)]
        return "\n".join(lines) + "\n"

    def write(self, markdown: Path, as_json: Path) -> None:
        """Write both forms, each as a whole or not at all."""
        _replace(markdown, self.to_markdown())
        _replace(as_json, json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n")


def short_error(error: BaseException | str, *, limit: int = MAX_ERROR) -> str:
    """The lines of `error` that name an exception or what torch.export says about data-dependent values, else its first
    line; at most `limit` characters."""
    if isinstance(error, str):
        text = error
    elif isinstance(error, RsrvError):
        text = error.message
    else:
        text = f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    telling = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        # A frame and its line of source only say where.
        if _EXCEPTION.search(line) and not line.startswith('File "') and not before.startswith('File "')
    ]
    short = "; ".join(dict.fromkeys(telling or lines[:1]))
    return short if len(short) <= limit else short[: limit - 1] + "…"


def with_hint(reason: str, hint: str | None) -> str:
    """`reason` and the way out, where there is room for both."""
    text = f"{reason} ({hint})" if hint else reason
    return text if len(text) <= MAX_ERROR else reason


def _source(result: ConversionResult) -> str:
    return result.model if result.source is None else str(result.source)


def _remark(result: ConversionResult) -> str:
    return "; ".join(filter(None, ("was there" if result.was_there else "", result.note)))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [columns, ["---"] * len(columns), *([_cell(text) for text in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _cell(text: str) -> str:
    """`text` as Markdown shows it as it is; names and messages come from strangers."""
    return re.sub(r"([\\`*_\[<|])", r"\\\1", " ".join(text.split()))


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staged.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
