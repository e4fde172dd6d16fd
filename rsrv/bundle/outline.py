"""Finds keys in the text of a manifest: their lines, for messages, and the lines of one block, to write it anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from rsrv.bundle.problems import KeyPath

_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def key_lines(text: str) -> dict[KeyPath, int]:
    """The 1-based line of every key and list item of a YAML text, by its path; as far as the text parses."""
    lines: dict[KeyPath, int] = {}
    try:
        for path, event in _located(text):
            lines.setdefault(path, event.start_mark.line + 1)
    except yaml.YAMLError:
        pass
    return lines


def replace_block(text: str, key: str, block: str, *, before: str) -> str | None:
    """`text` with the lines of the top-level `key` replaced by `block`, all other bytes kept.

    A missing key is inserted in front of the first top-level key that starts with `before`, else at the end. None when
    the root is in flow style (``{…}``), which has no lines to replace, or libyaml reads less than we do.
    """
    lines = text.splitlines(keepends=True)
    first, last = len(lines), -1
    try:
        located = list(_located(text))
    except yaml.YAMLError:
        return None
    for path, event in located:
        if not path:
            if isinstance(event, yaml.MappingStartEvent) and event.flow_style:
                return None
        elif path[0] == key:
            first, last = min(first, event.start_mark.line), max(last, _last_line(event))
    if last < 0:
        starts = [
            line - 1 for path, line in key_lines(text).items() if len(path) == 1 and str(path[0]).startswith(before)
        ]
        markers = [i for i, line in enumerate(lines) if line.rstrip() == "..."]
        first = min([*starts, *markers, len(lines)])
        last = first - 1
    head = lines[:first]
    if head and not head[-1].endswith("\n"):
        head[-1] += "\n"
    return "".join(head) + block + "".join(lines[last + 1 :])


def _last_line(event: Any) -> int:
    """The 0-based line on which the text of `event` ends; -1 when it has none, as the end of a block collection."""
    start, end = event.start_mark, event.end_mark
    if end.index == start.index:
        return -1
    # A block scalar ends where the next line begins.
    return int(end.line) - int(end.column == 0 and end.line > start.line)


def _located(text: str) -> Iterator[tuple[KeyPath, Any]]:
    """The events of all nodes of a YAML text, each with the path of its node; a key has the path of its value.

    Ends early at a key that is no scalar: such a text is refused elsewhere.
    """
    stack: list[
        str | int | None
    ] = []  # per open collection: the index of a list, the key of a mapping, None before a key
    for event in yaml.parse(text, Loader=_PARSER):
        if isinstance(event, yaml.CollectionEndEvent):
            stack.pop()
            yield _path(stack), event
            _advance(stack)
        elif not isinstance(event, yaml.NodeEvent):
            continue
        elif stack and stack[-1] is None:
            if not isinstance(event, yaml.ScalarEvent):
                return
            stack[-1] = str(event.value)
            yield _path(stack), event
        else:
            yield _path(stack), event
            if isinstance(event, yaml.MappingStartEvent):
                stack.append(None)
            elif isinstance(event, yaml.SequenceStartEvent):
                stack.append(0)
            else:
                _advance(stack)


def _path(stack: list[str | int | None]) -> KeyPath:
    return tuple(position for position in stack if position is not None)


def _advance(stack: list[str | int | None]) -> None:
    """Behind a complete value: the next item of a list, or the next key of a mapping."""
    if stack:
        stack[-1] = stack[-1] + 1 if isinstance(stack[-1], int) else None
