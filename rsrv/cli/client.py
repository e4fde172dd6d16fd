"""``rsrv infer`` and ``rsrv models``: call a running server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rsrv.cli import output

if TYPE_CHECKING:
    from rsrv.client.server import ModelMetadata, Server

UrlOption = Annotated[str, typer.Option("--url", help="Server: [grpc|grpcs://]host:port, [::1]:port or unix:path.")]
DEFAULT_URL = "127.0.0.1:8001"


def infer(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    url: UrlOption = DEFAULT_URL,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", "-i", help="NAME=@file.npy, NAME=JSON, NAME=zeros or NAME=random; once for each input."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Send the rows of the inputs N at a time; join the answers.")
    ] = None,
    shm: Annotated[
        bool | None,
        typer.Option("--shm/--no-shm", help="Insist on shared memory, or do without. [default: if possible]"),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="Write each output to DIR/NAME.npy.", file_okay=False)
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Send everything N times.")] = 1,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds for each request; 0 for no limit.")] = 10.0,
    as_json: output.JsonOption = False,
) -> None:
    """Send arrays to a model and show what comes back.

    With --batch the inputs hold many rows along axis 0. They are sent N rows at a time, the outputs are joined.
    JSON on stdout holds the values, unless they were written to files.

    Example:
        rsrv infer net --input x=random
        rsrv infer net --url 10.0.0.5:8001 --input x=@x.npy --batch 32 --output-dir out
        rsrv infer net --input 'x=[[1, 2, 3]]' --json
    """
    from rsrv.cli import request
    from rsrv.client.model import KServeModel

    mode: Literal["auto", "on", "off"] = "auto" if shm is None else "on" if shm else "off"
    with KServeModel(url, model, shared_memory=mode, deadline=deadline) as handle:
        metadata = handle.metadata()
        arrays = request.read_inputs(inputs or [], metadata, rows=batch or 1)
        run = request.send(handle, arrays, metadata, batch=batch, repeat=repeat)
        transport = handle.transport or "inline"
    files = request.write_outputs(run.outputs, output_dir) if output_dir is not None else {}
    timing = run.timing()
    if output.is_json():
        values = {
            name: {**request.describe(array), **({"file": files[name]} if files else {"data": array.tolist()})}
            for name, array in run.outputs.items()
        }
        output.json({"model": model, "url": url, "transport": transport, "outputs": values, **timing})
        return
    output.table(None, request.SUMMARY_COLUMNS, [request.summary(name, a) for name, a in run.outputs.items()])
    for path in files.values():
        output.note(f"wrote {path}")
    milliseconds = ", ".join(f"{key} {timing[f'{key}_ms']:.2f}" for key in ("median", "min", "max"))
    output.note(f"{timing['requests']} × {transport}; milliseconds each: {milliseconds}")


def models(
    url: UrlOption = DEFAULT_URL,
    ready: Annotated[bool, typer.Option("--ready", help="Only models that are ready.")] = False,
    as_json: output.JsonOption = False,
) -> None:
    """List the models of a server with their tensors.

    Example:
        rsrv models --url 10.0.0.5:8001 --json
    """
    from rsrv.client.server import Server

    with Server(url) as server:
        rows = [(entry, _tensors(server, entry.name)) for entry in server.models(ready=ready)]
    if output.is_json():
        output.json([{"name": e.name, "state": e.state, "reason": e.reason, **_sides(m)} for e, m in rows])
        return
    if not rows:
        output.note(f"{url} serves no model")
    lines = [(e.name, e.state, _describe(m, "inputs"), _describe(m, "outputs"), e.reason or None) for e, m in rows]
    output.table(None, ["name", "state", "inputs", "outputs", "reason"], lines)


def _tensors(server: Server, name: str) -> ModelMetadata | None:
    """A model's tensors; None for one that cannot tell, such as one that failed to load."""
    from rsrv.core.errors import RsrvError, ServerUnreachable

    try:
        return server.model_metadata(name)
    except ServerUnreachable:
        raise
    except RsrvError:
        return None


def _sides(meta: ModelMetadata | None) -> dict[str, object]:
    return {"inputs": meta.inputs if meta else None, "outputs": meta.outputs if meta else None}


def _describe(meta: ModelMetadata | None, side: Literal["inputs", "outputs"]) -> str | None:
    return ", ".join(tensor.describe() for tensor in getattr(meta, side)) if meta else None
