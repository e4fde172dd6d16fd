"""Reading YAML that people (or strangers) wrote: plain data only, bounded in size, depth and aliases, no surprises.

It says what a text means, never what it ought to say: schemas belong to the callers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from rsrv.core.errors import Code, RsrvError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_ALIASES = 256

_SURROGATE = re.compile("[\ud800-\udfff]")
_PREFIX = "tag:yaml.org,2002:"


class YamlError(RsrvError):
    """A text is not the YAML that we accept; `line` and `column` are 1-based, or None when no place is known."""

    code, reason = Code.INVALID_ARGUMENT, "yaml"

    def __init__(self, message: str, *, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


def load_yaml(text: str | bytes, *, what: str, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES) -> Any:
    """The one document in `text` as dicts, lists, strings, numbers, booleans and None; `what` names it in errors.

    Only ``true`` and ``false`` (also ``True``, ``TRUE``, …) are booleans: ``no``, ``on`` and ``y`` stay strings, and so
    do dates. Refused with `YamlError`: syntax errors, more than one document, duplicate keys, merge keys, tags other
    than the plain ones, texts above `max_bytes`, more than 256 aliases, and, once aliases are written out, nesting
    deeper than 32 or more than `max_nodes` keys and values, of which the parser, Python, reads some 15 000 a second. An
    empty text gives None.
    """
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise YamlError(f"{what}: {size} bytes; at most {max_bytes} are read")
    try:
        loader = _Loader(text, what, max_nodes)
    except (yaml.YAMLError, UnicodeError) as error:
        raise YamlError(f"{what}: not readable as YAML text: {_first_line(error)}") from None
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ": ".join(filter(None, (error.context, error.problem))) or "not valid YAML"
        raise _error_at(what, problem, mark) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise YamlError(f"{what}: not readable as YAML text: {_first_line(error)}") from None
    except ValueError as error:  # for instance an integer literal with more digits than Python converts
        raise YamlError(f"{what}: {_first_line(error)}") from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """The safe loader of PyYAML, narrower: its own resolver table, limits checked while nodes are composed."""

    def __init__(self, text: str | bytes, what: str, max_nodes: int) -> None:
        super().__init__(text)
        self.what = what
        self._max_nodes = max_nodes
        self._nodes = 0
        self._depth = 0
        self._aliases = 0
        self._extent: dict[int, tuple[int, int]] = {}  # node id -> (values, depth) with aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self._aliases += 1
            if self._aliases > MAX_ALIASES:
                raise _error_at(self.what, f"more than {MAX_ALIASES} aliases", event.start_mark)
        self._nodes += 1
        if self._nodes > self._max_nodes:  # before a collection of a million items has been read to its end
            raise _error_at(self.what, f"more than {self._max_nodes} values", event.start_mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _error_at(self.what, f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        try:
            node = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._measure(node)
        if isinstance(event, yaml.ScalarEvent) and _SURROGATE.search(event.value):  # "\ud800"; libyaml refuses it, too
            raise _error_at(self.what, "half of a surrogate pair is not a character", event.start_mark)
        return node

    def _measure(self, node: yaml.Node) -> None:
        """Bound what a reader of the data would walk, which treats an alias like the value that it stands for."""
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        values, depth = 1, 0
        for child in children:
            if id(child) not in self._extent:  # an alias to a collection that is still open
                raise _error_at(self.what, "a value contains itself through an alias", child.start_mark)
            child_values, child_depth = self._extent[id(child)]
            values += child_values
            depth = max(depth, child_depth)
        if values > self._max_nodes:
            problem = f"more than {self._max_nodes} values once aliases are expanded"
            raise _error_at(self.what, problem, node.start_mark)
        if depth >= MAX_DEPTH:
            raise _error_at(self.what, f"nested deeper than {MAX_DEPTH} levels", node.start_mark)
        self._extent[id(node)] = values, depth + 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _error_at(self.what, "a mapping is wanted here", node.start_mark)
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if key_node.value == "<<" and key_node.style is None:
                raise _error_at(self.what, "merge keys (<<) are not accepted", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _error_at(self.what, "a list or mapping cannot be a key", key_node.start_mark)
            if key in mapping:
                raise _error_at(self.what, f"the key {key!r} is there twice", key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping

    def construct_refused(self, node: yaml.Node) -> Any:
        raise _error_at(self.what, f"the tag {_tag_name(node.tag)} is not accepted", node.start_mark)


def _error_at(what: str, problem: str, mark: Any) -> YamlError:
    if mark is None:
        return YamlError(f"{what}: {problem}")
    return YamlError(
        f"{what}: line {mark.line + 1}, column {mark.column + 1}: {problem}", line=mark.line + 1, column=mark.column + 1
    )


def _tag_name(tag: str | None) -> str:
    name = tag or "!"
    return f"!!{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else name


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


_RESOLVERS = (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+|0b[01_]+", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*)?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?[0-9][0-9_]*(?:\.|\.?[eE][-+]?[0-9]+)", "-+0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("null", "~|null|Null|NULL", "~nN"),
    ("null", "", ("",)),
)
"""What a plain scalar may mean. PyYAML's own table has dates, merge keys, ``yes``/``no`` and base 60 as well."""


def _implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _RESOLVERS:
        for character in first_characters:
            table.setdefault(character, []).append((_PREFIX + tag, re.compile(rf"(?:{pattern})\Z")))
    return table


_Loader.yaml_implicit_resolvers = _implicit_resolvers()
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is not None and tag.rsplit(":", 1)[-1] in {"null", "bool", "int", "float", "str", "seq", "map"}
}
_Loader.add_constructor(None, _Loader.construct_refused)
