"""The node file: one YAML file per machine, from which each worker takes its block. Nothing is started here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rsrv.core.config.blocks import flatten, get, merge, normalise, put
from rsrv.core.config.keys import KeyRow, closest, leaves, show
from rsrv.core.config.problems import config_error
from rsrv.core.config.sections import Name, NotNegative, Port, Section
from rsrv.core.errors import ConfigError
from rsrv.core.yamlio import YamlError, load_yaml

DEFAULT_HTTP_PORT = 8002


class WorkerEntry(Section):
    """What the node itself reads of a worker's entry; all other keys of the entry override `global`."""

    name: Name
    """Name of the worker, one of a kind."""
    gpu: NotNegative | None = None
    """Which of the visible devices the worker uses."""
    port: Port | None = None
    """Port of gRPC. Unset: `base_port` and the worker's position."""
    host: Name | None = None
    """Address to listen on, the same as `endpoints.host`."""


class NodeFile(Section):
    """The keys of the node file."""

    model_repo: Name
    """Directory of the bundles, which becomes every worker's `model_dirs`."""
    base_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Worker `i` gets this port and `i` for gRPC. Required unless every worker has a `port`."""
    metrics_base_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Worker `i` gets this port and `i` for HTTP. Unset: the default of `endpoints.http_port`."""
    global_: dict[str, Any] = Field(default={}, alias="global")
    """Configuration of all workers."""
    workers: Annotated[list[WorkerEntry], Field(min_length=1)]
    """The workers, each with its `name` and what differs from `global`."""
    models: dict[Name, Annotated[list[Name], Field(min_length=1)]] | None = None
    """Models whose `residency` is `device` unless it is set, and on which workers. It limits nothing that is loaded."""


class WorkerBlock(dict[str, Any]):
    """The raw configuration of one worker (G-5), for `resolve`; it knows where each of its values came from."""

    def __init__(
        self, values: Mapping[str, Any], *, worker: str, where: str, origins: Mapping[str, str], workers_on_node: int
    ) -> None:
        super().__init__(values)
        self.worker = worker
        self.where = where
        self.origins = dict(origins)
        self.workers_on_node = workers_on_node


@dataclass(frozen=True)
class NodeConfig:
    """A node file whose structure holds; the workers' blocks are checked by `resolve`.

    Attributes:
        path: the file.
        keys: the node-level keys.
        blocks: for each worker, in order, the keys of its entry that override `global`.
        warnings: what is legal and probably not meant.
    """

    path: Path
    keys: NodeFile
    blocks: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.keys.workers)

    def worker(self, name: str | None = None) -> WorkerBlock:
        """The raw configuration of a worker; `name` may be None when there is one only. Raises ConfigError."""
        return self._block(self._position(name))

    def _position(self, name: str | None) -> int:
        names = self.names
        if name is None:
            if len(names) > 1:
                raise ConfigError(
                    f"{self.path}: there are {len(names)} workers ({', '.join(names)}) and none was chosen",
                    hint=f"say which with --worker {names[0]}",
                )
            return 0
        if name not in names:
            near = closest(name, names)
            raise ConfigError(
                f"{self.path}: there is no worker {name!r}; the workers are {', '.join(names)}",
                hint=f"did you mean {near}?" if near else None,
            )
        return names.index(name)

    def _block(self, position: int) -> WorkerBlock:
        keys, entry, own = self.keys, self.keys.workers[position], self.blocks[position]
        values = normalise(merge(keys.global_, own), where=_where(self.path, entry.name))
        origins = {".".join(path): "global" for path, _ in flatten(keys.global_)}
        origins.update({".".join(path): "worker" for path, _ in flatten(own)})
        for path, value, origin in _forced(keys, position):
            put(values, path, value)
            origins[".".join(path)] = origin
        for model, wanted in (keys.models or {}).items():
            path = ("scheduler", "models", model, "residency")
            if entry.name in wanted and get(values, path) is None:
                put(values, path, "device")
                origins[".".join(path)] = "node"
        return WorkerBlock(
            values,
            worker=entry.name,
            where=_where(self.path, entry.name),
            origins=origins,
            workers_on_node=len(keys.workers),
        )


def load_node(path: str | Path) -> NodeConfig:
    """Read and check the structure of a node file (G-1, G-3). Raises ConfigError."""
    path = Path(path)
    root = _read(path)
    if "gateway" in root:
        raise ConfigError(
            f"{path}: the key gateway is read by nobody", hint="the gateway has its own file, gateway.yml"
        )
    blocks: list[Mapping[str, Any]] = []
    if isinstance(root.get("workers"), list):
        root["workers"] = [_split_entry(entry, blocks, path) for entry in root["workers"]]
    if isinstance(root.get("global"), Mapping):
        root["global"] = normalise(root["global"], where=f"{path}, global")
    try:
        keys = NodeFile.model_validate(root)
    except ValidationError as error:
        raise config_error(error, where=str(path), wanted=_wanted, suggest=_suggest) from None
    _check_names(keys, path)
    node = NodeConfig(path, keys, tuple(blocks))
    return NodeConfig(path, keys, node.blocks, (*_check_ports(node), *_overruled(node)))


