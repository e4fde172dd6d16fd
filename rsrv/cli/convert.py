"""``rsrv bundle convert``: a bundle in the other of the two formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rsrv.cli import output


def convert(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a bundle.")],
    to: Annotated[
        str, typer.Option("--to", metavar="3.0 | 2.0", help="Row-major format 3.0, or the older column-major 2.0.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new bundle; its last part is its name.")],
    drop_hooks: Annotated[
        bool, typer.Option("--drop-hooks", help="Leave hooks out; clients then see the program's own tensors.")
    ] = False,
    stablehlo_version: Annotated[
        str | None,
        typer.Option("--stablehlo-version", metavar="V", help='Version of the programs: x.y.z, "min" or "current".'),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run both bundles on the same random inputs and compare.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle as a whole.")] = False,
    as_json: output.JsonOption = False,
) -> None:
    """Write a bundle anew in another format, and check it before it appears.

    Shapes and weights are turned to the axis order of the format; programs stay as they are. Such bundles of format 2.0
    can also be served as they are, which costs a transposition of every weight at every load.

    Example:
        rsrv bundle convert old/net --to 3.0 --out models/net
        rsrv bundle convert models/net --to 2.0 --out old/net --verify
    """
    from rsrv.audit import convert_bundle
    from rsrv.core.errors import UsageError

    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory")
    done = convert_bundle(
        directory,
        out,
        to=to,
        drop_hooks=drop_hooks,
        stablehlo_version=stablehlo_version,
        verify=verify,
        overwrite=overwrite,
    )
    if output.is_json():
        output.json(done.to_json())
        return
    for what, names in (("left out", done.left_out), ("written anew", done.rewritten)):
        if names:
            output.note(f"{what}: {', '.join(names)}")
    if done.compared is not None:
        output.note(f"{len(done.compared)} programs give the same answers in both")
    output.data(str(out))
