"""One text of metrics out of many: the gateway's own and those of the workers (spec gateway-node 1.11). Pure.

Prometheus gives up a whole scrape for one bad line, so what a worker sends is read line by line and what Prometheus
would not take is left out. Format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LINE_BYTES = 1 << 16
"""Longer lines are left out."""
SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")
"""What the samples of a family may have behind its name."""

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\]*(?:\\.[^"\\]*)*)"'
_PAIRS = re.compile(_LABEL)
_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[iI]nf|NaN|nan)"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*,?)?\}})?[ \t]+({_NUMBER})([ \t]+-?[0-9]{{1,18}})?[ \t]*")
_HEADER = re.compile(rf"#[ \t]+(HELP|TYPE)[ \t]+({_NAME})[ \t]+(.*)")
_TYPES = frozenset(("counter", "gauge", "histogram", "summary", "untyped"))


@dataclass(slots=True)
class Family:
    """What goes under one header; `samples` by name and labels: the value, and the time when there is one."""

    help: str | None = None
    type: str | None = None
    samples: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A text that was read: its families in the order in which they came, and how many lines were of no use."""

    families: Mapping[str, Family]
    dropped: int = 0

    @property
    def empty(self) -> bool:
        """Whether it has no sample at all: then it is hardly the text of a server's metrics."""
        return not any(family.samples for family in self.families.values())


def read(text: str | bytes, worker: str = "") -> Parsed:
    """Read a text; samples without a label `worker` get one when `worker` is given. Never raises.

    A sample belongs to the family of the last header when it has its name, or that with one of `SUFFIXES`; else to one
    of its own name.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    families: dict[str, Family] = {}
    current, dropped = "", 0
    tag = f'worker="{_escaped(worker)}"' if worker else ""
    for line in text.split("\n"):
        if not line or line.isspace():
            continue
        if line[0] == "#":
            header = _HEADER.fullmatch(line) if len(line) <= LINE_BYTES else None
            if header is not None and "\0" not in line:
                kind, current, value = header.groups()
                _describe(families.setdefault(current, Family()), kind, value)
            continue
        sample = _sample(line, tag)
        if sample is None:
            dropped += 1
            continue
        name, key, value = sample
        home = current if name == current or _is_part(name, current) else name
        families.setdefault(home, Family()).samples.setdefault(key, value)
    return Parsed(families, dropped)


def merge(texts: Iterable[Parsed]) -> bytes:
    """All families, in the order in which they were first seen, each with its samples of all texts under one header.

    Of two headers, and of two samples with the same labels, the first counts.
    """
    merged: dict[str, Family] = {}
    for text in texts:
        for name, family in text.families.items():
            into = merged.setdefault(name, Family())
            into.help = family.help if into.help is None else into.help
            into.type = family.type if into.type is None else into.type
            for key, value in family.samples.items():
                into.samples.setdefault(key, value)
    lines: list[str] = []
    seen: set[str] = set()
    for name, family in merged.items():
        if family.help is not None:
            lines.append(f"# HELP {name} {family.help}")
        if family.type is not None:
            lines.append(f"# TYPE {name} {family.type}")
        for key, value in family.samples.items():
            # One text may have it under another family than another text.
            if key not in seen:
                seen.add(key)
                lines.append(f"{key} {value}")
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _describe(family: Family, kind: str, value: str) -> None:
    if kind == "HELP":
        family.help = value if family.help is None else family.help
    elif family.type is None and value.strip(" \t") in _TYPES:
        family.type = value.strip(" \t")


def _sample(line: str, tag: str) -> tuple[str, str, str] | None:
    """(name, name and labels, the rest); None when Prometheus would not take the line."""
    match = _SAMPLE.fullmatch(line) if len(line) <= LINE_BYTES else None
    if match is None or "\0" in line:
        return None
    name, pairs, time = match[1], match[2] or "", match[8] or ""
    number = match[7]
    if math.isinf(float(number)) and number[-3:].lower() != "inf":  # Go takes no 1e999
        return None
    labels = [label for label, _ in _PAIRS.findall(pairs)] if pairs else []
    if "__name__" in labels or len(set(labels)) != len(labels):
        return None
    pairs = pairs.removesuffix(",")
    if tag and "worker" not in labels:
        pairs = f"{pairs},{tag}" if pairs else tag
    return name, f"{name}{{{pairs}}}" if pairs else name, number + time


def _is_part(name: str, family: str) -> bool:
    return bool(family) and name.startswith(family) and name[len(family) :] in SUFFIXES


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
