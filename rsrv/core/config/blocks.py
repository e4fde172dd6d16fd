"""Raw configuration blocks, before any type is checked: merging them; older names, removed and ``x-`` keys end here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rsrv.core.config.keys import section_of
from rsrv.core.config.roots import WORKER, Root
from rsrv.core.config.sections import Section
from rsrv.core.errors import ConfigError


def normalise(block: Mapping[Any, Any], *, where: str, root: Root = WORKER) -> dict[str, Any]:
    """A deep copy without ``x-`` keys and empty sections, older names replaced. `where` starts each error text."""
    result = _Copier(root, where).section(block, root.model, ())
    for section, names in root.renamed.items():
        found = result.get(section)
        if isinstance(found, dict):
            _rename(found, section, names, where)
    if root is WORKER:
        _settle_older_values(result)
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on it: mappings merge, everything else replaces."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def put(block: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set the value at `path`. Where a section holds something that is no mapping it stays, to be refused later."""
    for name in path[:-1]:
        below = block.setdefault(name, {})
        if not isinstance(below, dict):
            return
        block = below
    block[path[-1]] = value


def get(block: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The value at `path`, or None."""
    value: Any = block
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def flatten(block: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every (path, value) whose value is not a mapping with something in it."""
    for name, value in block.items():
        here = (*path, str(name))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, here)
        else:
            yield here, value


class _Copier:
    """Copies a block, key by key, and refuses what no later step could name."""

    def __init__(self, root: Root, where: str) -> None:
        self._root = root
        self._where = where

    def section(self, block: Mapping[Any, Any], model: type[Section], path: tuple[str, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in block.items():
            here = (*path, str(key))
            if not isinstance(key, str):
                raise ConfigError(f"{self._where}: {'.'.join(here)}: the key {key!r} is not text; write it in quotes")
            if key.startswith("x-"):
                continue
            self._refuse(here, value)
            field = model.model_fields.get(key)
            section, named = section_of(field) if field is not None else (None, False)
            if section is not None and value is None:
                continue
            if section is not None and isinstance(value, Mapping):
                value = self._named(value, section, here) if named else self.section(value, section, here)
            result[key] = _copied(value)
        return result

    def _named(self, block: Mapping[Any, Any], section: type[Section], path: tuple[str, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in block.items():
            if not isinstance(name, str):
                where = f"{self._where}: {'.'.join(path)}"
                raise ConfigError(f"{where}: the name {name!r} is not text; write it in quotes")
            if isinstance(value, Mapping):
                result[name] = self.section(value, section, (*path, name))
            else:
                result[name] = {} if value is None else value
        return result

    def _refuse(self, path: tuple[str, ...], value: Any) -> None:
        key = ".".join(path)
        if path in self._root.removed:
            raise ConfigError(f"{self._where}: the key {key} was removed", hint=f"use {self._root.removed[path]}")
        if path in self._root.not_yet and value is not None:
            raise ConfigError(f"{self._where}: {key}: {self._root.not_yet[path]}")


def _rename(block: dict[str, Any], section: str, names: Mapping[str, str], where: str) -> None:
    for old, new in names.items():
        if old in block:
            value = block.pop(old)
            if new in block:
                raise ConfigError(f"{where}: {section}.{old} is the older name of {section}.{new}, and both are there")
            # In the older system port 0 meant that there is no metrics port.
            block[new] = None if new == "http_port" and value == 0 and value is not False else value


def _settle_older_values(worker: dict[str, Any]) -> None:
    """`pin_to_gpu: true` is the older name of `residency: device`, which counts where that is not set."""
    models = get(worker, ("scheduler", "models"))
    for settings in models.values() if isinstance(models, dict) else ():
        if isinstance(settings, dict) and settings.get("pin_to_gpu") is True:
            del settings["pin_to_gpu"]
            settings.setdefault("residency", "device")


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
