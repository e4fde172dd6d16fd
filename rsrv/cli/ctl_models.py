"""``rsrv ctl``: register, drain, warm, cool, pin and remove the models of a running server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rsrv.cli import output
from rsrv.cli.ctl_target import (
    IncarnationOption,
    ModelArgument,
    OwnUrlOption,
    WaitOption,
    administration,
    show,
)

if TYPE_CHECKING:
    from rsrv.client.admin import Admin, Until
    from rsrv.client.admin_answers import Operation

COLUMNS = ("model", "state", "gate", "accepted", "floor", "on", "pinned", "program", "incarnation", "source", "error")


def models(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Name of the model; default: show all.")] = "",
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """List every registered model: its state, its gate, where its weights are, which program set answers.

    Failed models and those that are being removed are there, too. With --json it is `models` of the status document
    (docs/status.md).

    Example:
        rsrv ctl models
        rsrv ctl models net --json
    """
    with administration(context, url) as admin:
        rows = admin.status(model).get("models", [])
    if output.is_json():
        output.json(rows)
        return
    output.table(None, COLUMNS, [_row(row) for row in rows])


def _row(row: Mapping[str, Any]) -> tuple[object, ...]:
    residency: Mapping[str, Any] = row.get("residency") or {}
    on = [
        name
        for name, there in (("device", "state"), ("host", "host_copy"))
        if residency.get(there) in (True, "resident")
    ]
    error = row.get("error") or row.get("pending_error") or {}
    return (
        row.get("name"),
        row.get("state"),
        row.get("admission"),
        sum((row.get("accepted") or {}).values()),
        residency.get("floor"),
        ("+".join(on) or "file") if residency else None,
        "yes" if residency.get("pinned") else None,
        (row.get("programs") or {}).get("selected"),
        row.get("incarnation"),
        row.get("source"),
        error.get("message") or residency.get("operation_error") or None,
    )


def register(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Name to serve it under.")],
    directory: Annotated[str, typer.Argument(help="The bundle, on the server's machine; a relative path starts here.")],
    drained: Annotated[bool, typer.Option("--drained", help="Only read the manifest, and let no request in.")] = False,
    residency: Annotated[
        Literal["unpinned", "system", "device"] | None,
        typer.Option("--residency", help="Where its weights always are; default: as configured."),
    ] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", help="Its share of the device; default: as configured.")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", min=1, help="Most rows that requests are merged to.")
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Never evict its weights once they are there.")] = False,
    wait: WaitOption = None,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Serve another bundle: it is prepared while the others go on.

    With --drained the name is taken and nothing is loaded; `rsrv ctl undrain` loads and opens it, `rsrv ctl activate`
    loads it behind its closed gate. What is registered so is forgotten when the server ends.

    Example:
        rsrv ctl register net /srv/models/net --wait 60
        rsrv ctl register canary /srv/models/canary --drained
    """
    with administration(context, url) as admin:
        found = admin.register(
            model,
            os.path.abspath(directory),
            admission="drained" if drained else "open",
            residency=residency,
            weight=weight,
            max_batch_size=max_batch_size,
            pinned=pinned,
        )
        _after(admin, found, "ready", None if drained else wait)


