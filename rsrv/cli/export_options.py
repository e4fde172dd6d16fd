"""The options that every command of ``rsrv export`` takes, and what their values mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="The bundle; its last part is the model's name.")]
NameOption = Annotated[str | None, typer.Option("--name", help="The model's name; must be the last part of --out.")]
BatchSizesOption = Annotated[
    str | None, typer.Option("--batch-sizes", metavar="N,N,…", help="One program per size (default 1).")
]
NoBatchOption = Annotated[bool, typer.Option("--no-batch", help="One program without a batch axis.")]
DynamicBatchOption = Annotated[
    bool,
    typer.Option(
        "--dynamic-batch", help="One program for all batch sizes; servers compile it for --batch-sizes or others."
    ),
]
InputsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs",
        metavar="NAME=DTYPE[SIZES]",
        help="Example of the input NAME, in place of the factory's (repeatable).",
    ),
]
ShapeVariantsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape-variant",
        metavar="'NAME=DTYPE[SIZES] …'",
        help="Compile for these input sizes too; other inputs are as the factory has them (repeatable).",
    ),
]
GoldenOption = Annotated[
    int,
    typer.Option(
        "--golden",
        metavar="N",
        min=0,
        help="Store N seeded samples with the framework's own answers, which every program has to repeat.",
    ),
]
InputRangesOption = Annotated[
    list[str] | None,
    typer.Option("--input-range", metavar="NAME=LOW:HIGH", help="Values of a sampled input (repeatable)."),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle as a whole.")]
StablehloVersionOption = Annotated[
    str | None,
    typer.Option("--stablehlo-version", metavar="V", help='Version to write: x.y.z, "min" or "current".'),
]
MatmulPrecisionOption = Annotated[
    str | None, typer.Option("--matmul-precision", metavar="P", help="default, high or highest.")
]
PlatformOption = Annotated[
    str | None, typer.Option("--platform", metavar="P", help="Lower for cpu or cuda (default: this machine's).")
]
DropUnusedInputsOption = Annotated[
    bool, typer.Option("--drop-unused-inputs", help="Leave inputs out that no output depends on.")
]
NoDiffOption = Annotated[bool, typer.Option("--no-diff", help="Do not store uncommitted changes of the sources.")]


def bundle_directory(out: Path, name: str | None) -> Path:
    """The absolute path of ``--out``, which ``--name`` may repeat but not change. Raises UsageError."""
    from rsrv.core.errors import UsageError

    target = Path(os.path.abspath(out))
    if name is not None and name != target.name:
        raise UsageError(
            f"--name {name} differs from the last part of --out {out}", hint="a bundle's name is its directory's name"
        )
    return target


def require_choice(option: str, value: str | None, *choices: str) -> None:
    """Refuse the `value` of an `option` that is none of `choices`; None is "not given". Raises UsageError."""
    from rsrv.core.errors import UsageError

    if value is not None and value not in choices:
        raise UsageError(f"{option} {value} is none of {', '.join(choices)}")


def parse_batch_sizes(text: str | None, no_batch: bool, dynamic_batch: bool) -> list[int] | None:
    """The values of ``--batch-sizes``, ``--no-batch`` and ``--dynamic-batch``. Raises UsageError."""
    from rsrv.core.errors import UsageError

    if no_batch:
        if text is not None or dynamic_batch:
            other = "--batch-sizes" if text is not None else "--dynamic-batch"
            raise UsageError(f"--no-batch and {other} exclude each other")
        return None
    sizes = []
    for part in ("1" if text is None else text).split(","):
        if not part.strip().isdecimal() or int(part) == 0:
            raise UsageError(f"--batch-sizes {text}: {part!r} is not a positive integer", hint="for example 1,8,32")
        sizes.append(int(part))
    if len(set(sizes)) != len(sizes):
        raise UsageError(f"--batch-sizes {text} repeats a size")
    return sizes
