"""How commands reach a server as its clients do, and ``rsrv models``, which asks one what it serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import typer

from rsrv.cli import output
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.client.server import ModelMetadata, Server

UrlOption = Annotated[str, typer.Option("--url", help="Server: [grpc|grpcs://]host:port, [::1]:port or unix:path.")]
DEFAULT_URL = "127.0.0.1:8001"

RootCertOption = Annotated[
    Path | None, typer.Option("--root-cert", metavar="FILE", help="Certificate (PEM) of who signed the server's.")
]
ClientCertOption = Annotated[
    Path | None, typer.Option("--client-cert", metavar="FILE", help="Certificate (PEM) to show to the server.")
]
ClientKeyOption = Annotated[Path | None, typer.Option("--client-key", metavar="FILE", help="Its private key (PEM).")]
MetadataOption = Annotated[
    list[str] | None,
    typer.Option("--metadata", metavar="KEY=VALUE", help="gRPC metadata for every call; again for more."),
]


class Credentials(TypedDict):
    """Keywords of the handles of `rsrv.client`."""

    root_certificates: bytes | None
    client_cert: bytes | None
    client_key: bytes | None
    metadata: tuple[tuple[str, str], ...]


def credentials(
    root_cert: Path | None, client_cert: Path | None, client_key: Path | None, metadata: Sequence[str]
) -> Credentials:
    """What the options of this name say, as keywords of the handles of `rsrv.client`. Raises UsageError."""
    return {
        "root_certificates": _bytes_of("--root-cert", root_cert),
        "client_cert": _bytes_of("--client-cert", client_cert),
        "client_key": _bytes_of("--client-key", client_key),
        "metadata": tuple(_pair(text) for text in metadata),
    }


def _bytes_of(option: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from None


def _pair(text: str) -> tuple[str, str]:
    """A line of metadata; whether gRPC takes it is for the handle to say."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--metadata {text!r}: wanted KEY=VALUE")
    return key.lower(), value


def models(
    url: UrlOption = DEFAULT_URL,
    ready: Annotated[bool, typer.Option("--ready", help="Only models that are ready.")] = False,
    root_cert: RootCertOption = None,
    client_cert: ClientCertOption = None,
    client_key: ClientKeyOption = None,
    metadata: MetadataOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """List the models of a server with their tensors.

    Example:
        rsrv models --url 10.0.0.5:8001 --json
    """
    from rsrv.client.server import Server

    with Server(url, **credentials(root_cert, client_cert, client_key, metadata or ())) as server:
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
