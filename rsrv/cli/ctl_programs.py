"""``rsrv ctl programs``: other programs for a model that serves: stage, shadow, select, roll back, remove."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output
from rsrv.cli.ctl_target import IncarnationOption, ModelArgument, OwnUrlOption, administration

if TYPE_CHECKING:
    from rsrv.client.admin_answers import Program, Programs

app = typer.Typer(no_args_is_help=True)

COLUMNS = ("program", "phase", "selected", "label", "fingerprint", "shadow", "diagnostics")
ProgramArgument = Annotated[int, typer.Argument(min=1, help="Number of the program set.")]


@app.callback()
def programs() -> None:
    """Give a running model other programs for the weights that it has, try them, and go back.

    A program set has one program for each shape variant and batch size, and takes and returns what the model's own
    do; 1 is the one that came with the bundle.

    Example:
        rsrv ctl programs stage net /srv/candidates/net --label fused --shadow 10
        rsrv ctl programs ls net
        rsrv ctl programs select net 2 --expected 1 --require-clean
        rsrv ctl programs select net 1 --expected 2
    """


@app.command()
def ls(
    context: typer.Context, model: ModelArgument, url: OwnUrlOption = None, as_json: output.JsonOption = False
) -> None:
    """List the program sets of a model, and what their shadows have found.

    Example:
        rsrv ctl programs ls net
    """
    with administration(context, url) as admin:
        _show(admin.programs(model))


@app.command()
def stage(
    context: typer.Context,
    model: ModelArgument,
    directory: Annotated[str, typer.Argument(help="Where they are, on the server's machine; relative: from here.")],
    base: Annotated[int, typer.Option("--base", min=0, help="Where the others come from; 0 = the selected set.")] = 0,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="File to take from DIRECTORY; default: all programs.")
    ] = None,
    label: Annotated[str, typer.Option("--label", help="Words for people.")] = "",
    shadow: Annotated[float, typer.Option("--shadow", min=0, max=100, help="Percent of batches to try it on.")] = 0.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is compiled.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, max=3600.0, help="Seconds for that.")] = 600.0,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Compile the programs of another directory beside those that serve; ends with 1 when one cannot be compiled.

    Example:
        rsrv ctl programs stage net /srv/candidates/net --label fused
        rsrv ctl programs stage net /srv/candidates/net --source model.b8.mlir --shadow 5
    """
    with administration(context, url) as admin:
        made = admin.stage(
            model,
            os.path.abspath(directory),
            base=base,
            sources=source or [],
            label=label,
            wait=wait,
            shadow_percent=shadow,
            timeout=timeout,
            if_incarnation=if_incarnation,
        )
    if output.is_json():
        output.json(asdict(made))
    else:
        output.table(None, COLUMNS, [_row(made, 0)])
    if made.phase == "failed":
        raise typer.Exit(1)


@app.command()
def select(
    context: typer.Context,
    model: ModelArgument,
    program: ProgramArgument,
    expected: Annotated[int, typer.Option("--expected", min=1, help="Only if this set is selected now.")],
    require_clean: Annotated[
        bool, typer.Option("--require-clean", help="Only if its shadow compared something and found no difference.")
    ] = False,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Answer with another program set from the next batch on; the same command with the old number goes back.

    Example:
        rsrv ctl programs select net 2 --expected 1
    """
    with administration(context, url) as admin:
        done = admin.select(
            model, program, expected=expected, require_clean=require_clean, if_incarnation=if_incarnation
        )
    if output.is_json():
        output.json({"model": model, **asdict(done)})
    else:
        output.table(None, ("model", "selected", "previous"), [(model, done.selected, done.previous)])


@app.command()
def remove(
    context: typer.Context,
    model: ModelArgument,
    program: ProgramArgument,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Drop a program set that is not selected.

    Example:
        rsrv ctl programs remove net 2
    """
    with administration(context, url) as admin:
        _show(admin.remove(model, program, if_incarnation=if_incarnation))


@app.command()
def shadow(
    context: typer.Context,
    model: ModelArgument,
    program: ProgramArgument,
    percent: Annotated[float, typer.Argument(min=0, max=100, help="Share of batches; 0 ends it.")],
    tolerance: Annotated[
        list[str] | None,
        typer.Option("--tolerance", help="DTYPE=X, such as f32=1e-5: how far outputs may be off, relative."),
    ] = None,
    if_incarnation: IncarnationOption = 0,
    url: OwnUrlOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Give a program set a copy of some batches, and compare what comes out with the answers that were sent.

    Example:
        rsrv ctl programs shadow net 2 10
        rsrv ctl programs shadow net 2 10 --tolerance f16=1e-2
    """
    tolerances = dict(_tolerance(text) for text in tolerance or [])
    with administration(context, url) as admin:
        found = admin.shadow(model, program, percent, tolerances=tolerances, if_incarnation=if_incarnation)
    if output.is_json():
        output.json(asdict(found))
    else:
        output.table(None, COLUMNS, [_row(found, 0)])


def _tolerance(text: str) -> tuple[str, float]:
    name, found, value = text.partition("=")
    try:
        if found and name:
            return name, float(value)
    except ValueError:
        pass
    raise typer.BadParameter(f"--tolerance {text!r}: wanted a dtype and a number, as in f32=1e-5")


def _show(found: Programs) -> None:
    if output.is_json():
        output.json(asdict(found))
        return
    title = f"{len(found.programs)} of {found.capacity} program sets"
    output.table(title, COLUMNS, [_row(program, found.selected) for program in found.programs])


def _row(program: Program, selected: int) -> tuple[object, ...]:
    return (
        program.id,
        program.phase,
        "yes" if program.id == selected else None,
        program.label or None,
        program.fingerprint[:12] or None,
        _record(program),
        "; ".join(program.diagnostics.splitlines())[:200] or None,
    )


def _record(program: Program) -> str | None:
    """``10 %: 42 batches, 1 mismatch``"""
    record = program.shadow
    if record is None:
        return None
    words = [f"{record.batches} batches"]
    for count, word in ((record.mismatches, "mismatches"), (record.errors, "errors"), (record.skipped, "skipped")):
        if count:
            words.append(f"{count} {word}")
    return f"{record.percent:g} %: {', '.join(words)}"
