"""``rsrv infer``: the command itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rsrv.cli import output
from rsrv.cli.client import (
    DEFAULT_URL,
    ClientCertOption,
    ClientKeyOption,
    MetadataOption,
    RootCertOption,
    UrlOption,
    credentials,
)
from rsrv.core.errors import UsageError


def infer(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    url: UrlOption = DEFAULT_URL,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            help="NAME=@FILE (.npy, .npz, .json, .csv, .tsv or a picture), NAME=@DIRECTORY or NAME=@'*.png' (pictures, "
            "in the order of their names), NAME=JSON, NAME=zeros or NAME=random; once for each input. "
            "NAME=@x.npz:KEY chooses one array of several.",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="N|auto",
            help="Send the rows of the inputs at most N at a time, many requests at once, and join the answers; auto: "
            "as many as the model takes.",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows", min=1, help="Rows of zeros and random. [default: as the other inputs, else the batch, else 1]"
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Ask for this output; again for more of them.")
    ] = None,
    shm: Annotated[
        bool | None,
        typer.Option("--shm/--no-shm", help="Insist on shared memory, or do without. [default: if possible]"),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="Write each output to DIR/NAME.npy.", file_okay=False)
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the outputs to one file: .npz, .npy, .json, or .jsonl (a line a row)."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --output.")] = False,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Send everything N times.")] = 1,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds for each request; 0 for no limit.")] = 10.0,
    retry: Annotated[
        bool, typer.Option("--retry/--no-retry", help="Send again, within the deadline, what a busy server refused.")
    ] = True,
    image_size: Annotated[
        str | None,
        typer.Option(
            "--image-size", metavar="N|WxH", help="Scale pictures to this. [default: as the model says, else their own]"
        ),
    ] = None,
    image_scale: Annotated[
        float | None,
        typer.Option(
            "--image-scale", help="Multiply the values 0…255 of pictures for a model of floats. [default: 1/255]"
        ),
    ] = None,
    image_mean: Annotated[
        str | None,
        typer.Option("--image-mean", metavar="M,…", help="Subtract this after scaling: one number, or one a channel."),
    ] = None,
    image_std: Annotated[
        str | None, typer.Option("--image-std", metavar="S,…", help="Divide by this afterwards, likewise.")
    ] = None,
    root_cert: RootCertOption = None,
    client_cert: ClientCertOption = None,
    client_key: ClientKeyOption = None,
    metadata: MetadataOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Send arrays, files or pictures to a model, and show or write what comes back.

    Without --batch all rows go in one request. With it they are a dataset, which may be larger than memory when it
    is an .npy file or pictures, and the outputs go to files: requests are in flight at the same time, and rows stay in
    order. Files appear when they are complete. JSON on stdout holds the values, unless they were written to files.

    Example:
        rsrv infer net --input x=random
        rsrv infer net --url 10.0.0.5:8001 --input x=@x.npy --batch 32 --output-dir out
        rsrv infer net --input x=@rows.csv --batch auto --output answers.jsonl
        rsrv infer vision --input x=@photos --image-mean 0.485,0.456,0.406 --image-std 0.229,0.224,0.225
        rsrv infer net --input 'x=[[1, 2, 3]]' --json
    """
    from rsrv.cli.infer import sinks
    from rsrv.cli.infer.images import ImageOptions
    from rsrv.cli.infer.run import Request, answer, show
    from rsrv.cli.local_server import signals_unwind
    from rsrv.client.model import KServeModel
    from rsrv.client.retry import RetryPolicy

    limit = _limit(batch)
    request = Request(
        specs=tuple(inputs or ()),
        dataset=limit is not None,
        rows=rows,
        only=tuple(only or ()),
        repeat=repeat,
        images=ImageOptions.parse(image_size, image_scale, image_mean, image_std),
        destination=sinks.make(output_file, output_dir, overwrite=overwrite),
    )
    mode: Literal["auto", "on", "off"] = "auto" if shm is None else "on" if shm else "off"
    handle = KServeModel(
        url,
        model,
        max_batch_size=limit or 1,
        shared_memory=mode,
        deadline=deadline,
        retry=RetryPolicy(enabled=retry),
        **credentials(root_cert, client_cert, client_key, metadata or ()),
    )
    with signals_unwind(), output.logged_warnings(), handle, answer(handle, request) as found:
        show(found, model=model, url=url)


def _limit(batch: str | None) -> int | Literal["auto"] | None:
    if batch is None:
        return None
    if batch == "auto":
        return "auto"
    if batch.isascii() and batch.isdigit() and int(batch):
        return int(batch)
    raise UsageError(f"--batch {batch!r}: wanted a number of rows from 1 on, or auto")