def retry(
    context: typer.Context,
    model: ModelArgument,
    wait: WaitOption = None,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Prepare a failed model again, or try again to free what a removed one could not.

    Example:
        rsrv ctl retry net --wait 60
    """
    with administration(context, url) as admin:
        _after(admin, admin.retry(model, if_incarnation=if_incarnation), "ready", wait)


def drain(
    context: typer.Context,
    model: ModelArgument,
    wait: WaitOption = None,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Let no new request in; those that were accepted are answered. Weights and programs stay.

    The gate is `draining` until the last of them is answered, then `drained`; --wait waits for that.

    Example:
        rsrv ctl drain net --wait 30
    """
    with administration(context, url) as admin:
        found = admin.drain(model, wait=wait or 0.0, if_incarnation=if_incarnation)
    if wait is None:
        show(found)
    else:
        _reached(found, "drained")


def undrain(
    context: typer.Context,
    model: ModelArgument,
    wait: WaitOption = None,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Let requests in again, those that were held first; a model that was only registered is prepared before.

    Example:
        rsrv ctl undrain net
    """
    with administration(context, url) as admin:
        _after(admin, admin.undrain(model, if_incarnation=if_incarnation), "ready", wait)


def unregister(
    context: typer.Context,
    model: ModelArgument,
    abort: Annotated[bool, typer.Option("--abort", help="Refuse what was accepted instead of answering it.")] = False,
    wait: WaitOption = None,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Remove a model. What runs on the device ends before its memory is freed, in either way.

    In `dynamic` mode its directory is left alone, and it stays away until its files change or it is registered.

    Example:
        rsrv ctl unregister net --wait 60
        rsrv ctl unregister net --abort
    """
    with administration(context, url) as admin:
        found = admin.unregister(model, mode="abort" if abort else "drain", if_incarnation=if_incarnation)
        _after(admin, found, "gone", wait)


def activate(
    context: typer.Context,
    model: ModelArgument,
    allow_open: Annotated[bool, typer.Option("--allow-open", help="Also while the model takes requests.")] = False,
    wait: WaitOption = None,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Warm a model up behind its closed gate: weights to the device, each program run once.

    Example:
        rsrv ctl activate net --wait 60
    """
    with administration(context, url) as admin:
        found = admin.activate(model, allow_open=allow_open, if_incarnation=if_incarnation)
        _after(admin, found, "idle", wait)


def deactivate(
    context: typer.Context,
    model: ModelArgument,
    host: Annotated[bool, typer.Option("--host", help="Drop the copy in host memory, too.")] = False,
    wait: WaitOption = None,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Free the weights of a drained model on the device. Its programs stay, so that it comes back without compiling.

    Example:
        rsrv ctl deactivate net --wait 60
    """
    with administration(context, url) as admin:
        found = admin.deactivate(model, host=host, if_incarnation=if_incarnation)
        _after(admin, found, "idle", wait)


def pin(
    context: typer.Context,
    model: ModelArgument,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Keep the weights of a model on the device once they are there.

    Example:
        rsrv ctl pin net
    """
    with administration(context, url) as admin:
        show(admin.pin(model, if_incarnation=if_incarnation))


def unpin(
    context: typer.Context,
    model: ModelArgument,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Let the weights of a model be evicted again when others need the place.

    Example:
        rsrv ctl unpin net
    """
    with administration(context, url) as admin:
        show(admin.unpin(model, if_incarnation=if_incarnation))


def wait(
    context: typer.Context,
    model: ModelArgument,
    until: Annotated[
        Literal["idle", "drained", "ready", "gone"],
        typer.Argument(
            help="idle: no request is in it, no operator's call moves its weights; drained: no other enters."
        ),
    ],
    timeout: Annotated[float, typer.Option("--timeout", min=0.0, max=3600.0, help="Seconds to wait.")] = 60.0,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Wait until a model is so; ends with 1 when it is not in time.

    Example:
        rsrv ctl wait net ready --timeout 120
        rsrv ctl wait net gone
    """
    with administration(context, url) as admin:
        _reached(admin.wait(model, until, timeout=timeout, if_incarnation=if_incarnation), until)


COMMANDS = (models, register, retry, drain, undrain, unregister, activate, deactivate, pin, unpin, wait)


def _after(admin: Admin, found: Operation, until: Until, seconds: float | None) -> None:
    """Show `found`, or where the model stands when it is `until` so, at most `seconds` later."""
    if seconds is None:
        show(found)
    else:
        _reached(admin.wait(found.model, until, timeout=seconds), until)


def _reached(found: Operation, until: Until) -> None:
    """Show where a wait has ended; one that ended elsewhere, or with an error, ends the command with 1."""
    show(found)
    wanted = {"ready": found.registration, "gone": found.registration, "drained": found.admission}
    if wanted.get(until, until) != until or (until == "idle" and found.error):
        raise typer.Exit(1)
