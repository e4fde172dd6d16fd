"""``rsrv ctl``: the memory of a running server, what it gives back, what happens there, and its directories."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output
from rsrv.cli.ctl_target import OwnUrlOption, administration

if TYPE_CHECKING:
    from rsrv.client.admin_answers import Event

MILLISECONDS = "Milliseconds without use; 0 = never; default: as it is."


def trim(
    context: typer.Context,
    target_bytes: Annotated[int, typer.Option("--target-bytes", min=0, help="Stop at so many bytes.")] = 0,
    device: Annotated[int, typer.Option("--device", min=0, help="Which device; a server has 0.")] = 0,
    compact: Annotated[
        bool, typer.Option("--compact", help="Free all that may leave instead, so that holes in the memory merge.")
    ] = False,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Free weights that may leave the device, those unused for the longest time first.

    What is pinned or running stays, so it may end above the target.

    Example:
        rsrv ctl trim
        rsrv ctl trim --target-bytes 8000000000
    """
    with administration(context, url) as admin:
        found = admin.trim(device=device, target_bytes=target_bytes, compact=compact)
    if output.is_json():
        output.json(found)
        return
    budget = found.get("budget")
    budget = budget if isinstance(budget, dict) else {}
    names = ("resident_bytes", "pinned_bytes", "releasing_bytes", "budget_bytes")
    cells = [output.size(budget[name]) if name in budget else None for name in names]
    output.table(None, ("device", "resident", "pinned", "releasing", "budget"), [(device, *cells)])


def reclaim(
    context: typer.Context,
    parameter_idle_ms: Annotated[
        float | None, typer.Option("--parameter-idle-ms", min=0, help=f"Weights on the device. {MILLISECONDS}")
    ] = None,
    workspace_idle_ms: Annotated[
        float | None, typer.Option("--workspace-idle-ms", min=0, help=f"Staging buffers. {MILLISECONDS}")
    ] = None,
    host_idle_ms: Annotated[
        float | None, typer.Option("--host-idle-ms", min=0, help=f"Host copies of weights. {MILLISECONDS}")
    ] = None,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Show or set, until the server ends, after how much idle time it gives memory back.

    Example:
        rsrv ctl reclaim
        rsrv ctl reclaim --parameter-idle-ms 600000
    """
    with administration(context, url) as admin:
        found = admin.reclaim(
            parameter_idle_ms=parameter_idle_ms, workspace_idle_ms=workspace_idle_ms, host_idle_ms=host_idle_ms
        )
    if output.is_json():
        output.json(asdict(found))
        return
    rows = [
        (name.removesuffix("_idle_ms"), f"{value:g} ms" if value else "never") for name, value in asdict(found).items()
    ]
    output.table(None, ("what", "given back after"), rows)


def poll(context: typer.Context, url: OwnUrlOption = None, as_json: output.JsonOption = False) -> None:
    """Have the server look at its model directories now, and show what is different there.

    What is found is applied after it has stayed the same for `model_settle_seconds`. Only in `dynamic` mode.

    Example:
        rsrv ctl poll
    """
    with administration(context, url) as admin:
        changes = admin.poll()
    if output.is_json():
        output.json([asdict(change) for change in changes])
        return
    if not changes:
        output.note("nothing is different")
    output.table(
        None,
        ("model", "action", "from", "directory"),
        [(change.name, change.action, change.origin or None, change.directory) for change in changes],
    )


def events(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Only of this model; default: of all.")] = "",
    start: Annotated[
        int,
        typer.Option("--from", min=0, help="First number to show; 1 = all that the server remembers; 0 = new ones."),
    ] = 0,
    count: Annotated[int, typer.Option("--count", min=0, help="End after so many; 0 = never.")] = 0,
    seconds: Annotated[
        float | None, typer.Option("--for", min=0.1, max=86400.0, help="End after so many seconds; default: never.")
    ] = None,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Show what changes on a server as it happens, until Ctrl-C: registrations, gates, weights, program sets.

    With --json each is one line.

    Example:
        rsrv ctl events
        rsrv ctl events net --from 1 --for 1
        rsrv ctl events net --from 1 --json
    """
    try:
        with administration(context, url) as admin:
            for shown, event in enumerate(admin.events(from_seq=start, model=model, seconds=seconds), 1):
                if output.is_json():
                    # As over HTTP; no attribute in Python can be called `from`.
                    renamed = {"old": "from", "new": "to"}
                    output.json_line({renamed.get(name, name): value for name, value in asdict(event).items()})
                else:
                    output.data(line(event))
                if shown == count:
                    return
    except KeyboardInterrupt:  # the way out
        return


def line(event: Event) -> str:
    """``12 14:03:07 net#3 admission open → draining``"""
    if event.type == "gap":
        return f"{event.seq} … {event.detail}"
    at = datetime.fromtimestamp(event.time).strftime("%H:%M:%S")
    name = f"{event.model}#{event.incarnation}" if event.model else "-"
    step = f"{event.old or '-'} → {event.new or '-'}"
    return " ".join(filter(None, (str(event.seq), at, name, event.type, step, event.detail)))


COMMANDS = (trim, reclaim, poll, events)
