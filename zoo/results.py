"""What came of each model: one JSON object a line, appended as models are done; the last line of a name counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SERVED = "served"
FAILED = "failed"


@dataclass(frozen=True)
class Result:
    """One model, or one timing of the export of one.

    Attributes:
        name: of the model.
        status: ``served``, or ``failed`` with `stage` and `error`.
        stage: what it failed at: make, export, check, serve, numbers.
        parameters_mb: of all weights in the bundle.
        programs_kb: all program files together.
        cpu, wall: seconds by step of the export, see `zoo.phases`, and ``XLA compile`` of all programs.
        max_abs, rel: of served answers against eager PyTorch, the worst over outputs and batch sizes.
        spread: how much the rows of the answers differ, relative to their largest value; the output that differs least.
        batch_export: ``dynamic`` when one graph served all batch sizes, else ``retraced``.
        facts: of the machine and the packages.
    """

    name: str
    status: str
    stage: str = ""
    error: str = ""
    batch_sizes: tuple[int, ...] = ()
    parameters_mb: float = 0.0
    programs_kb: float = 0.0
    cpu: Mapping[str, float] = field(default_factory=dict)
    wall: Mapping[str, float] = field(default_factory=dict)
    max_abs: float = 0.0
    rel: float = 0.0
    spread: float = 0.0
    batch_export: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        return self.status == SERVED


def append(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path) -> dict[str, Result]:
    """The last result of each name, in the order in which names appeared; a file that is not there holds none."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return {row["name"]: Result(**{**row, "batch_sizes": tuple(row["batch_sizes"])}) for row in rows}
