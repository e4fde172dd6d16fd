"""``python -m rsrv.cli.reference``: the command reference in Markdown, made from the same tree that parses commands.

``docs/cli.md`` is its output; a test compares the two.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rsrv.cli import output
from rsrv.cli.main import command

_HEADER = """# Command reference

Made by `python docs/generate.py`; do not edit by hand.

Results go to stdout, everything else to stderr. `--json` works before any command, as in `rsrv --json models`.

| exit code | meaning |
|---|---|
| 0 | done; also after a graceful stop of a server |
| 1 | the check or the call failed |
| 2 | wrong usage, or a path that is not there |
| 3 | the server could not be reached |
| 78 | bad configuration, or a port that is taken |
| 130, 143 | forced to stop by a second signal |
"""
_KINDS = {str: "text", int: "integer", float: "number", Path: "path"}
_COMPLETION = ("install_completion", "show_completion")


def markdown() -> str:
    """The whole reference: one section for each command, groups before their members."""
    sections = [_section(path, node) for path, node in _walk("rsrv", command())]
    return "\n".join([_HEADER, *sections])


def _walk(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    yield path, node
    for name, child in getattr(node, "commands", {}).items():
        if not child.hidden:
            yield from _walk(f"{path} {name}", child)


def _section(path: str, node: Any) -> str:
    lines = [f"## {path}", "", *_prose(node.help or "")]
    arguments = [p for p in node.params if p.param_type_name == "argument" and not p.hidden]
    options = [p for p in node.params if p.param_type_name == "option" and not p.hidden and p.name not in _COMPLETION]
    if not hasattr(node, "commands"):
        lines += ["", "```", " ".join([path, *(_usage(argument) for argument in arguments), "[OPTIONS]"]), "```"]
    annotations = typing.get_type_hints(inspect.unwrap(node.callback)) if node.callback else {}
    rows = [(f"`{_cell(_name(argument))}`", argument) for argument in arguments]
    rows += [(", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts)), option) for option in options]
    if rows:
        lines += ["", "| parameter | value | default | meaning |", "|---|---|---|---|"]
    for name, param in rows:
        cells = (name, _value(param, annotations[param.name]), _default(param), _cell(param.help or ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _prose(text: str) -> Iterator[str]:
    """A docstring as Markdown: paragraphs as they are, the block after ``Example:`` as code."""
    in_code = False
    for line in inspect.cleandoc(text.replace("\b\n", "")).splitlines():
        indented = line.startswith("    ")
        if indented != in_code and line:
            yield "```" if in_code else ""
            if not in_code:
                yield "```sh"
            in_code = indented
        yield line.removeprefix("    ") if in_code else line
    if in_code:
        yield "```"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("[].…")


def _usage(argument: Any) -> str:
    name = _name(argument) + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _value(param: Any, annotation: Any) -> str:
    if getattr(param, "is_flag", False):
        return "flag"
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and len(kinds) == 1:
        return _value(param, kinds[0])
    if typing.get_origin(annotation) is list:
        return _value(param, kinds[0]) + ", repeatable"
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{kind}`" for kind in kinds)
    return _KINDS.get(annotation) or str(annotation.__name__)


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.default in (None, False) or callable(param.default):
        return ""
    return "on" if param.default is True else f"`{param.default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    output.data(markdown().rstrip())
