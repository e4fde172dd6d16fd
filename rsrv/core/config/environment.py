"""Environment variables: ``<PREFIX>_<SECTION>_<FIELD>`` for each key, older names as aliases, and the few others."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter

from rsrv.core.config.keys import Leaf, closest, leaves_of
from rsrv.core.config.roots import WORKER, Root
from rsrv.core.errors import ConfigError

NAME_VARIABLE = "RSRV_WORKER_NAME"
THREADS_VARIABLE = "RSRV_WORKER_THREADS"
ALLOW_FAKE_VARIABLE = "RSRV_ALLOW_FAKE"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_NULL = {"null", "none", "off"}
_MAX_HOOK_THREADS = 16
_JSON = object()
"""Stands for the type of a key whose variable holds JSON."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Override:
    """A key set by a variable; `text` is what the variable holds."""

    variable: str
    text: str
    leaf: Leaf
    value: Any


@dataclass(frozen=True, slots=True)
class ProcessVariable:
    """A variable that is not a key's override; `alias` is its older name."""

    name: str
    alias: str | None
    default: str
    meaning: str


def process_variables() -> list[ProcessVariable]:
    """The variables that do not follow the pattern of the keys."""
    return [
        ProcessVariable(NAME_VARIABLE, "REACTANT_WORKER_NAME", "unset", "Which worker of the node file to serve."),
        ProcessVariable(
            THREADS_VARIABLE,
            "REACTANT_WORKER_THREADS",
            "cores ÷ workers of the node, 1…16",
            "Threads that run hooks.",
        ),
        ProcessVariable(ALLOW_FAKE_VARIABLE, None, "unset", "1 permits `runtime.backend: fake`."),
    ]


def read_overrides(environ: Mapping[str, str], root: Root = WORKER) -> list[Override]:
    """The keys that `environ` sets, in the order of the keys; those of a worker unless `root` says otherwise.

    Raises ConfigError for an unknown name with the prefix, a key that there is no more or not yet, and a text that does
    not parse.
    """
    return _Reader(environ, root).read()


def worker_name(environ: Mapping[str, str] | None = None) -> str | None:
    """The worker that this process is to serve, when the environment says so."""
    return process_value(NAME_VARIABLE, "REACTANT_WORKER_NAME", environ) or None


