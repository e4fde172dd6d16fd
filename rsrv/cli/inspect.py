"""``rsrv inspect``: what is in a model that does not convert."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output
from rsrv.cli.reports import require_writable

if TYPE_CHECKING:
    from rsrv.export.torch.torchscript_report import Probe, ScriptReport

app = typer.Typer(no_args_is_help=True, help="Look into models that do not convert.")


@app.callback()
def _inspect() -> None:
    """Look into models that do not convert."""


@app.command()
def torchscript(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL_DIR | FILE.pt", help="Directory with config.pbtxt and 1/model.pt, or a TorchScript file."
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs",
            "--input",
            metavar="NAME=DTYPE[SIZES]",
            help="An input of the file, with its batch axis; replaces that of the configuration (repeatable).",
        ),
    ] = None,
    size: Annotated[
        int, typer.Option("--size", metavar="N", min=1, help="For axes that the configuration leaves open.")
    ] = 512,
    no_export: Annotated[bool, typer.Option("--no-export", help="Do not try torch.export.")] = False,
    code_out: Annotated[
        Path | None,
        typer.Option("--code-out", metavar="P", help="Write the module's source here (default: a temporary file)."),
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Say why a TorchScript model does not convert, and where to cut it.

    Its parts, its operators, where in the model the suspicious ones are, what it returns for zeros, and whether
    torch.export takes it. The module's code runs here. Exit code 1 when the model does not convert.

    Example:
        rsrv inspect torchscript repository/detector --size 640
        rsrv inspect torchscript net.pt --inputs x=f32[1,3,224,224] --code-out net.py
    """
    from rsrv.export import parse_input_spec

    require_writable("--code-out", code_out)
    specs = [parse_input_spec(text) for text in inputs or []]

    from rsrv.export.torch.torchscript_report import inspect_torchscript

    with redirect_stdout(sys.stderr), output.logged_warnings():
        report = inspect_torchscript(model, inputs=specs, size=size, export=not no_export, code_out=code_out)
    if output.is_json():
        output.json(asdict(report))
    else:
        _print(report)
    if not no_export and (report.probe is None or not report.probe.converts):
        raise typer.Exit(1)


def _print(report: ScriptReport) -> None:
    takes = ", ".join(f"{one.name} {one.dtype}[{','.join(map(str, one.shape))}]" for one in report.inputs)
    facts = [
        ("file", report.file),
        ("inputs", takes or None),
        ("max batch size", report.max_batch_size),
        ("forward takes", ", ".join(report.parameters) or None),
    ]
    output.table(report.name, ["what", "value"], [fact for fact in facts if fact[1] is not None])
    output.table(
        "modules",
        ["module", "type", "parameters", "attention"],
        [(part.path or ".", part.type, part.parameters, _counts(part.attention)) for part in report.tree],
    )
    output.table(
        "operators",
        ["operator", "count", "attention", "first at"],
        [(one.operator, one.count, "!" if one.attention else None, one.place) for one in report.census],
    )
    output.note(f"source written to {report.code_file}")
    if report.forward is not None:
        output.table("returns for zeros", ["value"], [(line,) for line in report.forward])
    if report.problem is not None:
        output.warn(report.problem)
    if report.probe is not None:
        _print_probe(report.probe, report.clean)


def _print_probe(probe: Probe, clean: tuple[str, ...]) -> None:
    if probe.converts:
        output.table(
            "torch.export takes it", ["operator", "count"], [(one.operator, one.count) for one in probe.operators]
        )
        return
    output.error(f"torch.export does not take it: {probe.message}", hint=probe.hint)
    for line in probe.guards:
        output.note(f"  {line}")
    if clean:
        output.note(f"parts without operators that may depend on data, to be exported alone: {', '.join(clean)}")


def _counts(counts: object) -> str | None:
    assert isinstance(counts, dict)
    return ", ".join(f"{kind} ×{count}" for kind, count in counts.items()) or None
