"""``rsrv status``: what a running worker does, once or as a table that keeps up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output

if TYPE_CHECKING:
    from rsrv.core.status import ModelStatus, WorkerStatus

DEFAULT_URL = "127.0.0.1:8002"
COLUMNS = ("model", "state", "waiting", "served", "rows", "fill", "ms/run", "device", "wait p50", "wait p99", "dropped")
Row = tuple[str, ...]


def status(
    url: Annotated[str, typer.Option("--url", help="HTTP port of the server: [http[s]://]host[:port].")] = DEFAULT_URL,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it, with rates, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: output.JsonOption = False,
) -> None:
    """Show the state of a server and, for each model, what waits, what it served and what it costs.

    With --watch the counts are rates per second, and `device` is the share of the time that a model had the device.
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
        output.table(headline(found), COLUMNS, [model_row(model) for model in found.models])
        for model in found.models:
            if model.reason:
                output.note(f"{model.name}: {model.reason}")
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
        show(headline(before), COLUMNS, [model_row(model) for model in before.models])
        while True:
            time.sleep(interval)
            try:
                now = _fetch(url)
            except ServerUnreachable as error:
                show(error.message, COLUMNS, [])
                continue
            earlier = {model.name: model for model in before.models}
            seconds = time.monotonic() - looked
            rows = [model_row(model, earlier.get(model.name), seconds) for model in now.models]
            show(headline(now), COLUMNS, rows)
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
    ]
    programs = server.programs
    done = programs.cache + programs.compiled + programs.shared
    if done < programs.total:
        words.append(f"compiled {done}/{programs.total}")
    return " · ".join(words)


def _why(reason: str) -> str:
    return reason if reason.startswith("not ready") else f"not ready: {reason}"


def model_row(model: ModelStatus, before: ModelStatus | None = None, seconds: float = 0.0) -> Row:
    """One line of the table: totals, or rates since `before`, which was `seconds` ago and of the same load."""
    now, queue, waits = model.counters, model.queue, model.queue_wait_s
    if now is None or queue is None:
        return (model.name, model.state, *["-"] * (len(COLUMNS) - 2))
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
        model.state,
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


def duration(seconds: float) -> str:
    """``42s``, ``3m``, ``5h``, ``12d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
