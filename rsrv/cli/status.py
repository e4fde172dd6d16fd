"""``rsrv status``: what a running worker does, once or as a table that keeps up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output
from rsrv.cli.ctl import whereabouts

if TYPE_CHECKING:
    from rsrv.core.status import ModelStatus, WeightBudget, WorkerStatus

DEFAULT_URL = "127.0.0.1:8002"
COLUMNS = ("model", "state", "waiting", "served", "rows", "fill", "ms/run", "device", "wait p50", "wait p99", "dropped")
RESIDENCY_COLUMNS = ("floor", "on", "weights", "loads", "evicted", "idle")
"""After the others, where weights come and go."""
Row = tuple[str, ...]


def status(
    url: Annotated[str, typer.Option("--url", help="HTTP port of the server: [http[s]://]host[:port].")] = DEFAULT_URL,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it, with rates, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: output.JsonOption = False,
) -> None:
    """Show the state of a server and, for each model, what waits, what it served and what it costs.

    With --watch the counts are rates per second, and `device` is the share of the time that a model had the device.
    Where weights come and go, `on` says which memory they are in, and `idle` for how long nothing has used them.
    With --json it is the document of GET /v1/status (docs/status.md), with --watch one line for each look.

    Example:
        rsrv status
        rsrv status --url 10.0.0.5:8002 --watch
        rsrv status --json
    """
    if not watch:
        if output.is_json():
            output.json(_fetch_raw(url))
            return
        found = _fetch(url)
        output.table(*view(found))
        for line in remarks(found):
            output.note(line)
        return
    try:
        _watch(url, interval)
    except KeyboardInterrupt:  # the way out
        return


def _watch(url: str, interval: float) -> None:
    from rsrv.core.errors import ServerUnreachable

    if output.is_json():
        while True:
            output.json_line(_fetch_raw(url))
            time.sleep(interval)
    before, looked = _fetch(url), time.monotonic()
    with output.refreshing() as show:
        show(*view(before))
        while True:
            time.sleep(interval)
            try:
                now = _fetch(url)
            except ServerUnreachable as error:
                show(error.message, COLUMNS, [])
                continue
            seconds = time.monotonic() - looked
            show(*view(now, before, seconds))
            before, looked = now, looked + seconds


def _fetch_raw(url: str) -> dict[str, object]:
    from rsrv.client.status import fetch_status

    return fetch_status(url)


def _fetch(url: str) -> WorkerStatus:
    from pydantic import ValidationError

    from rsrv.core.errors import InvalidResponse
    from rsrv.core.status import WorkerStatus

    try:
        return WorkerStatus.model_validate(_fetch_raw(url))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidResponse(
            f"the status of {url} is not one that this version reads: {where}: {first['msg']}"
        ) from None


def view(
    found: WorkerStatus, before: WorkerStatus | None = None, seconds: float = 0.0
) -> tuple[str, Sequence[str], list[Row]]:
    """Headline, columns and rows; rates where `before` is what was found `seconds` ago."""
    budgeted = any(device.budget is not None for device in found.devices)
    earlier = {model.name: model for model in before.models} if before is not None else {}
    rows = []
    for model in found.models:
        past = earlier.get(model.name)
        row = model_row(model, past, seconds)
        rows.append((*row, *residency_row(model, past, seconds)) if budgeted else row)
    return headline(found), (*COLUMNS, *RESIDENCY_COLUMNS) if budgeted else COLUMNS, rows


def headline(found: WorkerStatus) -> str:
    """The server and its device in one line."""
    server = found.server
    words = [
        f"{server.name} {server.version}" + (f" {server.worker}" if server.worker else ""),
        server.state + ("" if server.ready else f", {_why(server.reason)}"),
        f"up {duration(server.uptime_s)}",
        *(f"{device.platform} ({device.kind})" for device in found.devices),
        f"{sum(model.state == 'ready' for model in found.models)}/{len(found.models)} models",
        f"{server.inflight} of {server.limits.max_concurrent_requests} requests in flight",
        *([f"{server.held_requests} held"] if server.held_requests else []),
        *(_weights(device.budget) for device in found.devices if device.budget is not None),
    ]
    programs = server.programs
    done = programs.cache + programs.compiled + programs.shared
    if done < programs.total:
        words.append(f"compiled {done}/{programs.total}")
    return " · ".join(words)


def _weights(budget: WeightBudget) -> str:
    pinned = f", {output.size(budget.pinned_bytes)} pinned" if budget.pinned_bytes else ""
    return f"weights {output.size(budget.resident_bytes)} of {output.size(budget.budget_bytes)}{pinned}"


def _why(reason: str) -> str:
    return reason if reason.startswith("not ready") else f"not ready: {reason}"


def remarks(found: WorkerStatus) -> list[str]:
    """What the table has no room for: why a model does not answer, or answers as it did before its files changed."""
    lines = []
    for model in found.models:
        if model.reason:
            lines.append(f"{model.name}: {model.reason}")
        if model.pending_error is not None:
            error = model.pending_error
            lines.append(
                f"{model.name}: the last reload failed ({error.phase}: {error.message}); the old version serves"
            )
        failed = model.residency.operation_error if model.residency is not None else None
        if failed is not None:
            lines.append(f"{model.name}: {failed.phase} failed: {failed.message}")
    lines += [f"{one.name}: removed by an operator, until its files change" for one in found.tombstones]
    return lines


def model_row(model: ModelStatus, before: ModelStatus | None = None, seconds: float = 0.0) -> Row:
    """One line of the table: totals, or rates since `before`, which was `seconds` ago and of the same load."""
    now, queue, waits = model.counters, model.queue, model.queue_wait_s
    state = model.state if model.admission == "open" else f"{model.state}, {model.admission}"
    if now is None or queue is None:
        return (model.name, state, *["-"] * (len(COLUMNS) - 2))
    past = before.counters if before is not None and before.incarnation == model.incarnation else None
    served, rows, runs, busy = now.served, now.rows, now.dispatches, now.compute_seconds
    padding, dropped = now.padding_rows, sum(now.dropped.values())
    per = ""
    if past is not None and seconds > 0:
        served, rows, runs = served - past.served, rows - past.rows, runs - past.dispatches
        busy, padding = busy - past.compute_seconds, padding - past.padding_rows
        dropped -= sum(past.dropped.values())
        per = "/s"

    def rate(count: int) -> str:
        return f"{count / seconds:.0f}{per}" if per else str(count)

    return (
        model.name,
        state,
        str(queue.requests),
        rate(served),
        rate(rows),
        f"{rows / (rows + padding):.0%}" if rows + padding > 0 else "-",
        f"{busy / runs * 1e3:.2f}" if runs > 0 else "-",
        f"{busy / seconds:.0%}" if per else f"{busy:.1f} s",
        f"{waits.p50 * 1e3:.1f} ms" if waits else "-",
        f"{waits.p99 * 1e3:.1f} ms" if waits else "-",
        rate(dropped),
    )


def residency_row(model: ModelStatus, before: ModelStatus | None = None, seconds: float = 0.0) -> Row:
    """Where the weights are, and how often they moved: totals, or rates as in `model_row`."""
    now = model.residency
    if now is None or model.weights_bytes is None:
        return ("-",) * len(RESIDENCY_COLUMNS)
    past = before.residency if before is not None and before.incarnation == model.incarnation else None

    def rate(count: int, earlier: int) -> str:
        return f"{(count - earlier) / seconds:.1f}/s" if past is not None and seconds > 0 else str(count)

    return (
        now.floor,
        now.state if now.state == "loading" else whereabouts(now.state == "resident", now.host_copy),
        output.size(model.weights_bytes),
        rate(now.loads, past.loads if past is not None else 0),
        rate(now.evictions, past.evictions if past is not None else 0),
        "-" if now.idle_s is None else duration(now.idle_s),
    )


def duration(seconds: float) -> str:
    """``42s``, ``3m``, ``5h``, ``12d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
