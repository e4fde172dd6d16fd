"""``rsrv export torch``: a PyTorch model as a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsrv.cli import output
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
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The bundle; its last part is the model's name.")],
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name; must be the last part of --out.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="State dict to load: safetensors, or a pickle of tensors only."),
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option("--batch-sizes", metavar="N,N,…", help="One program per size (default 1).")
    ] = None,
    no_batch: Annotated[bool, typer.Option("--no-batch", help="One program without a batch axis.")] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs", metavar="NAME=DTYPE[SIZES]", help="Example of the input NAME of forward (repeatable)."
        ),
    ] = None,
    shape_variants: Annotated[
        list[str] | None,
        typer.Option(
            "--shape-variant",
            metavar="'NAME=DTYPE[SIZES] …'",
            help="Compile for these input sizes too; other inputs are as the factory has them (repeatable).",
        ),
    ] = None,
    int64: Annotated[
        str,
        typer.Option(
            "--int64", metavar="keep | narrow", help="narrow: 64-bit integer inputs and outputs as 32-bit ones."
        ),
    ] = "keep",
    golden: Annotated[
        int,
        typer.Option("--golden", metavar="N", min=0, help="Store N seeded samples with PyTorch's own answers."),
    ] = 0,
    input_range: Annotated[
        list[str] | None,
        typer.Option("--input-range", metavar="NAME=LOW:HIGH", help="Values of a sampled input (repeatable)."),
    ] = None,
    tolerance: ToleranceOption = None,
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
    no_diff: Annotated[
        bool, typer.Option("--no-diff", help="Do not store uncommitted changes of the sources.")
    ] = False,
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
    from rsrv.cli.export import parse_batch_sizes, say_made
    from rsrv.core.errors import UsageError
    from rsrv.export import export_bundle, parse_input_spec, parse_variant_spec
    from rsrv.export.golden import parse_range

    target = Path(out).absolute()
    if name is not None and name != target.name:
        raise UsageError(
            f"--name {name} differs from the last part of --out {out}", hint="a bundle's name is its directory's name"
        )
    if matmul_precision not in (None, "default", "high", "highest"):
        raise UsageError(f"--matmul-precision {matmul_precision} is none of default, high, highest")
    if int64 not in ("keep", "narrow"):
        raise UsageError(f"--int64 {int64} is none of keep, narrow")
    sizes = parse_batch_sizes(batch_sizes, no_batch)
    ranges = dict(parse_range(text) for text in input_range or [])
    tolerances = parse_tolerances(tolerance or [])
    variants = [parse_variant_spec(text) for text in shape_variants or []]
    specs = [parse_input_spec(text) for text in inputs or []]

    from rsrv.export.torch.factory import load_model

    made = load_model(model, weights=weights, inputs=specs)
    path = export_bundle(
        "torch",
        made.module,
        made.inputs,
        kwargs=made.kwargs,
        dir=target,
        batch_sizes=sizes,
        input_names=made.input_names,
        output_names=made.output_names,
        input_batch_axes=made.input_batch_axes,
        output_batch_axes=made.output_batch_axes,
        axis_letters=made.axis_letters,
        shape_variants=variants or made.shape_variants,
        int64=int64,
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
