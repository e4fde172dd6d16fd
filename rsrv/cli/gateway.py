"""``rsrv gateway``: one address for many workers, in the foreground."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rsrv.cli import foreground, output
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.core.config import ResolvedGateway
    from rsrv.gateway import RunningGateway


def gateway(
    file: Annotated[
        Path | None, typer.Argument(help="The gateway's file.", show_default=False, metavar="[FILE]")
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", metavar="HOST:PORT", help="gRPC address of a worker; once for each of them."),
    ] = None,
    mode: Annotated[
        Literal["round_robin", "least_outstanding", "lpt_packing"] | None,
        typer.Option(
            help="Which worker gets a request: the next one, the one with the least work, or one of those that the "
            "model was placed on. [default: round_robin]"
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of gRPC; 0 = any free one, which is printed. [default: 8001]")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of health and metrics over HTTP; 0 = any free one. [default: 8002]")
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="No HTTP port.")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(help="The least that is logged. [default: info]"),
    ] = None,
) -> None:
    """Give many workers one address: route requests to them, and take those that fail to others.

    One line of JSON on stdout tells the ports as soon as they answer. Clients see one server that has all models of all
    workers. The first SIGTERM or Ctrl-C stops gracefully, the second one at once.

    Example:
        rsrv gateway --worker 127.0.0.1:8101 --worker 127.0.0.1:8102
        rsrv gateway --worker gpu0:8001 --worker gpu1:8001 --mode lpt_packing --host 0.0.0.0
        rsrv gateway gateway.yaml --grpc-port 0 --http-port 0
        RSRV_GATEWAY_WORKERS=gpu0:8001,gpu1:8001 rsrv gateway
    """
    foreground.serves()
    with foreground.signals_end_it():
        flags: dict[str, Any] = {}
        if worker:
            flags["endpoints"] = worker
        if mode is not None:
            flags["scheduling.mode"] = mode
        if log_level is not None:
            flags["logging.level"] = log_level
        if no_http:
            if http_port is not None:
                raise UsageError("--no-http and --http-port contradict each other")
            flags["listen.http"] = None
        ports = {"listen.grpc": grpc_port, "listen.http": http_port}
        resolved = _resolve(file, flags, host, {key: port for key, port in ports.items() if port is not None})

        from rsrv.gateway import serve_gateway

        serve_gateway(resolved, on_listening=_announce)


def _resolve(file: Path | None, flags: dict[str, Any], host: str | None, ports: dict[str, int]) -> ResolvedGateway:
    """The configuration, with the log set up as it says; what was logged on the way comes after that."""
    from rsrv.core.config import chosen_gateway_file, load_gateway, resolve_gateway
    from rsrv.core.logs import held, let_go, set_up_logging

    level, style = "info", "text"
    records: list[logging.LogRecord] = []
    try:
        with held() as records:
            path = file if file is not None else chosen_gateway_file()
            raw = load_gateway(path) if path is not None else {}
            resolved = resolve_gateway(raw, flags=flags, host=host, ports=ports)
        level, style = resolved.config.logging.level, resolved.config.logging.format
        return resolved
    finally:
        set_up_logging(level, style)
        let_go(records)


def _announce(gateway: RunningGateway) -> None:
    host, http_host = gateway.config.listen.grpc_address.host, gateway.config.listen.http_address
    output.data(json.dumps({"host": host, "grpc_port": gateway.grpc_port, "http_port": gateway.http_port}))
    http = f"HTTP on {http_host.host}:{gateway.http_port}" if http_host is not None else "no HTTP"
    if gateway.config.logging.format == "text" or sys.stderr.isatty():  # a collector of JSON reads no words
        foreground.note(f"listening: gRPC on {host}:{gateway.grpc_port}, {http}; press Ctrl-C to stop")
    foreground.stdout_to_stderr()
