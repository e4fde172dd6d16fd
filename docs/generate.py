"""Writes the pages of docs/ that are made from code: ``python docs/generate.py`` (or ``make docs``).

``tests/test_docs.py`` fails when a page differs from what this makes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard, get_args, get_origin

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from rsrv.cli.reference import markdown as commands
from rsrv.core.config import key_table
from rsrv.core.config.keys import describe_type
from rsrv.core.status import WorkerStatus
from rsrv.serve.series import PREFIX, SERIES
from rsrv.serve.triton_metrics import TRITON_SERIES

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
    columns = ("series", "type", "labels", "meaning")
    page = _page(
        "Metrics of a worker",
        "At `/metrics` of the HTTP port, in the Prometheus text format. Every series also has the labels `worker` and "
        "`gpu` where they are known. A counter counts since the worker started.",
        columns,
        [(f"`{PREFIX}{series.name}`", series.type, _codes(series.labels), series.help) for series in SERIES.values()],
    )
    rows = [(f"`{series.name}`", series.type, _codes(series.labels), series.help) for series in TRITON_SERIES.values()]
    text = (
        "With `metrics.triton_compat: true` requests are exported under the names of Triton Inference Server, too, for "
        "dashboards that exist already: without `_total`, in microseconds, summed up over answered requests."
    )
    return "\n".join([page, "## Triton's names", "", text, "", *_table(columns, rows)]) + "\n"


def status() -> str:
    return _page(
        "Status of a worker",
        "What `GET /v1/status` of the HTTP port answers, as JSON; `rsrv status` shows it, and with `?model=NAME` there "
        "is only that model. Seconds and bytes; counts start with the process. Fields may be added: a reader ignores "
        "those that it does not know. The same as JSON Schema (2020-12): [status.schema.json](status.schema.json).",
        ("field", "type", "meaning"),
        _fields(WorkerStatus, ""),
    )


def status_schema() -> str:
    schema = _tidied(WorkerStatus.model_json_schema(mode="serialization"))
    head = {"$schema": GenerateJsonSchema.schema_dialect, "title": "Status of a worker"}
    return json.dumps({**head, **schema}, indent=2, ensure_ascii=False) + "\n"


def _tidied(schema: Any) -> Any:
    """Without the titles, which only repeat the names, and with each text on one line."""
    if isinstance(schema, list):
        return [_tidied(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: " ".join(value.split()) if key == "description" and isinstance(value, str) else _tidied(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }


def _fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, str, str]]:
    """Each field under its path: ``models[].queue.rows``."""
    for name, field in model.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if _is_model(a)]
        here = f"{path}{name}"
        if not inner:
            yield f"`{here}`", describe_type(field.annotation), field.description or ""
            continue
        many, optional = get_origin(field.annotation) is list, type(None) in get_args(field.annotation)
        text = field.description or inspect.getdoc(inner[0]) or ""
        yield f"`{here}{'[]' if many else ''}`", "object or null" if optional else "object", text
        yield from _fields(inner[0], f"{here}{'[]' if many else ''}.")


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return inspect.isclass(annotation) and not get_args(annotation) and issubclass(annotation, BaseModel)


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": commands,
    "configuration.md": configuration,
    "metrics.md": metrics,
    "status.md": status,
    "status.schema.json": status_schema,
}


def _page(title: str, text: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"# {title}", "", "Made by `python docs/generate.py`; do not edit by hand.", "", text, ""]
    return "\n".join([*lines, *_table(columns, rows)]) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(columns), "|" + "---|" * len(columns), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _code(text: str | None, missing: str) -> str:
    return missing if text is None else f"`{text}`"


if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
