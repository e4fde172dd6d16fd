"""``rsrv export``: from a model in Python to a bundle on disk."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsrv.cli import export_options as options
from rsrv.cli import output
from rsrv.cli.export_convert import convert
from rsrv.cli.export_torch import torch
from rsrv.cli.local_server import signals_unwind
from rsrv.cli.verify import ToleranceOption

if TYPE_CHECKING:
    from rsrv.bundle import BundleDescription
    from rsrv.export import Factory

ALIKE, LISTED = 2, 8

app = typer.Typer(no_args_is_help=True, help="Export a model as a bundle.")
app.command()(torch)
app.command()(convert)


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
    out: options.OutOption,
    name: options.NameOption = None,
    batch_sizes: options.BatchSizesOption = None,
    no_batch: options.NoBatchOption = False,
    dynamic_batch: options.DynamicBatchOption = False,
    inputs: options.InputsOption = None,
    shape_variants: options.ShapeVariantsOption = None,
    overwrite: options.OverwriteOption = False,
    stablehlo_version: options.StablehloVersionOption = None,
    matmul_precision: options.MatmulPrecisionOption = None,
    platform: options.PlatformOption = None,
    drop_unused_inputs: options.DropUnusedInputsOption = False,
    x64: Annotated[
        bool | None,
        typer.Option(
            "--x64/--no-x64", help="Trace in JAX's 64-bit mode (default: as JAX_ENABLE_X64 says).", show_default=False
        ),
    ] = None,
    golden: options.GoldenOption = 0,
    input_range: options.InputRangesOption = None,
    tolerance: ToleranceOption = None,
    no_row_check: Annotated[
        bool,
        typer.Option("--no-row-check", help="Do not check that a row's answer is independent of the other rows."),
    ] = False,
    no_diff: options.NoDiffOption = False,
    as_json: output.JsonOption = False,
) -> None:
    """Export a JAX function with its parameters (flax, nnx, equinox or plain).

    Nothing appears at DIR unless the finished bundle passes its checks.

    Example:
        rsrv export jax examples/models/flax_cnn.py:make --out models/cnn --batch-sizes 1,8,32 --golden 3
        rsrv export jax net.py:make --out models/net --dynamic-batch --batch-sizes 1,8
        rsrv export jax mypackage.models:resnet --out models/resnet --inputs image=f32[1,224,224,3]
        rsrv export jax net.py:make --out models/net --shape-variant x=f32[1,64,64] --shape-variant x=f32[1,96,64]
    """
    from rsrv.audit.parity import parse_tolerances
    from rsrv.bundle import describe_bundle
    from rsrv.export import call_factory, export_bundle, parse_variant_spec
    from rsrv.export.golden import parse_range

    target = options.bundle_directory(out, name)
    options.require_choice("--matmul-precision", matmul_precision, "default", "high", "highest")
    options.require_choice("--platform", platform, "cpu", "cuda")
    sizes = options.parse_batch_sizes(batch_sizes, no_batch, dynamic_batch)
    ranges = dict(parse_range(text) for text in input_range or [])
    tolerances = parse_tolerances(tolerance or [])
    # stdout is for the result, whatever the model prints
    with signals_unwind(), redirect_stdout(sys.stderr), output.logged_warnings():
        made = _with_inputs(call_factory(model, x64=x64), inputs or [])
        path = export_bundle(
            "jax",
            made.fn,
            made.params,
            made.inputs,
            dir=target,
            batch_sizes=sizes,
            dynamic_batch=dynamic_batch,
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
    if bundle.dynamic_batch:
        sizes += " from one program"
    if bundle.input_shapes:
        sizes += f", {len(bundle.input_shapes)} shape variants"
    weights = f"{bundle.weights.tensors} weights, {bundle.weights.bytes} bytes" if bundle.weights else "no weights"
    output.note(f"{takes} → {gives}; {sizes}; {weights}")
    for what in ("inputs", "weights"):
        if names := bundle.provenance.get(f"dropped_{what}"):
            output.note(f"{what} that no output depends on were left out: {_summarised(names)}")


def _summarised(names: Sequence[str]) -> str:
    """Names that end alike as one, ``20 × num_batches_tracked``, and no more than a line of them."""
    last = Counter(name.rpartition(".")[2] for name in names)
    shown = [f"{count} × {name}" for name, count in last.items() if count > ALIKE]
    shown += [name for name in names if last[name.rpartition(".")[2]] <= ALIKE]
    return ", ".join(shown[:LISTED]) + (f" and {len(shown) - LISTED} more" if len(shown) > LISTED else "")


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
