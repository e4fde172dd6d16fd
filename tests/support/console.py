"""The console blocks of a page of documentation, and whether what a command prints is what the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

ANYTHING = "…"
"""In a line that a page shows: any text. Alone in a line: any number of lines."""

_MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"), "TIME"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"\b\d{10}\.\d+"), "TIME"),
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "DIGEST"),
    (re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?"), "NUMBER"),
    (re.compile(r"-?\b\d+e[+-]?\d+\b"), "NUMBER"),
    (re.compile(r"\b\d+[smhd]\b"), "SPAN"),
    (re.compile(r"\b\d+(?=%| B\b)"), "N"),
    (re.compile(r"^\d+ (?=TIME )"), "SEQ "),
    (re.compile(r", \d+ skipped"), ""),
    (re.compile(r"\b[1-9]\d*(?= (?:batches|mismatches|differed)\b)"), "SOME"),
    (re.compile(r'(?<="batches": )[1-9]\d*|(?<="mismatches": )[1-9]\d*|(?<="skipped": )\d+'), "SOME"),
    (re.compile(r"\s+"), " "),
)
"""What differs from run to run, and the mask of it; the widths of columns follow from it. Of how many batches a shadow
got a copy depends on how quick it was."""


@dataclass(frozen=True)
class Command:
    """A line of a page that begins with ``$``, and the lines below it."""

    line: int
    text: str
    shown: tuple[str, ...]


def commands(page: str) -> Iterator[Command]:
    """Those of all blocks of the language ``console``, in order."""
    block: list[tuple[int, list[str]]] | None = None
    for number, line in enumerate(page.splitlines(), 1):
        if block is None:
            block = [] if line == "```console" else None
        elif line == "```":
            yield from (Command(at, text.removeprefix("$ "), tuple(shown)) for at, (text, *shown) in block)
            block = None
        elif line.startswith("$ "):
            block.append((number, [line]))
        else:
            block[-1][1].append(line)


def is_as_shown(shown: tuple[str, ...], printed: str) -> bool:
    """Whether a page that shows `shown` tells the truth about `printed`, but for times, digests and fractions."""
    pattern = ""
    for line in shown:
        if line.strip() == ANYTHING:
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in masked(line).split(ANYTHING)) + r"\n"
    text = "".join(f"{masked(line)}\n" for line in printed.splitlines())
    return re.fullmatch(pattern, text) is not None


def masked(line: str) -> str:
    for pattern, mask in _MASKS:
        line = pattern.sub(mask, line)
    return line.strip()
