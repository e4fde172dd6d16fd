"""``rsrv config``: what a configuration means, which keys exist, and whether a file holds. Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsrv.cli import output

if TYPE_CHECKING:
    from rsrv.core.config import ResolvedConfig, ResolvedGateway

EXIT_BAD_CONFIG = 78

app = typer.Typer(no_args_is_help=True, help="Show, describe and check configuration.")

WorkerOption = Annotated[str | None, typer.Option("--worker", help="Which worker of the node file.")]
GatewayOption = Annotated[bool, typer.Option("--gateway", help="It is about a gateway and its file.")]


@app.command()
def show(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[NODE|REPO|FILE]",
            help="A node file, or a directory of bundles; a gateway's file, or nothing when it has none.",
            show_default=False,
        ),
    ] = None,
    worker: WorkerOption = None,
    gateway: GatewayOption = False,
    origin: Annotated[bool, typer.Option("--origin/--no-origin", help="Say where each value comes from.")] = True,
    as_json: output.JsonOption = False,
) -> None:
    """Print the configuration that a worker or a gateway would run with: the file, variables and defaults together.

    Example:
        rsrv config show node.yaml --worker worker0
        RSRV_WORKER_SHM_MAX_REGIONS=8 rsrv config show models --json
        rsrv config show gateway.yaml --gateway
    """
    resolved = _resolve_gateway(source, worker) if gateway else _resolve(source, worker)
    if output.is_json():
        output.json(_shown(resolved, origin))
        return
    from rsrv.core.config.keys import show as text

    rows = [(key, text(value), place) if origin else (key, text(value)) for key, value, place in resolved.rows()]
    output.table(None, ("key", "value", "origin") if origin else ("key", "value"), rows)


@app.command()
def schema(
    keys: Annotated[bool, typer.Option("--keys", help="List the keys with their variables instead.")] = False,
    gateway: GatewayOption = False,
    as_json: output.JsonOption = False,
) -> None:
    """Print the JSON Schema of node files, or of gateways' files, which editors use to complete and check them.

    Example:
        rsrv config schema > node.schema.json
        rsrv config schema --keys
        rsrv config schema --gateway > gateway.schema.json
    """
    from rsrv.core.config import gateway_key_table, gateway_schema, json_schema, key_table

    if not keys:
        output.json(gateway_schema() if gateway else json_schema())
        return
    output.table(
        None,
        ("key", "type", "default", "variable", "meaning"),
        [
            (row.key, row.type, row.default, row.env, row.meaning)
            for row in (gateway_key_table() if gateway else key_table())
        ],
    )


@app.command()
def check(
    nodes: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Node files, or gateways' files.")],
    gateway: GatewayOption = False,
    as_json: output.JsonOption = False,
) -> None:
    """Check node files, every worker of each, or gateways' files; exit 78 when one does not hold.

    Variables are left out of account.

    Example:
        rsrv config check node.yaml
        rsrv config check deploy/*.yaml --json
        rsrv config check gateway.yaml --gateway
    """
    reports = [report for node in nodes for report in ([_check_gateway(node)] if gateway else _check(node))]
    if output.is_json():
        output.json(reports)
    else:
        for report in reports:
            for warning in report["warnings"]:
                output.warn(f"{report['file']}: {warning}")
            if report["problem"] is not None:
                output.error(report["problem"], hint=report["hint"])
        good = [(report["file"], report["worker"], "ok") for report in reports if report["problem"] is None]
        if good:
            output.table(None, ("file", "worker", "result"), good)
    if any(report["problem"] is not None for report in reports):
        raise typer.Exit(EXIT_BAD_CONFIG)


def _resolve_gateway(source: Path | None, worker: str | None) -> ResolvedGateway:
    from rsrv.core.config import load_gateway, resolve_gateway
    from rsrv.core.errors import UsageError

    if worker is not None:
        raise UsageError(f"--worker {worker}: a gateway's file has no blocks of workers")
    if source is None:
        return resolve_gateway({})
    _require(source)
    return resolve_gateway(load_gateway(source))


def _resolve(source: Path | None, worker: str | None) -> ResolvedConfig:
    from rsrv.core.config import load_node, resolve, worker_name
    from rsrv.core.errors import UsageError

    if source is None:
        raise UsageError("say whose configuration: a node file, a directory of bundles, or --gateway")
    _require(source)
    if source.is_dir():
        if worker is not None:
            raise UsageError(f"--worker {worker}: {source} is a directory of bundles; only a node file has workers")
        return resolve({"model_dirs": [str(source)]})
    return resolve(load_node(source).worker(worker if worker is not None else worker_name()))


def _shown(resolved: ResolvedConfig | ResolvedGateway, origin: bool) -> dict[str, Any]:
    values = {key: {"value": value, "origin": place} if origin else value for key, value, place in resolved.rows()}
    overrides = [{"variable": variable, "text": text} for variable, text in resolved.overrides]
    worker = getattr(resolved, "worker", None)
    return {"worker": worker, "values": values, "overrides": overrides}


def _check_gateway(path: Path) -> dict[str, Any]:
    from rsrv.core.config import load_gateway, resolve_gateway
    from rsrv.core.errors import ConfigError

    _require(path)
    try:
        resolved = resolve_gateway(load_gateway(path), environ=None)
    except ConfigError as error:
        return _report(path, None, [], error)
    return _report(path, None, resolved.config.warnings, None)


def _check(path: Path) -> list[dict[str, Any]]:
    """One report per worker, or one for the file when its structure does not hold."""
    import os

    from rsrv.core.config import load_node, resolve
    from rsrv.core.errors import ConfigError

    _require(path)
    try:
        node = load_node(path)
    except ConfigError as error:
        return [_report(path, None, [], error)]
    allowed = {name: text for name, text in os.environ.items() if name == "RSRV_ALLOW_FAKE"}
    reports = []
    for position, name in enumerate(node.names):
        warnings = list(node.warnings) if position == 0 else []
        try:
            resolve(node.worker(name), environ=allowed)
        except ConfigError as error:
            reports.append(_report(path, name, warnings, error))
        else:
            reports.append(_report(path, name, warnings, None))
    return reports


def _report(path: Path, worker: str | None, warnings: list[str], error: Any) -> dict[str, Any]:
    return {
        "file": str(path),
        "worker": worker,
        "problem": error.message if error is not None else None,
        "hint": error.hint if error is not None else None,
        "warnings": warnings,
    }


def _require(path: Path) -> None:
    from rsrv.core.errors import UsageError

    if not path.exists():
        raise UsageError(f"{path}: no such file or directory")
