"""``rsrv export``: from a model in Python to a bundle on disk."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsrv.cli import output
from rsrv.cli.export_torch import torch
from rsrv.cli.verify import ToleranceOption

if TYPE_CHECKING:
    from rsrv.bundle import BundleDescription
    from rsrv.export import Factory

app = typer.Typer(no_args_is_help=True, help="Export a model as a bundle.")
app.command()(torch)


@app.callback()
def _export() -> None:
    """Export a model as a bundle."""


@app.command()
def jax(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FN",
            help="A function without arguments (package.module:fn, path/file.py:fn) that returns (fn, params, inputs), "
            "or a dict with these keys and optionally input_names, output_names, input_batch_axes, output_batch_axes, "
            "axis_letters and shape_variants.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The bundle; its last part is the model's name.")],
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name; must be the last part of --out.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option("--batch-sizes", metavar="N,N,…", help="One program per size (default 1).")
    ] = None,
    no_batch: Annotated[bool, typer.Option("--no-batch", help="One program without a batch axis.")] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--inputs", metavar="NAME=DTYPE[SIZES]", help="Use this example input instead (repeatable)."),
    ] = None,
    shape_variants: Annotated[
        list[str] | None,
        typer.Option(
            "--shape-variant",
            metavar="'NAME=DTYPE[SIZES] …'",
            help="Compile for these input sizes too; other inputs are as the factory has them (repeatable).",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle as a whole.")] = False,
    stablehlo_version: Annotated[
        str | None,
        typer.Option("--stablehlo-version", metavar="V", help='Version to write: x.y.z, "min" or "current".'),
    ] = None,
    matmul_precision: Annotated[
        str | None, typer.Option("--matmul-precision", metavar="P", help="default, high or highest.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option("--platform", metavar="P", help="Lower for cpu or cuda (default: this machine's).")
    ] = None,
    drop_unused_inputs: Annotated[
        bool, typer.Option("--drop-unused-inputs", help="Leave inputs out that no output depends on.")
    ] = False,
    x64: Annotated[
        bool | None,
        typer.Option(
            "--x64/--no-x64", help="Trace in JAX's 64-bit mode (default: as JAX_ENABLE_X64 says).", show_default=False
        ),
    ] = None,
    golden: Annotated[
        int,
        typer.Option(
            "--golden",
            metavar="N",
            min=0,
            help="Store N seeded samples with JAX's own answers, and prove programs.",
        ),
    ] = 0,
    input_range: Annotated[
        list[str] | None,
        typer.Option("--input-range", metavar="NAME=LOW:HIGH", help="Values of a sampled input (repeatable)."),
    ] = None,
    tolerance: ToleranceOption = None,
    no_row_check: Annotated[
        bool,
        typer.Option("--no-row-check", help="Do not check that a row's answer is independent of the other rows."),
    ] = False,
    no_diff: Annotated[
        bool, typer.Option("--no-diff", help="Do not store uncommitted changes of the sources.")
    ] = False,
    as_json: output.JsonOption = False,
) -> None:
    """Export a JAX function with its parameters (flax, nnx, equinox or plain).

    Nothing appears at DIR unless the finished bundle passes its checks.

    Example:
        rsrv export jax examples/models/flax_cnn.py:make --out models/cnn --batch-sizes 1,8,32 --golden 3
        rsrv export jax mypackage.models:resnet --out models/resnet --inputs image=f32[1,224,224,3]
        rsrv export jax net.py:make --out models/net --shape-variant x=f32[1,64,64] --shape-variant x=f32[1,96,64]
    """
    from rsrv.audit.parity import parse_tolerances
    from rsrv.bundle import describe_bundle
    from rsrv.core.errors import UsageError
    from rsrv.export import call_factory, export_bundle, parse_variant_spec
    from rsrv.export.golden import parse_range

    target = Path(os.path.abspath(out))
    if name is not None and name != target.name:
        raise UsageError(
            f"--name {name} differs from the last part of --out {out}", hint="a bundle's name is its directory's name"
        )
    if matmul_precision not in (None, "default", "high", "highest"):
        raise UsageError(f"--matmul-precision {matmul_precision} is none of default, high, highest")
    if platform not in (None, "cpu", "cuda"):
        raise UsageError(f"--platform {platform} is neither cpu nor cuda")
    sizes = parse_batch_sizes(batch_sizes, no_batch)
    ranges = dict(parse_range(text) for text in input_range or [])
    tolerances = parse_tolerances(tolerance or [])
    with redirect_stdout(sys.stderr), output.logged_warnings():  # stdout is for the result, whatever the model prints
        made = _with_inputs(call_factory(model, x64=x64), inputs or [])
        path = export_bundle(
            "jax",
            made.fn,
            made.params,
            made.inputs,
            dir=target,
            batch_sizes=sizes,
            input_names=made.input_names,
            output_names=made.output_names,
            input_batch_axes=made.input_batch_axes,
            output_batch_axes=made.output_batch_axes,
            axis_letters=made.axis_letters,
            shape_variants=[parse_variant_spec(text) for text in shape_variants]
            if shape_variants
            else made.shape_variants,
            matmul_precision=matmul_precision,
            platform=platform,
            stablehlo_version=stablehlo_version,
            drop_unused_inputs=drop_unused_inputs,
            x64=x64,
            golden=golden,
            input_ranges=ranges,
            tolerances=tolerances,
            row_check=not no_row_check,
            diff=not no_diff,
            overwrite=overwrite,
        )
    made_bundle = describe_bundle(path)
    if output.is_json():
        output.json(made_bundle.to_json())
        return
    say_made(made_bundle)
    output.data(str(out))


def say_made(bundle: BundleDescription) -> None:
    """In words, what was exported and what was left out."""
    takes, gives = (
        ", ".join(f"{tensor.name} {tensor.text}" for tensor in tensors)
        for tensors in (bundle.executable_inputs, bundle.executable_outputs)
    )
    sizes = f"batch sizes {', '.join(map(str, bundle.batch_sizes))}" if bundle.batch_sizes else "no batch axis"
    if bundle.input_shapes:
        sizes += f", {len(bundle.input_shapes)} shape variants"
    weights = f"{bundle.weights.tensors} weights, {bundle.weights.bytes} bytes" if bundle.weights else "no weights"
    output.note(f"{takes} → {gives}; {sizes}; {weights}")
    for what in ("inputs", "weights"):
        if names := bundle.provenance.get(f"dropped_{what}"):
            output.note(f"{what} that no output depends on were left out: {', '.join(names)}")


def parse_batch_sizes(text: str | None, no_batch: bool) -> list[int] | None:
    """The values of ``--batch-sizes`` and ``--no-batch``. Raises UsageError."""
    from rsrv.core.errors import UsageError

    if no_batch:
        if text is not None:
            raise UsageError("--no-batch and --batch-sizes exclude each other")
        return None
    sizes = []
    for part in ("1" if text is None else text).split(","):
        if not part.strip().isdecimal() or int(part) == 0:
            raise UsageError(f"--batch-sizes {text}: {part!r} is not a positive integer", hint="for example 1,8,32")
        sizes.append(int(part))
    if len(set(sizes)) != len(sizes):
        raise UsageError(f"--batch-sizes {text} repeats a size")
    return sizes


def _with_inputs(made: Factory, texts: list[str]) -> Factory:
    """`made` with the example inputs of the command line: by name where the names are known, else all of them."""
    import difflib

    from rsrv.core.errors import UsageError
    from rsrv.export import parse_input_spec

    specs = [parse_input_spec(text) for text in texts]
    if not specs:
        return made
    named = _named_inputs(made)
    if named is None:
        count = len(made.inputs) if isinstance(made.inputs, (list, tuple)) else 1
        if len(specs) != count:
            raise UsageError(f"--inputs gives {len(specs)} examples, the model has {count} inputs without names")
        return replace(made, inputs=specs)
    for spec in specs:
        if spec.name not in named:
            close = difflib.get_close_matches(spec.name, list(named), n=1)
            raise UsageError(
                f"--inputs names {spec.name!r}; the inputs are {', '.join(named)}",
                hint=f"did you mean {close[0]!r}?" if close else None,
            )
        named[spec.name] = spec
    return replace(made, inputs=named, input_names=None)


def _named_inputs(made: Factory) -> dict[str, Any] | None:
    """The example inputs by name, or None when the factory gave none."""
    if isinstance(made.inputs, dict):
        return dict(made.inputs)
    if made.input_names is None:
        return None
    examples = made.inputs if isinstance(made.inputs, (list, tuple)) else [made.inputs]
    return dict(zip(made.input_names, examples, strict=False))
