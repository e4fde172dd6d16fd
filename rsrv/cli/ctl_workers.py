"""``rsrv ctl gateway workers``: which workers a gateway has; add, drain and remove them while it runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output
from rsrv.cli.ctl_target import OwnUrlOption, gateway

if TYPE_CHECKING:
    from rsrv.client.gateway_answers import FleetChange, FleetWorker

app = typer.Typer(no_args_is_help=True)

COLUMNS = ("worker", "address", "state", "models", "in flight", "waiting", "from", "metrics", "incarnation")
WorkerArgument = Annotated[str, typer.Argument(help="Address or name of the worker.")]


@app.callback()
def workers() -> None:
    """List the workers of a gateway, and add, drain or remove one, in every mode.

    Example:
        rsrv ctl gateway workers list
        rsrv ctl gateway workers add 10.0.0.7:8001 --metrics 10.0.0.7:8002 --name c0
        rsrv ctl gateway workers drain c0 --deadline 60
        rsrv ctl gateway workers undrain c0
    """


@app.command("list")
def list_(context: typer.Context, url: OwnUrlOption = None, as_json: output.JsonOption = False) -> None:
    """List the workers, in the order in which they joined.

    `in flight` counts the requests that a worker has, `waiting` those that wait for it in the gateway.

    Example:
        rsrv ctl gateway workers list
        rsrv ctl gateway workers list --json
    """
    with gateway(context, url) as control:
        found = control.workers()
    if output.is_json():
        output.json([asdict(worker) for worker in found])
        return
    if not found:
        output.note("the gateway has no workers")
    output.table(None, COLUMNS, [row(worker) for worker in found])


@app.command()
def add(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="host:port of its gRPC port.")],
    metrics: Annotated[str, typer.Option("--metrics", help="host:port of its HTTP port; default: not known.")] = "",
    name: Annotated[str, typer.Option("--name", help="Name in metrics and logs; default: its address.")] = "",
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Have another worker. It gets requests as soon as the gateway has found it ready.

    Example:
        rsrv ctl gateway workers add 10.0.0.7:8001 --metrics 10.0.0.7:8002 --name c0
    """
    with gateway(context, url) as control:
        _show(control.add_worker(worker, metrics=metrics, name=name))


@app.command()
def remove(
    context: typer.Context, worker: WorkerArgument, url: OwnUrlOption = None, as_json: output.JsonOption = False
) -> None:
    """Drop a worker at once. It finishes what it has and gets nothing more.

    Example:
        rsrv ctl gateway workers remove c0
    """
    with gateway(context, url) as control:
        _show(control.remove_worker(worker), "removed")


@app.command()
def drain(
    context: typer.Context,
    worker: WorkerArgument,
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline",
            min=0.0,
            max=86400.0,
            help="Remove it when it has nothing left to do, or so many seconds later; 0: it stays, drained.",
        ),
    ] = 0.0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Send a worker nothing new, such as before it is restarted. The command does not wait.

    A model that no other worker has is UNAVAILABLE until this one is let in again.

    Example:
        rsrv ctl gateway workers drain c0
        rsrv ctl gateway workers drain 10.0.0.7:8001 --deadline 60
    """
    with gateway(context, url) as control:
        _show(control.drain_worker(worker, deadline=deadline))


@app.command()
def undrain(
    context: typer.Context, worker: WorkerArgument, url: OwnUrlOption = None, as_json: output.JsonOption = False
) -> None:
    """Send a drained worker requests again.

    Example:
        rsrv ctl gateway workers undrain c0
    """
    with gateway(context, url) as control:
        _show(control.undrain_worker(worker))


def row(worker: FleetWorker, state: str = "") -> tuple[object, ...]:
    """One line of the table; `state` in place of what the worker was when the gateway looked."""
    return (
        worker.name,
        worker.worker,
        state or ("draining" if worker.draining else "ready" if worker.ready else "not ready"),
        worker.models,
        worker.inflight,
        worker.waiting,
        worker.source,
        worker.metrics or None,
        worker.incarnation or None,
    )


def _show(done: FleetChange, state: str = "") -> None:
    if output.is_json():
        output.json(asdict(done))
        return
    output.table(None, COLUMNS, [row(done.worker, state)])
