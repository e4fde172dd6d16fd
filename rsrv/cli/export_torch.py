"""``rsrv export torch``: a PyTorch model as a bundle."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from rsrv.cli import export_options as options
from rsrv.cli import output
from rsrv.cli.local_server import signals_unwind
from rsrv.cli.verify import ToleranceOption


def torch(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FN | FILE.pt2 | FILE.pt",
            help="A function without arguments (package.module:fn, path/file.py:fn) that returns a module, (module, "
            "inputs), or a dict with module, inputs and optionally kwargs, input_names, output_names, "
            "input_batch_axes, output_batch_axes, axis_letters and shape_variants; or a program saved by torch.export; "
            "or a TorchScript module (experimental).",
        ),
    ],
    out: options.OutOption,
    name: options.NameOption = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="State dict to load: safetensors, or a pickle of tensors only."),
    ] = None,
    batch_sizes: options.BatchSizesOption = None,
    no_batch: options.NoBatchOption = False,
    dynamic_batch: options.DynamicBatchOption = False,
    inputs: options.InputsOption = None,
    shape_variants: options.ShapeVariantsOption = None,
    int64: Annotated[
        str,
        typer.Option(
            "--int64", metavar="keep | narrow", help="narrow: 64-bit integer inputs and outputs as 32-bit ones."
        ),
    ] = "keep",
    lowering: Annotated[
        str,
        typer.Option(
            "--lowering",
            metavar="torchax | torch-xla",
            help="torch-xla: by the environment that --torch-xla-python names; one conversion per program.",
        ),
    ] = "torchax",
    torch_xla_python: Annotated[
        Path | None,
        typer.Option(
            "--torch-xla-python",
            metavar="PATH",
            help="Python of an environment with torch-xla, see docs/export-torch.md.",
        ),
    ] = None,
    golden: options.GoldenOption = 0,
    input_range: options.InputRangesOption = None,
    tolerance: ToleranceOption = None,
    overwrite: options.OverwriteOption = False,
    stablehlo_version: options.StablehloVersionOption = None,
    matmul_precision: options.MatmulPrecisionOption = None,
    platform: options.PlatformOption = None,
    drop_unused_inputs: options.DropUnusedInputsOption = False,
    no_diff: options.NoDiffOption = False,
    as_json: output.JsonOption = False,
) -> None:
    """Export a PyTorch module, run in evaluation mode.

    Every program has to answer the example and seeded random inputs as eager PyTorch does; nothing appears at DIR
    otherwise. The code of the factory runs here.

    Example:
        rsrv export torch model.py:make --out models/net --batch-sizes 1,8,32 --golden 3
        rsrv export torch torchvision.models:resnet18 --inputs x=f32[1,3,224,224] --weights r18.pth --out models/r18
        rsrv export torch saved.pt2 --out models/net
    """
    from rsrv.audit.parity import parse_tolerances
    from rsrv.bundle import describe_bundle
    from rsrv.cli.export import say_made
    from rsrv.export import export_bundle, parse_input_spec, parse_variant_spec
    from rsrv.export.golden import parse_range

    target = options.bundle_directory(out, name)
    options.require_choice("--matmul-precision", matmul_precision, "default", "high", "highest")
    options.require_choice("--platform", platform, "cpu", "cuda")
    options.require_choice("--int64", int64, "keep", "narrow")
    options.require_choice("--lowering", lowering, "torchax", "torch-xla")
    sizes = options.parse_batch_sizes(batch_sizes, no_batch, dynamic_batch)
    ranges = dict(parse_range(text) for text in input_range or [])
    tolerances = parse_tolerances(tolerance or [])
    variants = [parse_variant_spec(text) for text in shape_variants or []]
    specs = [parse_input_spec(text) for text in inputs or []]

    from rsrv.export.torch.factory import load_model

    # stdout is for the result, whatever the model prints
    with signals_unwind(), redirect_stdout(sys.stderr), output.logged_warnings():
        made = load_model(model, weights=weights, inputs=specs)
        path = export_bundle(
            "torch",
            made.module,
            made.inputs,
            kwargs=made.kwargs,
            dir=target,
            batch_sizes=sizes,
            dynamic_batch=dynamic_batch,
            input_names=made.input_names,
            output_names=made.output_names,
            input_batch_axes=made.input_batch_axes,
            output_batch_axes=made.output_batch_axes,
            axis_letters=made.axis_letters,
            shape_variants=variants or made.shape_variants,
            int64=int64,
            lowering=lowering,
            torch_xla_python=torch_xla_python,
            golden=golden,
            input_ranges=ranges,
            tolerances=tolerances,
            matmul_precision=matmul_precision,
            platform=platform,
            stablehlo_version=stablehlo_version,
            drop_unused_inputs=drop_unused_inputs,
            provenance=made.facts,
            diff=not no_diff,
            overwrite=overwrite,
        )
    made_bundle = describe_bundle(path)
    if output.is_json():
        output.json(made_bundle.to_json())
        return
    say_made(made_bundle)
    output.data(str(out))
