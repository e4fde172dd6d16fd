"""Writes the pages of docs/ that are made from code: ``python docs/generate.py`` (or ``make docs``).

``tests/test_docs.py`` fails when a page differs from what this makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rsrv.cli.reference import markdown as commands
from rsrv.core.config import key_table
from rsrv.serve.series import PREFIX, SERIES

HERE = Path(__file__).resolve().parent


def configuration() -> str:
    rows = [
        (f"`{row.key}`", row.type, _code(row.default, "required"), _code(row.env, ""), row.meaning)
        for row in key_table()
    ]
    return _page(
        "Configuration of a worker",
        "A value comes from the command line, else from the environment, else from the node file, else it is the "
        "default; `rsrv config show` says which. Keys that are not in this table are errors.",
        ("key", "type", "default", "environment variable", "meaning"),
        rows,
    )


def metrics() -> str:
    rows = [
        (f"`{PREFIX}{series.name}`", series.type, ", ".join(f"`{label}`" for label in series.labels), series.help)
        for series in SERIES.values()
    ]
    return _page(
        "Metrics of a worker",
        "At `/metrics` of the HTTP port, in the Prometheus text format. Every series also has the labels `worker` and "
        "`gpu` where they are known. A counter counts since the worker started.",
        ("series", "type", "labels", "meaning"),
        rows,
    )


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": commands,
    "configuration.md": configuration,
    "metrics.md": metrics,
}


def _page(title: str, text: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"# {title}", "", "Made by `python docs/generate.py`; do not edit by hand.", "", text, ""]
    lines += [_row(columns), "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(_row(row) for row in rows)]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str | None, missing: str) -> str:
    return missing if text is None else f"`{text}`"


if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
