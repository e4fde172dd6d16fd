"""``rsrv plan``: what a directory of bundles needs on a device, before there is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rsrv.cli import output
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.serve.memory_plan import MemoryPlan

COLUMNS = ("model", "weights", "scratch", "programs", "code", "placement")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def plan(
    device_memory: Annotated[
        str, typer.Option("--device-memory", metavar="SIZE", help="Memory of the device: 80GiB, 24GB, or bytes.")
    ],
    repo: Annotated[
        Path | None, typer.Argument(help="Directory that holds bundles.", show_default=False, metavar="[REPO]")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Node file, instead of REPO.")] = None,
    worker: Annotated[str | None, typer.Option("--worker", help="Which worker of the node file.")] = None,
    target: Annotated[
        Literal["cuda", "cpu"],
        typer.Option("--target", help="What the memory belongs to: a card, or the host."),
    ] = "cuda",
    fraction: Annotated[
        float | None,
        typer.Option(
            "--weight-fraction",
            min=0,
            max=1,
            help="Most of the arena that weights may take. [default: runtime.weight_cache_fraction]",
            show_default=False,
        ),
    ] = None,
    wiggle: Annotated[
        float | None,
        typer.Option(
            "--wiggle",
            min=0,
            max=0.99,
            help="Slack of a card's arena. [default: runtime.weight_cache_wiggle_fraction]",
            show_default=False,
        ),
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Show which models fit on a device, and which would have to be loaded on demand.

    Weights come from the bundles; scratch (inputs, temporaries, outputs) is what the compiler of this machine says,
    and is marked indicative when that is another platform than the target. Programs that are in the cache
    (RSRV_WORKER_CACHE_DIR) are not compiled again, and those that are compiled are left there for the server.

    Example:
        rsrv plan models --device-memory 80GiB
        rsrv plan models --device-memory 16GiB --target cpu --json
    """
    from rsrv.cli.serve import resolve_config
    from rsrv.serve.memory_plan import plan_memory

    n_bytes = parse_size(device_memory)
    resolved = resolve_config(repo, config, worker, {})
    with output.logged_warnings():
        made = plan_memory(
            resolved.config,
            n_bytes,
            target=target,
            fraction=fraction,
            wiggle=wiggle,
            on_program=lambda text: output.note(f"compiling {text}"),
        )
    if output.is_json():
        output.json(facts(made, n_bytes))
    else:
        _show(made, n_bytes)
    if any(model.problem for model in made.models):
        raise typer.Exit(1)


def parse_size(text: str) -> int:
    """``80GiB``, ``24GB``, ``512M`` (binary) or plain bytes as a number. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGT]?)(i?B?)", text.strip(), re.IGNORECASE)
    if match is None or (not match[2] and match[3].lower().startswith("i")):
        raise UsageError(
            f"--device-memory {text!r} is no size; wanted a number and B, KiB, MiB, GiB, GB …", hint="80GiB"
        )
    base = 1000 if match[2] and match[3].upper() == "B" else 1024
    n_bytes = int(float(match[1]) * base ** _UNITS[match[2].upper()])
    if n_bytes < 1:
        raise UsageError(f"--device-memory {text!r}: wanted more than nothing")
    return n_bytes


def facts(made: MemoryPlan, device_memory: int) -> dict[str, object]:
    """The plan as plain values; sizes in bytes."""
    budget = made.budget
    return {
        "device_memory": device_memory,
        "target": made.target,
        "compiled_for": made.measured_on,
        "indicative": made.indicative,
        "arena": budget.arena,
        "max_scratch": budget.max_scratch,
        "weight_pool": budget.weight_pool,
        "weights": made.weights_bytes,
        "pinned": budget.pinned,
        "on_demand_budget": budget.on_demand,
        "code": made.code_bytes,
        "models": [
            {
                "name": model.name,
                "weights": model.weights_bytes,
                "scratch": model.scratch_bytes,
                "code": model.code_bytes,
                "placement": made.placements.get(model.name),
                "problem": model.problem or None,
                "programs": [
                    {
                        "batch_size": program.batch_key,
                        "scratch": program.scratch_bytes,
                        "inputs": program.input_bytes,
                        "code": program.code_bytes,
                        "cached": program.cached,
                    }
                    for program in model.programs
                ],
            }
            for model in made.models
        ],
    }


def _show(made: MemoryPlan, device_memory: int) -> None:
    budget, mark = made.budget, " (indicative)" if made.indicative else ""
    rows = [
        (
            model.name,
            output.size(model.weights_bytes),
            output.size(model.scratch_bytes) + mark,
            str(len(model.programs)),
            output.size(model.code_bytes) + mark,
            f"unusable: {model.problem}" if model.problem else made.placements[model.name],
        )
        for model in made.models
    ]
    total = (
        "total",
        output.size(made.weights_bytes),
        output.size(budget.max_scratch) + mark,
        str(sum(len(model.programs) for model in made.models)),
        output.size(made.code_bytes) + mark,
        "",
    )
    arena = f"arena {output.size(budget.arena)} of {output.size(device_memory)} on {made.target}"
    output.table(arena, COLUMNS, [*rows, total])
    output.note(
        f"weights may take {output.size(budget.weight_pool)}: {output.size(budget.pinned)} pinned, "
        f"{output.size(budget.on_demand)} for models on demand; one execution runs at a time, so the largest scratch "
        "counts, once"
    )
    if made.indicative:
        output.note(
            f"scratch and code were compiled for {made.measured_on} and are indicative: "
            f"{made.target} will need another amount"
        )
    if "too large" in made.placements.values():
        output.warn("a model that is too large for the weights' share cannot be served within it")
