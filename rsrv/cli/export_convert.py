"""``rsrv export convert``: a model repository as bundles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output
from rsrv.cli.local_server import signals_unwind

if TYPE_CHECKING:
    from rsrv.export.repository import ConversionReport, ConversionResult, ConvertConfig, WorkItem


def convert(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="What to convert, and where to; see docs/convert.md.")
    ],
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAME,NAME,…", help="Only these models or bundles; no report.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Delete the bundles that --only names, and make them anew.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file and show what would be done. PyTorch is not imported.")
    ] = False,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="Convert each model in a process of its own.")
    ] = True,
    ladder: Annotated[
        str,
        typer.Option(
            "--ladder",
            metavar="halve | bisect",
            help="Where not all batch sizes work: keep 1 alone, or look for all that work.",
        ),
    ] = "halve",
    as_json: output.JsonOption = False,
) -> None:
    """Convert a Triton model repository of PyTorch models, or what handlers make, to bundles.

    What is there already stays, so that a run that was interrupted can be started again. A model that fails does not
    stop the others; afterwards the exit code is 1. The report is written in Markdown and JSON. Handlers are Python code
    of yours and run here.

    Example:
        rsrv export convert convert.yaml --dry-run
        rsrv export convert convert.yaml
        rsrv export convert convert.yaml --only resnet,bert --force
    """
    from rsrv.core.errors import UsageError
    from rsrv.export.repository import load_convert_config, plan, select

    if not config.is_file():
        raise UsageError(f"{config}: there is no such file")
    if ladder not in ("halve", "bisect"):
        raise UsageError(f"--ladder {ladder} is none of halve, bisect")
    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    if only is not None and not names:
        raise UsageError(f"--only {only!r} names nothing", hint="for example --only resnet,bert")
    if force and not names:
        raise UsageError("--force deletes bundles and needs --only to say which")
    loaded = load_convert_config(config)
    items = select(plan(loaded), names)
    if not names:
        _warn_of_slips(loaded, items)
    if dry_run:
        _show_plan(items)
        return
    report = _converted(loaded, items, names, force=force, isolate=isolate, ladder=ladder)
    _show_report(report)
    if not names:
        output.note(f"report: {loaded.report_path} and {loaded.json_path.name}")
    if not report.ok:
        raise typer.Exit(1)


def _converted(
    config: ConvertConfig, items: Sequence[WorkItem], only: Sequence[str], *, force: bool, isolate: bool, ladder: str
) -> ConversionReport:
    from rsrv.export.repository import convert_repository

    inside = nullcontext() if isolate else redirect_stdout(sys.stderr)  # stdout is for the result
    with signals_unwind(), inside, output.logged_warnings(), output.progress(len(items)) as progress:

        def done(result: ConversionResult) -> None:
            what = "was there" if result.was_there else result.sizes_text or result.reason[:100]
            progress.done(f"{result.bundle}: {result.outcome}" + (f" ({what})" if what else ""))

        return convert_repository(
            config,
            only=only,
            force=force,
            isolate=isolate,
            ladder="bisect" if ladder == "bisect" else "halve",
            on_start=lambda item: progress.start(item.bundle),
            on_result=done,
        )


def _warn_of_slips(config: ConvertConfig, items: Sequence[WorkItem]) -> None:
    from rsrv.export.repository.worklist import unknown_exclusions

    for name in unknown_exclusions(config, items):
        output.warn(f"{config.path}: exclude names {name!r}, which is no model")


def _show_plan(items: Sequence[WorkItem]) -> None:
    from rsrv.export.repository.worklist import outlook, present

    rows = [
        (item.bundle, item.model, item.disposition, "present" if present(item.target) else "absent", outlook(item))
        for item in items
    ]
    output.table(None, ("bundle", "model", "by", "state", "what"), rows)


def _show_report(report: ConversionReport) -> None:
    if output.is_json():
        output.json(report.to_json())
        return
    rows = [
        (one.bundle, one.outcome, one.sizes_text or None, "; ".join(filter(None, (one.reason, one.note))) or None)
        for one in report.results
    ]
    output.table(None, ("bundle", "outcome", "batch sizes", "remark"), rows)
    output.note(", ".join(f"{count} {outcome}" for outcome, count in report.counts.items() if count) or "nothing to do")
