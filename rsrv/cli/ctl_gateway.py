"""``rsrv ctl gateway``: see where a gateway has placed models and why, and tell its scheduling something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rsrv.cli import ctl_workers, output
from rsrv.cli.ctl_target import ModelArgument, OwnUrlOption, gateway
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.client.gateway_answers import PlacedModel, PlacedWorker, Repacks, Replicas, SchedulingPolicy

app = typer.Typer(no_args_is_help=True)
app.add_typer(ctl_workers.app, name="workers")

MODEL_COLUMNS = ("model", "configured", "effective", "fill", "quantum", "util", "cost", "replicas", "flags")
WORKER_COLUMNS = ("worker", "ready", "models", "in flight", "weights", "budget", "flags")
UNITS = {"compute": "s", "items": "items", "requests": "s"}
"""What work in flight is counted in, by work basis: placement charges each request its measured seconds."""


@app.callback()
def scheduling() -> None:
    """Operate a gateway: where models are placed, by which rules, and which workers it has.

    Placement is that of `scheduling.mode: lpt_packing`; other modes only tell that they are in use. What is changed
    holds until the gateway ends, and longer with `state_file` in its configuration.

    Example:
        rsrv ctl gateway status
        rsrv ctl --url 10.0.0.5:8001 gateway set-replicas net 2 --fill-mode spread
        rsrv ctl gateway set-policy hysteresis=0.1 default_replicas=all
        rsrv ctl gateway repack --wait 30
        rsrv ctl gateway workers list
    """


@app.command()
def status(context: typer.Context, url: OwnUrlOption = None, as_json: output.JsonOption = False) -> None:
    """Show the rules of the scheduling, when models were placed, where each one is, and how workers are filled.

    `replicas` has for each one the requests that ever went there, and the items that are in flight there.

    Example:
        rsrv ctl gateway status
        rsrv ctl gateway status --json
    """
    with gateway(context, url) as control:
        found = control.status()
    if output.is_json():
        output.json(asdict(found))
        return
    models = [model_row(model) for model in found.models]
    if output.mode() == "quiet":
        output.table(None, MODEL_COLUMNS, models)
        return
    if found.policy is None or found.repacks is None:
        output.table(None, ("mode",), [(found.mode,)])
    else:
        output.table(*policy_table(found.mode, found.policy))
        output.table("repacks", ("what", "value"), list(repack_rows(found.repacks, found.policy)))
        unit = UNITS.get(found.policy.work_basis, "")
        output.table("models", MODEL_COLUMNS, models)
        output.table("workers", WORKER_COLUMNS, [worker_row(worker, unit) for worker in found.workers])
    _warn(found.warnings)


@app.command()
def repack(
    context: typer.Context,
    wait: Annotated[
        float, typer.Option("--wait", min=0.0, max=120.0, help="Seconds to wait until it is done; 0 = not.")
    ] = 30.0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Have all models placed anew now, by what the gateway has measured.

    Example:
        rsrv ctl gateway repack
        rsrv ctl gateway repack --wait 0
    """
    with gateway(context, url) as control:
        done = control.repack(wait)
    if output.is_json():
        output.json(asdict(done))
        return
    row = (
        done.sequence,
        "yes" if done.completed else "not yet",
        f"{done.waited_seconds:.2f} s",
        done.repacks.last_placed if done.completed else None,
        done.repacks.last_moved if done.completed else None,
    )
    output.table(None, ("repack", "done", "waited", "placed", "moved"), [row])
    _warn(done.warnings)


@app.command()
def set_replicas(
    context: typer.Context,
    model: ModelArgument,
    replicas: Annotated[
        str | None,
        typer.Argument(
            help="On how many workers: a number, all, or default; without it, as it is.", metavar="REPLICAS"
        ),
    ] = None,
    fill_mode: Annotated[
        Literal["inherit", "run", "spread", "inflight"] | None,
        typer.Option("--fill-mode", help="How its replicas are filled; inherit: like all others; default: as it is."),
    ] = None,
    fill_factor: Annotated[
        float | None,
        typer.Option(
            "--fill-factor",
            min=0.0,
            help="Largest batches to one replica in a run; 0: like all others; default: as is.",
        ),
    ] = None,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Also for a model that no worker has yet.")
    ] = False,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Say on how many workers a model is to be, and how they are filled.

    Replicas change with the next repack, filling at once. What is left out stays as it is; `default` (or `-`) takes
    back the model's own number.

    Example:
        rsrv ctl gateway set-replicas net 2
        rsrv ctl gateway set-replicas net all --fill-mode spread
        rsrv ctl gateway set-replicas net --fill-factor 0.5
        rsrv ctl gateway set-replicas net default --fill-mode inherit --fill-factor 0
    """
    if replicas is None and fill_mode is None and fill_factor is None:
        raise UsageError(f"nothing is set for {model!r}; wanted a number of replicas, --fill-mode or --fill-factor")
    wanted = None if replicas is None else replicas_of(replicas)
    with gateway(context, url) as control:
        done = control.set_placement(
            model, replicas=wanted, fill_mode=fill_mode, fill_factor=fill_factor, allow_unknown=allow_unknown
        )
    if output.is_json():
        output.json(asdict(done))
        return
    row = (done.name, _shown(done.configured_replicas), done.effective_replicas, done.fill_mode, done.fill_quantum)
    output.table(None, ("model", "configured", "effective", "fill", "quantum"), [row])
    _warn(done.warnings)


@app.command()
def set_policy(
    context: typer.Context,
    values: Annotated[list[str], typer.Argument(help="What to set, such as hysteresis=0.1.", metavar="KEY=VALUE...")],
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Change rules of the scheduling, all of them or none; `rsrv ctl gateway status` lists the keys.

    docs/configuration-gateway.md explains each under `scheduling`.

    Example:
        rsrv ctl gateway set-policy hysteresis=0.1
        rsrv ctl gateway set-policy default_replicas=all routing_fill_mode=spread
    """
    knobs = dict(knobs_of(values))
    with gateway(context, url) as control:
        done = control.set_policy(**knobs)
    if output.is_json():
        output.json(asdict(done))
        return
    output.table(*policy_table(None, done.policy))
    _warn(done.warnings)


