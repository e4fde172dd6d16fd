"""The gateway's file and variables, and the checked configuration that they make together. Nothing is started here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsrv.core.config.addresses import HostPort, parse_host_port
from rsrv.core.config.blocks import get
from rsrv.core.config.environment import ProcessVariable, process_value
from rsrv.core.config.gateway import GatewayConfig
from rsrv.core.config.keys import KeyRow, find_leaf, key_table
from rsrv.core.config.resolution import Layers, Resolved
from rsrv.core.config.roots import Root
from rsrv.core.errors import ConfigError
from rsrv.core.yamlio import MAX_BYTES, YamlError, load_yaml

FILE_VARIABLE = "RSRV_GATEWAY_FILE"

_NO_AUTH = "authentication and TLS are not implemented yet; leave the key out"

GATEWAY = Root(
    "gateway",
    GatewayConfig,
    env_prefix="RSRV_GATEWAY_",
    alias_prefix="REACTANT_GATEWAY_",
    schema_command="rsrv config schema --gateway --keys",
    separator=",",
    variables={"endpoints": "WORKERS", "metrics_endpoints": "WORKER_METRICS"},
    aliases={"LISTEN_METRICS": "listen.http"},
    other_variables=frozenset({"FILE"}),
    renamed={"listen": {"metrics": "http"}},
    not_yet={
        ("auth",): _NO_AUTH,
        ("worker_client", "tls"): _NO_AUTH,
        ("listen", "control"): "a listener for control alone is not implemented yet; leave the key out",
    },
    json_keys=frozenset({"scheduling.models"}),
    lenient=frozenset({"health_interval_seconds"}),
)


class GatewayBlock(dict[str, Any]):
    """The raw values of a gateway's file, for `resolve_gateway`; `where` is the file, for texts."""

    def __init__(self, values: Mapping[Any, Any], *, where: str) -> None:
        super().__init__(values)
        self.where = where


@dataclass(frozen=True)
class ResolvedGateway(Resolved[GatewayConfig]):
    """A gateway's checked configuration with its history."""


def chosen_gateway_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """The file that the environment names for a gateway without one, if it does."""
    text = process_value(FILE_VARIABLE, "REACTANT_GATEWAY_FILE", environ)
    return Path(text) if text else None


def gateway_process_variables() -> list[ProcessVariable]:
    """The variables that do not follow the pattern of the keys."""
    meaning = "File of a gateway whose command line names none."
    return [ProcessVariable(FILE_VARIABLE, "REACTANT_GATEWAY_FILE", "unset", meaning)]


def gateway_key_table() -> list[KeyRow]:
    """One row per key of the gateway's configuration."""
    return key_table(GATEWAY)


def load_gateway(path: str | Path) -> GatewayBlock:
    """Read a gateway's file. Raises ConfigError when it is not there, is no YAML, or holds no mapping."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            root = load_yaml(file.read(MAX_BYTES + 1), what=str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such gateway file") from None
    except OSError as error:
        raise ConfigError(f"{path}: the gateway file cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL, which no name of a file has
        raise ConfigError(f"{str(path)!r}: the gateway file cannot be read: {error}") from None
    except YamlError as error:
        raise ConfigError(error.message) from None
    if not isinstance(root, Mapping):
        found = "nothing" if root is None else f"a {type(root).__name__}"
        raise ConfigError(f"{path}: a gateway file is a mapping of keys; this one holds {found}")
    return GatewayBlock(root, where=str(path))


def resolve_gateway(
    raw: Mapping[str, Any],
    *,
    flags: Mapping[str, Any] | None = None,
    host: str | None = None,
    ports: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = os.environ,
) -> ResolvedGateway:
    """Check `raw` (a `GatewayBlock`, or any nested mapping) with variables and flags laid on top.

    `flags` maps dotted keys to values; a key that is there is set, also to None. `host` and `ports` (``listen.grpc``
    and ``listen.http`` → port) replace that part of the addresses alone. `environ=None` reads no variables. Raises
    ConfigError that names every key that is wrong, its value, its origin and what was wanted.
    """
    layers = Layers(GATEWAY, raw, where=raw.where if isinstance(raw, GatewayBlock) else "configuration")
    layers.lay(environ, flags)
    for key in ("listen.grpc", "listen.http"):
        if host is not None or key in (ports or {}):
            _set_part(layers, key, host, (ports or {}).get(key))
    config = layers.check(GatewayConfig)
    resolved = ResolvedGateway(config, layers.origins_of(config), layers.overrides)
    resolved.log("of the gateway")
    return resolved


def _set_part(layers: Layers, key: str, host: str | None, port: int | None) -> None:
    path = tuple(key.split("."))
    before = get(layers.tree, path)
    leaf = find_leaf(key, GATEWAY)
    assert leaf is not None
    if before is None and (key in layers.origins and port is None):
        return  # it is off, and stays so
    try:
        address = parse_host_port(before if isinstance(before, str) else leaf.default, any_port=True)
    except ValueError:
        return  # what is wrong with it is told by `check`
    address = HostPort(address.host if host is None else host, address.port if port is None else port)
    layers.put(path, str(address), "flag")
