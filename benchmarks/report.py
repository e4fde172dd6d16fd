"""What a benchmark case yields, and how a run is shown: a table for people, JSON for machines."""

from __future__ import annotations

import json
import operator
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "≤": operator.le,
    "<": operator.lt,
    "≥": operator.ge,
    ">": operator.gt,
}


_BEGIN, _END = "<!-- written by make bench -->", "<!-- to here -->"


@dataclass(frozen=True)
class Bound:
    relation: str
    value: float

    def holds(self, measured: float) -> bool:
        return _COMPARE[self.relation](measured, self.value)


@dataclass(frozen=True)
class Measurement:
    """One number that somebody asked for; `parts` are the medians that it was made from."""

    name: str
    value: float
    bound: Bound | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        return None if self.bound is None else self.bound.holds(self.value)


def machine() -> dict[str, Any]:
    from importlib.metadata import version

    packages = {p: version(p) for p in ("rsrv", "grpcio", "protobuf", "numpy", "jaxlib")}
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "packages": packages}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def show(measurements: Sequence[Measurement]) -> None:
    table = Table("measurement", "value", "wanted", "", "parts")
    for m in measurements:
        wanted = f"{m.bound.relation} {m.bound.value:g}" if m.bound else ""
        verdict = "" if m.met is None else "met" if m.met else "[bold red]missed"
        parts = "  ".join(f"{k}={v:.4g}" for k, v in m.parts.items())
        table.add_row(m.name, f"{m.value:.3g}", wanted, verdict, parts)
    Console().print(table)


def markdown(measurements: Sequence[Measurement]) -> str:
    """The measurements as a table of GitHub's Markdown; bold values miss what was wanted."""
    lines = ["| measurement | value | wanted | parts |", "|---|---|---|---|"]
    for m in measurements:
        value = f"{m.value:.3g}" if m.met is not False else f"**{m.value:.3g}**"
        wanted = f"{m.bound.relation} {m.bound.value:g}" if m.bound else ""
        parts = ", ".join(f"{k} {v:.4g}" for k, v in m.parts.items())
        lines.append(f"| {m.name} | {value} | {wanted} | {parts} |")
    return "\n".join(lines)


def record(measurements: Sequence[Measurement], path: Path) -> None:
    """Put the measurements with the machine's facts into a Markdown file, in place of those of the last run."""
    facts = machine()
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    block = (
        f"{_BEGIN}\n\n## A run of all cases\n\nMeasured {time.strftime('%Y-%m-%d', time.gmtime())} on {facts['cores']} "
        f"cores ({facts['cpu']}), Python {facts['python']}, {packages}. Bold values miss what was wanted.\n\n"
        f"{markdown(measurements)}\n\n{_END}"
    )
    text = path.read_text()
    if _BEGIN in text:
        before, _, rest = text.partition(_BEGIN)
        text = before + block + rest.partition(_END)[2]
    else:
        text = f"{text.rstrip()}\n\n{block}\n"
    path.write_text(text)


def write(measurements: Sequence[Measurement], directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / time.strftime("%Y%m%dT%H%M%SZ.json", time.gmtime())
    rows = [asdict(m) | {"met": m.met} for m in measurements]
    path.write_text(json.dumps({"machine": machine(), "measurements": rows}, indent=1) + "\n")
    return path
