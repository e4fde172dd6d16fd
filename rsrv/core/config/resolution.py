"""From raw values to a checked configuration (flag > environment > file > default) that knows where each came from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from rsrv.core.config.blocks import flatten, normalise, put
from rsrv.core.config.environment import ALLOW_FAKE_VARIABLE, read_overrides
from rsrv.core.config.keys import find_leaf, leaves_of, section_of, show, split_key, suggest_key
from rsrv.core.config.node import WorkerBlock
from rsrv.core.config.problems import config_error
from rsrv.core.config.roots import WORKER, Root
from rsrv.core.config.sections import ServerConfig
from rsrv.core.errors import ConfigError

log = logging.getLogger(__name__)

C = TypeVar("C", bound=BaseModel)


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """A checked configuration with its history.

    Attributes:
        origins: for each dotted key ``default``, ``file``, ``node``, ``global``, ``worker``, ``env NAME`` or ``flag``.
        overrides: (variable, text) for each variable that was applied.
    """

    config: C
    origins: dict[str, str]
    overrides: list[tuple[str, str]]

    def rows(self) -> list[tuple[str, Any, str]]:
        """(dotted key, value, origin) of every key."""
        return [(key, value, self.origins.get(key, "default")) for key, value in values_of(self.config)]

    def log(self, what: str) -> None:
        """Tell once what is not the default, and the variables that were applied."""
        changed = " ".join(f"{key}={show(value)}" for key, value, origin in self.rows() if origin != "default")
        log.info("configuration %s %s", what, changed)
        if self.overrides:
            log.info("environment %s", " ".join(f"{variable}={text}" for variable, text in self.overrides))


@dataclass(frozen=True)
class ResolvedConfig(Resolved[ServerConfig]):
    """A worker's checked configuration with its history.

    Attributes:
        worker: name of the worker in its node file, or None.
        workers_on_node: how many workers the node file has, 1 without one.
    """

    worker: str | None = None
    workers_on_node: int = 1


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
    layers = Layers(WORKER, raw, where=block.where if block is not None else "configuration")
    if block is not None:
        layers.origins.update(block.origins)
    layers.lay(environ, flags)
    config = layers.check(ServerConfig)
    _check_surroundings(config, layers, environ or {})
    resolved = ResolvedConfig(
        config=config,
        origins=layers.origins_of(config),
        overrides=layers.overrides,
        worker=block.worker if block is not None else None,
        workers_on_node=block.workers_on_node if block is not None else 1,
    )
    resolved.log(f"worker={resolved.worker or '-'}")
    return resolved


class Layers:
    """Raw values of one root, each layer laid on the one before, with the origin of every one; then checked at once."""

    def __init__(self, root: Root, raw: Mapping[str, Any], *, where: str) -> None:
        self.root = root
        self.where = where
        self.tree = normalise(raw, where=where, root=root)
        self.origins = {".".join(path): "file" for path, _ in flatten(self.tree)}
        self.overrides: list[tuple[str, str]] = []

    def lay(self, environ: Mapping[str, str] | None, flags: Mapping[str, Any] | None) -> None:
        """Lay variables and then flags on top. Raises ConfigError for one that names no key or does not parse."""
        for override in read_overrides(environ, self.root) if environ is not None else []:
            self.put(override.leaf.path, override.value, f"env {override.variable}")
            self.overrides.append((override.variable, override.text))
        for key, value in (flags or {}).items():
            if find_leaf(key, self.root) is None:
                near = suggest_key(key.split("."), self.root)
                raise ConfigError(f"{self.where}: unknown key {key}", hint=f"did you mean {near}?" if near else None)
            self.put(split_key(key, self.root), value, "flag")

    def check(self, model: type[C]) -> C:
        """The configuration. Raises ConfigError that names every key that is wrong."""
        try:
            return model.model_validate(self.tree)
        except ValidationError as error:
            raise config_error(
                error,
                where=self.where,
                wanted=self._wanted,
                suggest=lambda path: suggest_key(path, self.root),
                origin=self.told_origin,
            ) from None

    def origins_of(self, config: BaseModel) -> dict[str, str]:
        """The origin of every key."""
        return {key: self._origin(key) for key, _ in values_of(config)}

    def told_origin(self, key: str) -> str | None:
        """An origin worth telling in an error: not the file that the text names already."""
        origin = self._origin(key)
        return None if origin in ("file", "default") else origin

    def put(self, path: tuple[str, ...], value: Any, origin: str) -> None:
        """Set one value, or one section as a whole."""
        put(self.tree, path, value)
        key = ".".join(path)
        for below in [name for name in self.origins if name.startswith(f"{key}.")]:
            del self.origins[below]
        self.origins[key] = origin

    def _origin(self, key: str) -> str:
        """The origin of `key`, of something in it, or of the nearest thing above it that somebody set as a whole."""
        origins = self.origins
        if key not in origins and (inside := next((name for name in origins if name.startswith(f"{key}.")), None)):
            return origins[inside]
        while key not in origins and "." in key:
            key = key.rpartition(".")[0]
        return origins.get(key, "default")

    def _wanted(self, path: tuple[str, ...]) -> tuple[str, str] | None:
        """The longest part of `path` that is a key; pydantic appends list indexes and names of union members."""
        for end in range(len(path), 0, -1):
            key = ".".join(path[:end])
            leaf = find_leaf(key, self.root)
            if leaf is not None and (leaf.path == path[:end] or len(leaf.path) == end):
                return key, leaf.type_text
        if any(leaf.path[: len(path)] == path for leaf in leaves_of(self.root).values()):
            return ".".join(path), "a mapping"
        return None


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


def _check_surroundings(config: ServerConfig, layers: Layers, environ: Mapping[str, str]) -> None:
    for directory in config.model_dirs:
        if not Path(directory).is_dir():
            source = layers.told_origin("model_dirs")
            raise ConfigError(
                f"{layers.where}: model_dirs: {directory!r} is not an existing directory"
                + (f" (from {source})" if source else "")
            )
    if config.runtime.backend == "fake" and environ.get(ALLOW_FAKE_VARIABLE) != "1":
        raise ConfigError(
            f"{layers.where}: runtime.backend: 'fake' runs no programs and is for tests only",
            hint=f"set {ALLOW_FAKE_VARIABLE}=1 if that is what you want",
        )
