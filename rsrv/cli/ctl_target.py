"""What all of ``rsrv ctl`` shares: which server is meant, with which token, and how one model's state is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsrv.cli import output
from rsrv.core.errors import Unimplemented, UsageError

if TYPE_CHECKING:
    from rsrv.client.admin import Admin
    from rsrv.client.admin_answers import Operation
    from rsrv.client.connection import Metadata
    from rsrv.client.gateway import Gateway

OwnUrlOption = Annotated[str | None, typer.Option("--url", help="Server; default: the one given to `rsrv ctl`.")]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File with the token that the server wants (endpoints.admin_token_file); also RSRV_CTL_TOKEN_FILE.",
        envvar="RSRV_CTL_TOKEN_FILE",
        show_envvar=False,
        exists=True,
        dir_okay=False,
    ),
]
IncarnationOption = Annotated[
    int, typer.Option("--if-incarnation", min=0, help="Only if the model is still this load of it; 0 = any.")
]
ModelArgument = Annotated[str, typer.Argument(help="Name of the model.")]
WaitOption = Annotated[
    float | None, typer.Option("--wait", min=0.0, max=3600.0, help="Seconds to wait for the end of it; default: not.")
]
COLUMNS = ("model", "state", "gate", "accepted", "weights", "pinned", "incarnation", "error")


@dataclass(frozen=True, slots=True)
class Server:
    """What the options of ``rsrv ctl`` say; commands find it as the object of their context."""

    url: str
    token_file: Path | None = None

    def token(self) -> str | None:
        """The one in the file. Raises UsageError for a file that holds none."""
        if self.token_file is None:
            return None
        try:
            return self.token_file.read_text(encoding="ascii").strip()
        except UnicodeDecodeError:
            raise UsageError(f"--token-file {self.token_file} holds no token: it is not ASCII") from None

    def metadata(self) -> Metadata:
        from rsrv.client.connection import bearer

        token = self.token()
        return () if token is None else bearer(token)


@contextmanager
def administration(context: typer.Context, url: str | None, timeout: float = 60.0) -> Iterator[Admin]:
    """The administration of the server that is meant."""
    from rsrv.client.admin import Admin

    server: Server = context.obj
    with Admin(url or server.url, token=server.token(), timeout=timeout) as admin:
        try:
            yield admin
        except Unimplemented as error:
            raise Unimplemented(
                f"{url or server.url} does not answer administration: {error.message}",
                hint="a worker that listens on more than a loopback address answers this with endpoints.admin: true; "
                "a gateway never does, but for `rsrv ctl gateway`",
            ) from None


@contextmanager
def gateway(context: typer.Context, url: str | None) -> Iterator[Gateway]:
    """The control plane of the gateway that is meant."""
    from rsrv.client.gateway import Gateway

    server: Server = context.obj
    with Gateway(url or server.url, metadata=server.metadata()) as found:
        try:
            yield found
        except Unimplemented:
            raise Unimplemented(
                f"{url or server.url} is no gateway",
                hint="the commands for a worker are those of `rsrv ctl` itself; --url names another server",
            ) from None


def show(found: Operation) -> None:
    """Where a model stands after an operation."""
    if output.is_json():
        output.json({**asdict(found), "accepted": found.accepted})
        return
    weights = found.parameter_operation if found.parameter_operation != "idle" else None
    is_gone = found.registration == "gone"
    row = (
        found.model,
        found.registration,
        None if is_gone else found.admission,
        found.accepted,
        weights,
        "yes" if found.pinned else None,
        None if is_gone else found.incarnation,
        found.error or None,
    )
    output.table(None, COLUMNS, [row])