# --- what people write ----------------------------------------------------------------------------------------------

_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def replicas_of(text: str) -> Replicas:
    """``3``, ``all``, ``default`` or ``-``. Raises UsageError."""
    word = text.strip().lower()
    if word == "all":
        return "all"
    if word in ("default", "-"):
        return "default"
    if not word.isascii() or not word.isdigit() or int(word) == 0:
        raise UsageError(f"replicas is {text!r}; wanted a whole number above 0, all or default")
    return int(word)


def knobs_of(pairs: Sequence[str]) -> Iterator[tuple[str, float | str]]:
    """``KEY=VALUE`` as the arguments of `Gateway.set_policy`. Raises UsageError."""
    from rsrv.client.gateway import require_knob

    known: set[str] = set()
    for pair in pairs:
        name, equals, text = (part.strip() for part in pair.partition("="))
        name = name.replace("-", "_")
        if not equals or not text:
            raise UsageError(f"{pair!r} sets nothing; wanted KEY=VALUE", hint="rsrv ctl gateway status shows all keys")
        require_knob(name)
        if name in known:
            raise UsageError(f"{name} is there twice; wanted each key once")
        known.add(name)
        yield name, _value(name, text)


def _value(name: str, text: str) -> float | str:
    from rsrv.protos import control

    field: Any = control.SchedulingPolicy.DESCRIPTOR.fields_by_name[name]
    if field.cpp_type == field.CPPTYPE_STRING:
        return text
    if name == "default_replicas":
        return replicas_of(text)
    if field.cpp_type == field.CPPTYPE_BOOL:
        if text.lower() not in _SWITCHES:
            raise UsageError(f"{name} is {text!r}; wanted true or false")
        return _SWITCHES[text.lower()]
    is_real = field.cpp_type == field.CPPTYPE_DOUBLE
    try:
        return float(text) if is_real else int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; wanted a {'number' if is_real else 'whole number'}") from None


# --- what they see --------------------------------------------------------------------------------------------------


def policy_table(
    mode: str | None, policy: SchedulingPolicy
) -> tuple[str, Sequence[str], Sequence[tuple[object, object]]]:
    """Title, columns and rows of the knobs."""
    since = f"generation {policy.generation}" if policy.generation else "as configured"
    values = {name: value for name, value in asdict(policy).items() if name != "generation"}
    title = since if mode is None else f"{mode} · {since}"
    return title, ("key", "value"), [(name, _word(value)) for name, value in values.items()]


def repack_rows(repacks: Repacks, policy: SchedulingPolicy) -> Iterator[tuple[str, object]]:
    when = datetime.fromtimestamp(repacks.last_unix_seconds).strftime("%Y-%m-%d %H:%M:%S")
    yield "count", repacks.count
    yield "last", f"{when}, {repacks.last_trigger}" if repacks.last_unix_seconds else "never"
    yield "models placed", repacks.last_placed
    yield "models moved", repacks.last_moved
    yield "device time since", f"{repacks.accumulated_seconds:.6g} of {repacks.threshold_seconds:.6g} s"
    armed = policy.first_rebalance_compute_seconds > 0 and not repacks.first_done
    yield "first budget", "armed" if armed else "over"
    yield "asked for by operators", f"{repacks.completed} of {repacks.requested} done"


def model_row(model: PlacedModel) -> tuple[object, ...]:
    flags = (("[unplaced]", not model.placed), ("[drifted]", model.drifted))
    return (
        model.name,
        _shown(model.configured_replicas),
        model.effective_replicas,
        model.fill_mode,
        model.fill_quantum,
        f"{model.utilization:.3f}",
        f"{model.cost_seconds * 1e3:.3f} ms",
        ", ".join(f"{one.name} {one.routed}req/{one.outstanding}it" for one in model.replicas) or None,
        " ".join(flag for flag, there in flags if there) or None,
    )


def worker_row(worker: PlacedWorker, unit: str) -> tuple[object, ...]:
    flags = (("draining", worker.draining), ("OVERSUBSCRIBED", worker.oversubscribed))
    return (
        worker.name,
        "yes" if worker.ready else "no",
        worker.models_placed,
        f"{worker.inflight_work:.6g} {unit}",
        output.size(worker.assigned_bytes),
        output.size(worker.budget_bytes) if worker.budget_bytes else "no limit",
        " ".join(flag for flag, there in flags if there) or None,
    )


def _shown(replicas: Replicas) -> Replicas | None:
    return None if replicas == "default" else replicas


def _word(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def _warn(warnings: Sequence[str]) -> None:
    for text in warnings:
        output.warn(text)
