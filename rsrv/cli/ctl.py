"""``rsrv ctl``: operate a running worker or gateway. Here: the group, and what all servers let control."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rsrv.cli import ctl_gateway, ctl_models, ctl_programs, ctl_server, output
from rsrv.cli.client import DEFAULT_URL, UrlOption
from rsrv.cli.ctl_target import OwnUrlOption, Server, TokenOption

if TYPE_CHECKING:
    from rsrv.client.control import Control, ControlStatus, ModelControl

app = typer.Typer(no_args_is_help=True)

TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer, at most a day.")
]
TIMEOUT_SECONDS = 300.0
COLUMNS = ("model", "floor", "on", "weights", "share", "waiting", "served")


@app.callback()
def server(context: typer.Context, url: UrlOption = DEFAULT_URL, token_file: TokenOption = None) -> None:
    """Operate a running server: which models it has, whether requests may enter, where weights are, what answers.

    Example:
        rsrv ctl models
        rsrv ctl register net /srv/models/net --wait 60
        rsrv ctl drain net --wait 30
        rsrv ctl --url 10.0.0.5:8001 residency net device
        rsrv ctl policy net --weight 2
        rsrv ctl compact --reload net,other
        rsrv ctl gateway status
    """
    context.obj = Server(url, token_file)


for command in (*ctl_models.COMMANDS, *ctl_server.COMMANDS):
    app.command()(command)
app.add_typer(ctl_programs.app, name="programs")
app.add_typer(ctl_gateway.app, name="gateway")


@app.command()
def residency(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Name of the model; default: show all.")] = None,
    floor: Annotated[
        Literal["unpinned", "system", "device"] | None,
        typer.Argument(help="Where its weights are to be at least; default: show where they are."),
    ] = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Show where the weights of models are, or set where those of one model are to be.

    `device` brings them to the device and keeps them there, `system` keeps a copy in host memory, `unpinned` keeps
    none. Only a server with a budget (`runtime.device_memory_bytes`) and `model_control_mode: explicit` lets others
    set it; the command returns when it is done.

    Example:
        rsrv ctl residency
        rsrv ctl residency net device
        rsrv ctl residency net --json
    """
    with _control(context, url, timeout) as control:
        if model is None or floor is None:
            _show(control.status(), model)
            return
        reached = control.set_residency(model, floor)
    if output.is_json():
        output.json({"model": model, "floor": reached})
    else:
        output.table(None, ("model", "floor"), [(model, reached)])


@app.command()
def policy(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    weight: Annotated[
        float | None, typer.Option("--weight", help="Its share of the device under `fair`; default: show it.")
    ] = None,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Give a model another share of the device, relative to the weights of the others, until the server ends.

    Example:
        rsrv ctl policy net --weight 2.5
        rsrv ctl policy net
    """
    with _control(context, url, timeout) as control:
        if weight is None:
            _show(control.status(), model)
            return
        control.set_policy(model, weight=weight)
    if output.is_json():
        output.json({"model": model, "weight": weight})
    else:
        output.table(None, ("model", "share"), [(model, weight)])


@app.command()
def compact(
    context: typer.Context,
    reload: Annotated[
        str, typer.Option("--reload", help="Models to load again afterwards: names, separated by commas.")
    ] = "",
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Free all weights that may be freed, so that the holes in the device's memory become one.

    Pinned weights stay where they are. Those that were freed come back when a request needs them, or at once with
    --reload: in that order, without those that cannot be loaded, and only as many as there is room for. A server
    without a budget has nothing to free.

    Example:
        rsrv ctl compact
        rsrv ctl compact --reload net,other
    """
    names = [name.strip() for name in reload.split(",") if name.strip()]
    with _control(context, url, timeout) as control:
        done = control.compact(names)
    if output.is_json():
        output.json(done)
    else:
        output.table(None, ("reloaded", "resident"), [(done.reloaded, output.size(done.resident_bytes))])


def _control(context: typer.Context, url: str | None, timeout: float) -> Control:
    from rsrv.client.control import Control

    server: Server = context.obj
    return Control(url or server.url, timeout=timeout, metadata=server.metadata())


def _show(status: ControlStatus, only: str | None) -> None:
    """The models as a table, or one of them; raises UnknownModel."""
    models = [model for model in status.models if only in (None, model.name)]
    if only is not None and not models:
        from rsrv.core.errors import UnknownModel

        raise UnknownModel(
            f"the server has no model {only!r} that is ready", hint="`rsrv models` lists all, and why one is not"
        )
    if output.is_json():
        output.json({**asdict(status), "models": [asdict(model) for model in models]})
        return
    budget = status.weight_cache_max_bytes
    kept = f"{output.size(budget)} for weights that come and go" if budget else "all weights stay"
    output.table(f"{status.residency_mode} · {status.discipline} · {kept}", COLUMNS, [_row(model) for model in models])


def _row(model: ModelControl) -> tuple[object, ...]:
    return (
        model.name,
        model.floor or None,
        whereabouts(model.device_resident, model.host_resident),
        output.size(model.weight_nbytes),
        model.weight,
        model.queue_depth,
        model.requests_served,
    )


def whereabouts(device: bool, host: bool) -> str:
    """``device``, ``host``, ``device+host``, or ``file`` for weights that are in neither memory."""
    return "+".join(name for name, there in (("device", device), ("host", host)) if there) or "file"
