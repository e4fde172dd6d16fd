"""What pydantic found wrong as one ConfigError: each key, its value, its origin and what was wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from rsrv.core.errors import ConfigError

WantedText = Callable[[tuple[str, ...]], tuple[str, str] | None]
"""Maps a path as pydantic reports it to the dotted key that it lies in and the text of that key's type."""


def config_error(
    error: ValidationError,
    *,
    where: str,
    wanted: WantedText,
    suggest: Callable[[Sequence[str]], str | None],
    origin: Callable[[str], str | None] = lambda key: None,
) -> ConfigError:
    """All problems of `error` in one text, one a line when there are several; one problem for one key."""
    problems: dict[str, str] = {}
    hints: list[str] = []
    for entry in error.errors(include_url=False):
        path = tuple(str(part) for part in entry["loc"])
        key, text = _problem(entry, path, wanted)
        if key in problems:
            continue
        source = origin(key)
        problems[key] = f"{text} (from {source})" if source else text
        if entry["type"] == "extra_forbidden" and (near := suggest(path)) is not None:
            hints.append(f"did you mean {near}?")
    lines = list(problems.values())
    message = f"{where}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{where}: {len(lines)} problems", *lines])
    return ConfigError(message, hint=" ".join(hints) or None)


def _problem(entry: Any, path: tuple[str, ...], wanted: WantedText) -> tuple[str, str]:
    kind, value = entry["type"], entry["input"]
    dotted = ".".join(path)
    if kind == "extra_forbidden":
        return dotted, f"unknown key {dotted}"
    found = wanted(path)
    key, type_text = found if found is not None else (dotted, "another type")
    if kind == "missing":
        return key, f"{key} is missing; wanted {type_text}"
    if kind == "value_error":
        text = str(entry["ctx"]["error"])
        return key, f"{key}: {text}" if key else text  # of the whole configuration
    return key, f"{key}: {_shortened(value)} is not accepted; wanted {type_text}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
