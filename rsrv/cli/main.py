"""The command tree of ``rsrv`` and `main`, which runs it and turns every outcome into an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import typer

from rsrv.cli import (
    bundle,
    cache,
    client,
    config,
    ctl,
    demo,
    env,
    errors,
    export,
    foreground,
    gateway,
    inspect,
    output,
    plan,
    serve,
    shm,
    status,
)
from rsrv.cli.infer.command import infer

app = typer.Typer(
    name="rsrv",
    no_args_is_help=True,
    rich_markup_mode=None,  # help texts contain f32[1,224] and rsrv[serve], which rich would take for markup
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from rsrv import __version__

        output.data(f"rsrv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results only, in their shortest form.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also RSRV_DEBUG=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Export models to StableHLO bundles, check them, serve many of them per device, and call them.

    Example:
        rsrv demo
        rsrv export jax model.py:make --out models/net
        rsrv bundle check models/net
        rsrv serve models
        rsrv infer net --url 127.0.0.1:8001 --input x=random
    """
    output.set_mode("json" if as_json else "quiet" if quiet else "human")
    output.set_debug(debug)


app.command()(demo.demo)
app.add_typer(export.app, name="export")
app.add_typer(bundle.app, name="bundle")
app.add_typer(inspect.app, name="inspect")
app.command()(serve.serve)
app.command()(gateway.gateway)
app.command()(infer)
app.command()(client.models)
app.command()(status.status)
app.add_typer(ctl.app, name="ctl")
app.command()(plan.plan)
app.add_typer(config.app, name="config")
app.add_typer(cache.app, name="cache")
app.add_typer(shm.app, name="shm")
app.command()(env.env)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's, which ends then) and return its exit code. Never raises."""
    code = _run(argv)
    if argv is None:
        foreground.end_soon(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    output.set_mode("human")
    output.set_debug(False)
    try:
        outcome = command().main(args=argv, prog_name="rsrv", standalone_mode=False)
    except SystemExit as stop:  # shell completion, and Typer's own treatment of a broken pipe
        if isinstance(stop.__context__, BrokenPipeError):
            return errors.report(stop.__context__)
        return stop.code if isinstance(stop.code, int) else errors.EXIT_FAILED
    except BaseException as error:
        if isinstance(error, typer.TyperException) and "--json" in (sys.argv[1:] if argv is None else argv):
            output.set_mode("json")  # which the option itself does, if it comes before what is wrong
        return errors.report(error)
    return outcome if isinstance(outcome, int) else 0


@lru_cache(maxsize=1)
def command() -> typer.core.TyperGroup:
    """The tree that Typer builds from `app`, with the examples in its help texts kept line by line; built once."""
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    _keep_examples(root)
    return root


def _keep_examples(node: typer.core.TyperGroup | typer.core.TyperCommand) -> None:
    """Mark the indented blocks of all help texts as verbatim; Typer would wrap them like prose."""
    if node.help:
        paragraphs = node.help.split("\n\n")
        node.help = "\n\n".join(f"\b\n{p}" if "\n    " in p else p for p in paragraphs)
    for child in getattr(node, "commands", {}).values():
        _keep_examples(child)
