"""Environment variables: ``RSRV_WORKER_<SECTION>_<FIELD>`` for each key, older names as aliases, and the few others."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rsrv.core.config.blocks import REMOVED
from rsrv.core.config.keys import ENV_PREFIX, Leaf, closest, worker_leaves
from rsrv.core.errors import ConfigError

ALIAS_PREFIX = "INFERENCE_SERVER_"
NAME_VARIABLE = "RSRV_WORKER_NAME"
THREADS_VARIABLE = "RSRV_WORKER_THREADS"
ALLOW_FAKE_VARIABLE = "RSRV_ALLOW_FAKE"

_OLDER_SUFFIXES = {"ENDPOINTS_PORT": "endpoints.grpc_port", "ENDPOINTS_METRICS_PORT": "endpoints.http_port"}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_NULL = {"null", "none", "off"}
_MAX_HOOK_THREADS = 16

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


def read_overrides(environ: Mapping[str, str]) -> list[Override]:
    """The keys that `environ` sets, in the order of the keys.

    Raises ConfigError for an unknown ``RSRV_WORKER_*`` name, a removed key, and a text that does not parse.
    """
    table = {leaf.env.removeprefix(ENV_PREFIX): leaf for leaf in worker_leaves().values() if leaf.env is not None}
    exceptions = {NAME_VARIABLE.removeprefix(ENV_PREFIX), THREADS_VARIABLE.removeprefix(ENV_PREFIX)}
    found: dict[str, Override] = {}
    for variable in sorted(environ):
        suffix = variable.removeprefix(ENV_PREFIX)
        if suffix == variable or suffix in exceptions:
            continue
        _refuse_removed(variable, suffix)
        if suffix not in table:
            near = closest(suffix, [*table, *exceptions])
            hint = f"did you mean {ENV_PREFIX}{near}?" if near else "`rsrv config schema --keys` lists the variables"
            raise ConfigError(f"the variable {variable} names no key", hint=hint)
        found[table[suffix].key] = _override(variable, environ[variable], table[suffix])
    aliases = _read_aliases(environ, table, found)
    if aliases:
        log.info("older_variables=%s use=%s", ",".join(aliases), ",".join(str(o.leaf.env) for o in aliases.values()))
    for variable, override in aliases.items():
        found.setdefault(override.leaf.key, override)
        if found[override.leaf.key] is not override:
            log.info("ignored=%s because=%s", variable, found[override.leaf.key].variable)
    return [found[key] for key in worker_leaves() if key in found]


def worker_name(environ: Mapping[str, str] | None = None) -> str | None:
    """The worker that this process is to serve, when the environment says so."""
    return _process_value(NAME_VARIABLE, "REACTANT_WORKER_NAME", environ) or None


def hook_pool_size(environ: Mapping[str, str] | None = None, *, workers: int = 1, cores: int | None = None) -> int:
    """How many threads run hooks: ``RSRV_WORKER_THREADS``, else the share of this worker among `workers`, 1…16."""
    text = _process_value(THREADS_VARIABLE, "REACTANT_WORKER_THREADS", environ)
    if text is not None:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise ConfigError(f"{THREADS_VARIABLE}={text!r} is not accepted; wanted integer, ≥ 1")
        return int(text)
    usable = cores if cores is not None else len(os.sched_getaffinity(0))
    return min(max(usable // max(workers, 1), 1), _MAX_HOOK_THREADS)


def parse_text(text: str, leaf: Leaf) -> Any:
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
        return [part for part in text.split(":") if part]
    if any(get_origin(kind) is dict for kind in kinds):
        return dict(_parse_pair(pair, text) for pair in text.split())
    if bool in kinds:
        return _parse_bool(text)
    if int in kinds:
        if not re.fullmatch(r"\s*[-+]?[0-9]{1,30}\s*", text):
            raise ValueError(text)
        return int(text)
    return float(text) if float in kinds else text


def _read_aliases(
    environ: Mapping[str, str], table: Mapping[str, Leaf], found: Mapping[str, Override]
) -> dict[str, Override]:
    aliases: dict[str, Override] = {}
    for variable in sorted(environ):
        suffix = variable.removeprefix(ALIAS_PREFIX)
        if suffix == variable:
            continue
        _refuse_removed(variable, suffix)
        leaf = table.get(suffix) or worker_leaves().get(_OLDER_SUFFIXES.get(suffix, ""))
        if leaf is None:
            log.warning("ignored=%s because=no_such_key", variable)
            continue
        # In the older system 0 meant that there is no metrics port.
        text = "off" if suffix == "ENDPOINTS_METRICS_PORT" and environ[variable].strip() == "0" else environ[variable]
        if leaf.key in found:
            aliases[variable] = Override(variable, text, leaf, None)  # ours wins, so this text need not even parse
        else:
            aliases[variable] = _override(variable, text, leaf)
    return aliases


def _override(variable: str, text: str, leaf: Leaf) -> Override:
    try:
        return Override(variable, text, leaf, parse_text(text, leaf))
    except ValueError:
        mapping = any(get_origin(kind) is dict for kind in _kinds(leaf.annotation))
        raise ConfigError(
            f"{variable}={text!r} is not accepted; wanted {leaf.type_text} ({leaf.key})",
            hint="a mapping is written name=value, with spaces between its entries" if mapping else None,
        ) from None


def _refuse_removed(variable: str, suffix: str) -> None:
    for path, instead in REMOVED.items():
        name = "_".join(path).upper()
        if suffix == name or (len(path) == 1 and suffix.startswith(f"{name}_")):
            raise ConfigError(
                f"the variable {variable} sets {'.'.join(path)}, which was removed", hint=f"use {instead}"
            )


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


def _process_value(name: str, alias: str, environ: Mapping[str, str] | None) -> str | None:
    values = os.environ if environ is None else environ
    if name in values:
        return values[name]
    if alias in values:
        log.info("older_variables=%s use=%s", alias, name)
    return values.get(alias)
