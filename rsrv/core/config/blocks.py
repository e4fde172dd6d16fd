"""Raw configuration blocks, before any type is checked: merging them; older names, removed and ``x-`` keys end here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rsrv.core.config.keys import section_of
from rsrv.core.config.sections import Section, ServerConfig
from rsrv.core.errors import ConfigError

REMOVED = {
    ("batch_policy",): "scheduler.models.<name>.max_batch_size",
    ("runtime", "residency_mode"): "model_control_mode",
}
"""Keys of the older system that no longer exist, with what replaces each."""

_OLDER_PORTS = {"port": "grpc_port", "metrics_port": "http_port"}


def normalise(block: Mapping[Any, Any], *, where: str) -> dict[str, Any]:
    """A deep copy without ``x-`` keys and empty sections, older names replaced. `where` starts each error text."""
    result = _normalise(block, ServerConfig, (), where)
    endpoints = result.get("endpoints")
    if isinstance(endpoints, dict):
        _rename_ports(endpoints, where)
    models = get(result, ("scheduler", "models"))
    for settings in models.values() if isinstance(models, dict) else ():
        # The older name of `residency: device`, which counts where that is not set.
        if isinstance(settings, dict) and settings.get("pin_to_gpu") is True:
            del settings["pin_to_gpu"]
            settings.setdefault("residency", "device")
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


def _normalise(block: Mapping[Any, Any], model: type[Section], path: tuple[str, ...], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in block.items():
        here = (*path, str(key))
        if not isinstance(key, str):
            raise ConfigError(f"{where}: {'.'.join(here)}: the key {key!r} is not text; write it in quotes")
        if key.startswith("x-"):
            continue
        if here in REMOVED:
            raise ConfigError(f"{where}: the key {'.'.join(here)} was removed", hint=f"use {REMOVED[here]}")
        field = model.model_fields.get(key)
        section, named = section_of(field) if field is not None else (None, False)
        if section is not None and value is None:
            continue
        if section is not None and isinstance(value, Mapping):
            value = _named(value, section, here, where) if named else _normalise(value, section, here, where)
        result[key] = _copied(value)
    return result


def _named(block: Mapping[Any, Any], section: type[Section], path: tuple[str, ...], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in block.items():
        if not isinstance(name, str):
            raise ConfigError(f"{where}: {'.'.join(path)}: the name {name!r} is not text; write it in quotes")
        if isinstance(value, Mapping):
            result[name] = _normalise(value, section, (*path, name), where)
        else:
            result[name] = {} if value is None else value
    return result


def _rename_ports(endpoints: dict[str, Any], where: str) -> None:
    for old, new in _OLDER_PORTS.items():
        if old in endpoints:
            value = endpoints.pop(old)
            if new in endpoints:
                raise ConfigError(f"{where}: endpoints.{old} is the older name of endpoints.{new}, and both are there")
            # In the older system 0 meant that there is no metrics port.
            endpoints[new] = None if new == "http_port" and value == 0 and value is not False else value


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
