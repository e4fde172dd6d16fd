"""From raw values to a checked configuration (flag > environment > file > default) that knows where each came from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rsrv.core.config.blocks import flatten, normalise, put
from rsrv.core.config.environment import ALLOW_FAKE_VARIABLE, read_overrides
from rsrv.core.config.keys import find_leaf, section_of, show, split_key, suggest_key, worker_leaves
from rsrv.core.config.node import WorkerBlock
from rsrv.core.config.problems import config_error
from rsrv.core.config.sections import ServerConfig
from rsrv.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked configuration with its history.

    Attributes:
        origins: for each dotted key ``default``, ``file``, ``node``, ``global``, ``worker``, ``env NAME`` or ``flag``.
        overrides: (variable, text) for each variable that was applied.
        worker: name of the worker in its node file, or None.
        workers_on_node: how many workers the node file has, 1 without one.
    """

    config: ServerConfig
    origins: dict[str, str]
    overrides: list[tuple[str, str]]
    worker: str | None = None
    workers_on_node: int = 1

    def rows(self) -> list[tuple[str, Any, str]]:
        """(dotted key, value, origin) of every key."""
        return [(key, value, self.origins.get(key, "default")) for key, value in values_of(self.config)]


def resolve(
    raw: Mapping[str, Any],
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = os.environ,
) -> ResolvedConfig:
    """Check `raw` (a `WorkerBlock` of a node file, or any nested mapping) with variables and flags laid on top.

    `flags` maps dotted keys to values; a key that is there is set, also to None. `environ=None` reads no variables.
    Raises ConfigError that names every key that is wrong, its value, its origin and what was wanted.
    """
    block = raw if isinstance(raw, WorkerBlock) else None
    where = block.where if block is not None else "configuration"
    tree = normalise(raw, where=where)
    origins = {".".join(path): "file" for path, _ in flatten(tree)}
    if block is not None:
        origins.update(block.origins)
    overrides = read_overrides(environ) if environ is not None else []
    for override in overrides:
        put(tree, override.leaf.path, override.value)
        origins[override.leaf.key] = f"env {override.variable}"
    for key, value in (flags or {}).items():
        if find_leaf(key) is None:
            near = suggest_key(key.split("."))
            raise ConfigError(f"{where}: unknown key {key}", hint=f"did you mean {near}?" if near else None)
        put(tree, split_key(key), value)
        origins[key] = "flag"
    try:
        config = ServerConfig.model_validate(tree)
    except ValidationError as error:
        raise config_error(
            error, where=where, wanted=_wanted, suggest=suggest_key, origin=lambda key: _told_origin(origins, key)
        ) from None
    _check_surroundings(config, where, origins, environ or {})
    resolved = ResolvedConfig(
        config=config,
        origins={key: _origin(origins, key) for key, _ in values_of(config)},
        overrides=[(override.variable, override.text) for override in overrides],
        worker=block.worker if block is not None else None,
        workers_on_node=block.workers_on_node if block is not None else 1,
    )
    _log(resolved)
    return resolved


def values_of(config: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every key of a configuration, in the order of their declaration."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from values_of(value, (*path, name))
        elif isinstance(value, dict) and section_of(type(config).model_fields[name])[1]:
            for item, section in value.items():
                yield from values_of(section, (*path, name, item))
        else:
            yield ".".join((*path, name)), value


def _check_surroundings(
    config: ServerConfig, where: str, origins: Mapping[str, str], environ: Mapping[str, str]
) -> None:
    for directory in config.model_dirs:
        if not Path(directory).is_dir():
            source = _told_origin(origins, "model_dirs")
            raise ConfigError(
                f"{where}: model_dirs: {directory!r} is not an existing directory"
                + (f" (from {source})" if source else "")
            )
    if config.runtime.backend == "fake" and environ.get(ALLOW_FAKE_VARIABLE) != "1":
        raise ConfigError(
            f"{where}: runtime.backend: 'fake' runs no programs and is for tests only",
            hint=f"set {ALLOW_FAKE_VARIABLE}=1 if that is what you want",
        )


def _wanted(path: tuple[str, ...]) -> tuple[str, str] | None:
    """The longest part of `path` that is a key; pydantic appends list indexes and names of union members."""
    for end in range(len(path), 0, -1):
        key = ".".join(path[:end])
        leaf = find_leaf(key)
        if leaf is not None and (leaf.path == path[:end] or len(leaf.path) == end):
            return key, leaf.type_text
    dotted = ".".join(path)
    if any(leaf.path[: len(path)] == path for leaf in worker_leaves().values()):
        return dotted, "a mapping"
    return None


def _origin(origins: Mapping[str, str], key: str) -> str:
    """The origin of `key`, of something in it, or of the nearest thing above it that somebody set as a whole."""
    if key not in origins and (inside := next((name for name in origins if name.startswith(f"{key}.")), None)):
        return origins[inside]
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key, "default")


def _told_origin(origins: Mapping[str, str], key: str) -> str | None:
    """An origin worth telling in an error: not the file that the text names already."""
    origin = _origin(origins, key)
    return None if origin in ("file", "default") else origin


def _log(resolved: ResolvedConfig) -> None:
    changed = " ".join(f"{key}={show(value)}" for key, value, origin in resolved.rows() if origin != "default")
    log.info("configuration worker=%s %s", resolved.worker or "-", changed)
    if resolved.overrides:
        log.info("environment %s", " ".join(f"{variable}={text}" for variable, text in resolved.overrides))