def node_key_table() -> list[KeyRow]:
    """One row per key of the node file, those of a worker's entry included."""
    rows = []
    for leaf in leaves(NodeFile):
        required = leaf.key in ("model_repo", "workers")
        rows.append(KeyRow(leaf.key, leaf.type_text, None if required else show(leaf.default), None, leaf.meaning))
    for leaf in leaves(WorkerEntry):
        key = f"workers[].{leaf.key}"
        rows.append(KeyRow(key, leaf.type_text, None if leaf.key == "name" else "null", None, leaf.meaning))
    return rows


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such node file") from None
    except OSError as error:
        raise ConfigError(f"{path}: the node file cannot be read: {error.strerror}") from None
    try:
        root = load_yaml(data, what=str(path))
    except YamlError as error:
        raise ConfigError(error.message) from None
    if not isinstance(root, Mapping):
        found = "nothing" if root is None else f"a {type(root).__name__}"
        raise ConfigError(f"{path}: a node file is a mapping of keys; this one holds {found}")
    return {
        str(key): value
        for key, value in root.items()
        if not str(key).startswith("x-") and not (value is None and key in ("global", "models"))
    }


def _split_entry(entry: Any, blocks: list[Mapping[str, Any]], path: Path) -> Any:
    """The structural keys of a worker's entry; the rest of it goes to `blocks`."""
    if not isinstance(entry, Mapping):
        return entry
    structural = {key: value for key, value in entry.items() if key in WorkerEntry.model_fields}
    rest = {key: value for key, value in entry.items() if key not in structural}
    where = _where(path, structural.get("name"))
    own = normalise(rest, where=where)
    if "host" in structural and get(own, ("endpoints", "host")) is not None:
        raise ConfigError(f"{where}: host and endpoints.host are the same key, and both are there")
    blocks.append(own)
    return structural


def _forced(keys: NodeFile, position: int) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """What the node level says about a worker, whatever its block has: (path, value, origin)."""
    entry = keys.workers[position]
    yield ("model_dirs",), [keys.model_repo], "node"
    if entry.port is not None:
        yield ("endpoints", "grpc_port"), entry.port, "worker"
    elif keys.base_port is not None:
        yield ("endpoints", "grpc_port"), keys.base_port + position, "node"
    if keys.metrics_base_port is not None:
        yield ("endpoints", "http_port"), keys.metrics_base_port + position, "node"
    if entry.host is not None:
        yield ("endpoints", "host"), entry.host, "worker"
    yield ("runtime", "device_ordinal"), entry.gpu or 0, "worker" if entry.gpu is not None else "node"


def _check_names(keys: NodeFile, path: Path) -> None:
    names = [entry.name for entry in keys.workers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: two workers have the name {name!r}; wanted names that differ")
    for model, wanted in (keys.models or {}).items():
        for name in wanted:
            if name not in names:
                near = closest(name, names)
                raise ConfigError(
                    f"{path}: models.{model}: there is no worker {name!r}; the workers are {', '.join(names)}",
                    hint=f"did you mean {near}?" if near else None,
                )


def _check_ports(node: NodeConfig) -> list[str]:
    """Raise on a port that two listeners would share; say when workers share the default port of HTTP."""
    taken: dict[int, str] = {}
    default_http: list[str] = []
    for entry in node.keys.workers:
        if entry.port is None and node.keys.base_port is None:
            raise ConfigError(
                f"{node.path}: worker {entry.name!r} has no port and base_port is not set; wanted one of them"
            )
        endpoints = node.worker(entry.name).get("endpoints")
        if not isinstance(endpoints, Mapping):
            continue
        if "http_port" not in endpoints:
            default_http.append(entry.name)
        for key, face in (("grpc_port", "gRPC"), ("http_port", "HTTP")):
            port = endpoints.get(key)
            if not isinstance(port, int) or port == 0:
                continue
            here = f"{face} of worker {entry.name!r}"
            if port > 65535:
                raise ConfigError(f"{node.path}: {here} would get port {port}; wanted 0…65535")
            if port in taken:
                raise ConfigError(f"{node.path}: port {port} is wanted for {taken[port]} and for {here}")
            taken[port] = here
    if default_http and DEFAULT_HTTP_PORT in taken:
        raise ConfigError(
            f"{node.path}: port {DEFAULT_HTTP_PORT} is wanted for {taken[DEFAULT_HTTP_PORT]} and, as the default, for "
            f"HTTP of worker {default_http[0]!r}",
            hint="set metrics_base_port",
        )
    if len(default_http) > 1:
        names = ", ".join(default_http)
        return [f"the workers {names} share the default HTTP port {DEFAULT_HTTP_PORT}; set metrics_base_port"]
    return []


def _overruled(node: NodeConfig) -> Iterator[str]:
    """Values in `global` or an entry that the node level replaces."""
    for position, (entry, own) in enumerate(zip(node.keys.workers, node.blocks, strict=True)):
        written = merge(node.keys.global_, own)
        for path, value, _ in _forced(node.keys, position):
            before = get(written, path)
            if before is not None and before != value:
                key = ".".join(path)
                yield f"worker {entry.name}: {key}: {show(before)} is replaced by {show(value)} from the node level"


def _where(path: Path, name: Any) -> str:
    return f"{path}, worker {name!r}" if name is not None else f"{path}, a worker without a name"


def _wanted(path: tuple[str, ...]) -> tuple[str, str] | None:
    table = {leaf.path: leaf.type_text for leaf in leaves(NodeFile)}
    entry_types = {leaf.key: leaf.type_text for leaf in leaves(WorkerEntry)}
    if path[0] == "workers" and len(path) > 1:
        key = f"workers[{path[1]}]"
        return (
            (f"{key}.{path[2]}", entry_types[path[2]]) if len(path) > 2 and path[2] in entry_types else (key, "mapping")
        )
    if path[0] == "models" and len(path) > 1:
        return ".".join(path[:2]), "list of strings"
    return (path[0], table[path[:1]]) if path[:1] in table else None


def _suggest(path: Sequence[str]) -> str | None:
    return closest(path[-1], [leaf.key for leaf in leaves(NodeFile)])