def hook_pool_size(environ: Mapping[str, str] | None = None, *, workers: int = 1, cores: int | None = None) -> int:
    """How many threads run hooks: ``RSRV_WORKER_THREADS``, else the share of this worker among `workers`, 1…16."""
    text = process_value(THREADS_VARIABLE, "REACTANT_WORKER_THREADS", environ)
    if text is not None:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise ConfigError(f"{THREADS_VARIABLE}={text!r} is not accepted; wanted integer, ≥ 1")
        return int(text)
    usable = cores if cores is not None else len(os.sched_getaffinity(0))
    return min(max(usable // max(workers, 1), 1), _MAX_HOOK_THREADS)


def parse_text(text: str, leaf: Leaf, separator: str = ":") -> Any:
    """The value that a variable's text stands for. Raises ValueError when it stands for none of the key's type."""
    kinds = _kinds(leaf.annotation)
    word = text.strip().lower()
    # "off" is no value where there may be none, but False where the key is true or false.
    if NoneType in kinds and word in _NULL and not (bool in kinds and word in _FALSE):
        return None
    choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
    if text in choices:
        return text
    if any(get_origin(kind) is list for kind in kinds):
        parts = text.split(separator)
        # A blank entry is nothing between colons; where commas stand it may keep a place, which its key decides.
        return [part for part in parts if part] if separator == ":" or not text.strip() else parts
    if any(get_origin(kind) is dict for kind in kinds):
        return dict(_parse_pair(pair, text) for pair in text.split())
    if bool in kinds:
        return _parse_bool(text)
    if word in choices and (int in kinds or float in kinds):
        return word
    if int in kinds:
        if not re.fullmatch(r"\s*[-+]?[0-9]{1,30}\s*", text):
            raise ValueError(text)
        return int(text)
    return float(text) if float in kinds else text


class _Reader:
    """One look through the variables of a process for the keys of one root."""

    def __init__(self, environ: Mapping[str, str], root: Root) -> None:
        self._environ = environ
        self._root = root
        self._leaves = leaves_of(root)
        self._table = {
            leaf.env.removeprefix(root.env_prefix): leaf for leaf in self._leaves.values() if leaf.env is not None
        }
        for key in root.json_keys:
            path = tuple(key.split("."))
            variable = root.variable(path)
            leaf = Leaf(path, _JSON, {}, "", variable)
            self._table[variable.removeprefix(root.env_prefix)] = leaf

    def read(self) -> list[Override]:
        root, found = self._root, dict[str, Override]()
        for variable in sorted(self._environ):
            suffix = variable.removeprefix(root.env_prefix)
            if suffix == variable or suffix in root.other_variables or suffix in root.aliases:
                continue
            self._refuse(variable, suffix)
            if suffix not in self._table:
                near = closest(suffix, [*self._table, *root.other_variables])
                hint = f"did you mean {root.env_prefix}{near}?" if near else f"`{root.schema_command}` lists them"
                raise ConfigError(f"the variable {variable} names no key", hint=hint)
            override = self._override(variable, self._environ[variable], self._table[suffix])
            if override is not None:
                found[override.leaf.key] = override
        aliases = self._read_aliases(found)
        if aliases:
            instead = ",".join(str(o.leaf.env) for o in aliases.values())
            log.info("older_variables=%s use=%s", ",".join(aliases), instead)
        for variable, override in aliases.items():
            found.setdefault(override.leaf.key, override)
            if found[override.leaf.key] is not override:
                log.info("ignored=%s because=%s", variable, found[override.leaf.key].variable)
        order = [leaf.key for leaf in self._table.values()]
        return [found[key] for key in order if key in found]

    def _read_aliases(self, found: Mapping[str, Override]) -> dict[str, Override]:
        aliases: dict[str, Override] = {}
        root, prefixes = self._root, (self._root.env_prefix, self._root.alias_prefix)
        for variable in sorted(self._environ):
            prefix = next((prefix for prefix in prefixes if variable.startswith(prefix)), None)
            if prefix is None:
                continue
            suffix = variable.removeprefix(prefix)
            key = root.aliases.get(suffix)
            if key is None and (prefix == root.env_prefix or suffix in root.other_variables):
                continue
            self._refuse(variable, suffix)
            leaf = self._table.get(suffix) or self._leaves.get(key or root.older_variables.get(suffix, ""))
            if leaf is None:
                log.warning("ignored=%s because=no_such_key", variable)
                continue
            text = self._environ[variable]
            if suffix == "ENDPOINTS_METRICS_PORT" and text.strip() == "0":
                text = "off"  # in the older system 0 meant that there is no metrics port
            if leaf.key in found:
                aliases[variable] = Override(variable, text, leaf, None)  # ours wins: this text need not even parse
            elif (override := self._override(variable, text, leaf)) is not None:
                aliases[variable] = override
        return aliases

    def _override(self, variable: str, text: str, leaf: Leaf) -> Override | None:
        try:
            value = _parse_json(text) if leaf.annotation is _JSON else parse_text(text, leaf, self._root.separator)
            if leaf.key in self._root.lenient:
                value = TypeAdapter(leaf.annotation).validate_python(value)
        except ValueError:  # pydantic's error is one, too
            if leaf.key in self._root.lenient:
                log.warning("ignored=%s because=%r is not %s", variable, text, leaf.type_text)
                return None
            mapping = any(get_origin(kind) is dict for kind in _kinds(leaf.annotation))
            hint = "a mapping is written name=value, with spaces between its entries" if mapping else None
            wanted = "a mapping as JSON" if leaf.annotation is _JSON else leaf.type_text
            raise ConfigError(f"{variable}={text!r} is not accepted; wanted {wanted} ({leaf.key})", hint=hint) from None
        return Override(variable, text, leaf, value)

    def _refuse(self, variable: str, suffix: str) -> None:
        for path, instead in self._root.removed.items():
            name = "_".join(path).upper()
            if suffix == name or (len(path) == 1 and suffix.startswith(f"{name}_")):
                raise ConfigError(
                    f"the variable {variable} sets {'.'.join(path)}, which was removed", hint=f"use {instead}"
                )
        for path, text in self._root.not_yet.items():
            name = "_".join(path).upper()
            if suffix == name or suffix.startswith(f"{name}_"):
                raise ConfigError(f"the variable {variable} sets {'.'.join(path)}: {text}")


def _parse_json(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _parse_pair(pair: str, text: str) -> tuple[str, bool | int | float | str]:
    """``name=value``, as in ``XLA_FLAGS``; the value is what YAML would make of it."""
    name, equals, value = pair.removeprefix("--").partition("=")
    if not (name and equals):
        raise ValueError(text)
    if value in ("true", "false"):
        return name, value == "true"
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return name, number(value)
    return name, value


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(text)


def _kinds(annotation: Any) -> list[Any]:
    """The members of a type, without its constraints."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation]


def process_value(name: str, alias: str, environ: Mapping[str, str] | None) -> str | None:
    """The text of a variable, or of its older name, which is told; None when neither is set."""
    values = os.environ if environ is None else environ
    if name in values:
        return values[name]
    if alias in values:
        log.info("older_variables=%s use=%s", alias, name)
    return values.get(alias)
