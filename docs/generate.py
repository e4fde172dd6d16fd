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
from rsrv.core.config import KeyRow, gateway_key_table, gateway_process_variables, key_table
from rsrv.core.config.keys import describe_type
from rsrv.core.status import WorkerStatus
from rsrv.gateway.metrics import series as gateway_series
from rsrv.serve.series import PREFIX, SERIES
from rsrv.serve.triton_metrics import TRITON_SERIES

HERE = Path(__file__).resolve().parent


def configuration() -> str:
    return _page(
        "Configuration of a worker",
        "A value comes from the command line, else from the environment, else from the node file, else it is the "
        "default; `rsrv config show` says which. Keys that are not in this table are errors.",
        _KEY_COLUMNS,
        _key_rows(key_table()),
    )


def gateway_configuration() -> str:
    page = _page(
        "Configuration of a gateway",
        "A value comes from the command line, else from the environment, else from the gateway's file, else it is the "
        "default; `rsrv config show --gateway` says which. Keys that are not in this table are errors; `x-` keys are "
        "free. In a variable the entries of a list are separated by commas. "
        "`RSRV_GATEWAY_SCHEDULING_MODELS` holds all of `scheduling.models`, as JSON.",
        _KEY_COLUMNS,
        _key_rows(gateway_key_table()),
    )
    columns = ("environment variable", "default", "meaning")
    rows = [(f"`{row.name}`", row.default, row.meaning) for row in gateway_process_variables()]
    return "\n".join([page, "Variables that are no key's:", "", *_table(columns, rows)]) + "\n"


def metrics() -> str:
    columns = ("series", "type", "labels", "meaning")
    worker, triton, gateway = (
        _table(columns, [(f"`{prefix}{row.name}`", row.type, _codes(row.labels), row.help) for row in series.values()])
        for prefix, series in ((PREFIX, SERIES), ("", TRITON_SERIES), (gateway_series.PREFIX, gateway_series.SERIES))
    )
    text = (
        "At `/metrics` of the HTTP port, in the Prometheus text format. A counter counts since the process started. "
        "Metrics of the process itself (`process_…`, `python_gc_…`) come beside these."
    )
    worker_text = "Every series also has the labels `worker` and `gpu` where they are known."
    triton_text = (
        "With `metrics.triton_compat: true` requests are exported under the names of Triton Inference Server, too, for "
        "dashboards that exist already: without `_total`, in microseconds, summed up over answered requests."
    )
    gateway_text = (
        "In one text with the metrics of all workers whose metrics endpoints the gateway knows; it adds the label "
        "`worker` to those of a worker's lines that have none. The label is the name that the gateway has for the "
        "worker, or its address. Buckets go from 1 ms to 65.5 s."
    )
    sections = [
        *("## Of a worker", "", worker_text, "", *worker, ""),
        *("## Triton's names", "", triton_text, "", *triton, ""),
        *("## Of a gateway", "", gateway_text, "", *gateway),
    ]
    return "\n".join([*_head("Metrics", text), *sections]) + "\n"


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
    "configuration-gateway.md": gateway_configuration,
    "metrics.md": metrics,
    "status.md": status,
    "status.schema.json": status_schema,
}


_KEY_COLUMNS = ("key", "type", "default", "environment variable", "meaning")


def _key_rows(table: Iterable[KeyRow]) -> list[tuple[str, ...]]:
    return [
        (f"`{row.key}`", row.type, _code(row.default, "required"), _code(row.env, ""), row.meaning) for row in table
    ]


def _page(title: str, text: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([*_head(title, text), *_table(columns, rows)]) + "\n"


def _head(title: str, text: str) -> list[str]:
    return [f"# {title}", "", "Made by `python docs/generate.py`; do not edit by hand.", "", text, ""]


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
