"""``rsrv serve``: one worker in the foreground."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rsrv.cli import foreground, output
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.core.config import ResolvedConfig
    from rsrv.serve import RunningServer


def serve(
    repo: Annotated[
        Path | None, typer.Argument(help="Directory that holds bundles.", show_default=False, metavar="[REPO]")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Node file, instead of REPO.")] = None,
    worker: Annotated[str | None, typer.Option("--worker", help="Which worker of the node file.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of gRPC; 0 = any free one, which is printed. [default: 8001]")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of health and metrics over HTTP; 0 = any free one. [default: 8002]")
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="No HTTP port.")] = False,
    no_hooks: Annotated[bool, typer.Option("--no-hooks", help="Refuse bundles that bring Python code.")] = False,
    control_mode: Annotated[
        Literal["dynamic", "static", "explicit"] | None,
        typer.Option(
            help="Who changes the models: their directories and operators, nobody, or operators alone, who then move "
            "weights, too. [default: dynamic]"
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve the bundles of a directory over KServe V2 until SIGTERM or Ctrl-C.

    One line of JSON on stdout tells the ports as soon as they answer. A model that fails does not keep the others from
    being served. Bundles that are copied into REPO, changed or removed while it runs are served, reloaded or unloaded.
    The first signal stops gracefully, the second one at once; SIGHUP has the directories looked through.

    Example:
        rsrv serve models
        rsrv serve models --grpc-port 0 --http-port 0
        rsrv serve models --control-mode static
        rsrv serve --config node.yaml --worker gpu0
    """
    foreground.serves()
    with foreground.signals_end_it():
        _serve(repo, config, worker, host, grpc_port, http_port, no_http, no_hooks, control_mode, log_level)


def _serve(
    repo: Path | None,
    config: Path | None,
    worker: str | None,
    host: str | None,
    grpc_port: int | None,
    http_port: int | None,
    no_http: bool,
    no_hooks: bool,
    control_mode: str | None,
    log_level: str,
) -> None:
    _set_up_logging(log_level)
    flags: dict[str, Any] = {}
    if host is not None:
        flags["endpoints.host"] = host
    if grpc_port is not None:
        flags["endpoints.grpc_port"] = grpc_port
    if http_port is not None:
        flags["endpoints.http_port"] = http_port
    if no_http:
        if http_port is not None:
            raise UsageError("--no-http and --http-port contradict each other")
        flags["endpoints.http_port"] = None
    if no_hooks:
        flags["hooks.allow"] = False
    if control_mode is not None:
        flags["model_control_mode"] = control_mode
    resolved = resolve_config(repo, config, worker, flags)

    from rsrv.serve import serve as serve_worker

    serve_worker(resolved, on_listening=_announce)


def resolve_config(repo: Path | None, config: Path | None, worker: str | None, flags: dict[str, Any]) -> ResolvedConfig:
    """The configuration that a command line means: REPO, or ``--config`` with ``--worker``. Raises UsageError."""
    from rsrv.core.config import load_node, resolve, worker_name

    if config is not None:
        if repo is not None:
            raise UsageError(f"REPO ({repo}) and --config ({config}) exclude each other")
        if not config.is_file():
            raise UsageError(f"{config}: there is no such node file")
        return resolve(load_node(config).worker(worker or worker_name()), flags=flags)
    if repo is None:
        raise UsageError("say what to serve: a directory of bundles, or --config NODE.yaml", hint="rsrv serve --help")
    if worker is not None:
        raise UsageError("--worker chooses from a node file and needs --config")
    if not repo.is_dir():
        raise UsageError(f"{repo}: there is no such directory")
    if (repo / "manifest.yaml").exists():
        raise UsageError(f"{repo} is a bundle, not a directory of bundles", hint=f"rsrv serve {repo.absolute().parent}")
    return resolve({}, flags={"model_dirs": [str(repo)], **flags})


def _announce(server: RunningServer) -> None:
    host = server.config.endpoints.host
    output.data(json.dumps({"host": host, "grpc_port": server.grpc_port, "http_port": server.http_port}))
    http = f"HTTP on {host}:{server.http_port}" if server.http_port is not None else "no HTTP"
    foreground.note(f"listening: gRPC on {host}:{server.grpc_port}, {http}; press Ctrl-C to stop")
    foreground.stdout_to_stderr()


def _set_up_logging(level: str) -> None:
    import logging

    from rsrv.core.logs import handler_of

    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise UsageError(f"--log-level {level!r}: wanted debug, info, warning or error")
    logging.basicConfig(level=number, handlers=[handler_of("text")])
    logging.getLogger("jax").setLevel(max(number, logging.WARNING))  # it tells of every platform that is not there
