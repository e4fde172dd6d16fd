"""What the pydantic models say about each key, as plain rows: for documentation, environment names and error texts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rsrv.core.config.roots import WORKER, Root
from rsrv.core.config.sections import Section, Wanted

ANY_NAME = "<name>"
"""Stands in a dotted key for a name that the user chooses."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key as documentation shows it; `default` is None for a required key, `env` for one without a variable."""

    key: str
    type: str
    default: str | None
    env: str | None
    meaning: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key that holds a value (not a section), with its type as declared."""

    path: tuple[str, ...]
    annotation: Any
    default: Any
    meaning: str
    env: str | None = None

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def type_text(self) -> str:
        return describe_type(self.annotation)


def leaves(model: type[Section], path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """All keys under `model`, in the order of their declaration."""
    for name, field in model.model_fields.items():
        here = (*path, field.alias or name)
        section, named = section_of(field)
        if section is not None:
            yield from leaves(section, (*here, ANY_NAME) if named else here)
        else:
            default = None if field.default is PydanticUndefined else field.default
            yield Leaf(here, _annotation(field), default, field.description or "")


def section_of(field: FieldInfo) -> tuple[type[Section] | None, bool]:
    """The section that a field holds, if it does, and whether it holds many of them under names."""
    annotation = field.annotation
    if get_origin(annotation) is dict:
        section = _as_section(get_args(annotation)[1])
        return section, section is not None
    return _as_section(annotation), False


@cache
def leaves_of(root: Root) -> dict[str, Leaf]:
    """The keys under a root by dotted name (``scheduler.models.<name>.max_batch_size``), with their variables."""
    return {
        leaf.key: leaf if ANY_NAME in leaf.path else replace(leaf, env=root.variable(leaf.path))
        for leaf in leaves(root.model)
    }


def find_leaf(key: str, root: Root = WORKER) -> Leaf | None:
    """The leaf for a dotted key in which names are real (``scheduler.models.resnet.max_batch_size``)."""
    table = leaves_of(root)
    if key in table:
        return table[key]
    for leaf in table.values():
        if ANY_NAME in leaf.path:
            at = leaf.path.index(ANY_NAME)
            head, tail = ".".join(leaf.path[:at]) + ".", "." + ".".join(leaf.path[at + 1 :])
            if key.startswith(head) and key.endswith(tail) and len(key) > len(head) + len(tail):
                return leaf
    return None


def split_key(key: str, root: Root = WORKER) -> tuple[str, ...]:
    """The path of a dotted key; a model's name in it may have dots itself."""
    leaf = find_leaf(key, root)
    if leaf is None or ANY_NAME not in leaf.path:
        return tuple(key.split("."))
    at = leaf.path.index(ANY_NAME)
    head, tail = leaf.path[:at], leaf.path[at + 1 :]
    name = key[len(".".join(head)) + 1 : len(key) - len(".".join(tail)) - 1]
    return (*head, name, *tail)


def key_table(root: Root = WORKER) -> list[KeyRow]:
    """One row per key of a configuration, by default a worker's."""
    return [
        KeyRow(
            leaf.key,
            leaf.type_text,
            None if leaf.key in root.required else show(leaf.default),
            leaf.env,
            leaf.meaning,
        )
        for leaf in leaves_of(root).values()
    ]


def show(value: Any) -> str:
    """A value as YAML would have it on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that somebody who typed `word` most likely meant, or None."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def suggest_key(path: Sequence[str], root: Root = WORKER) -> str | None:
    """The known dotted key nearest to an unknown one: one misspelt in place, or right but in another section."""
    known = [leaf.path for leaf in leaves_of(root).values()]
    same_name = [leaf for leaf in known if leaf[-1] == path[-1]]
    if same_name:
        return ".".join(same_name[0])
    above = tuple(path[:-1])
    siblings = {leaf[len(above)] for leaf in known if len(leaf) > len(above) and _lies_in(leaf, above)}
    near = closest(path[-1], siblings)
    return ".".join((*above, near)) if near is not None else closest(".".join(path), leaves_of(root))


def describe_type(annotation: Any) -> str:
    """A type and its range in words: ``integer, 0…65535 or null``."""
    metadata: list[Any] = []
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata += more
    for entry in metadata:
        if isinstance(entry, Wanted):
            return entry.text
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        parts = [describe_type(part) for part in get_args(annotation) if part is not NoneType]
        return " or ".join([*parts, "null"] if NoneType in get_args(annotation) else parts)
    if origin is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin is list:
        item = get_args(annotation)[0]
        return f"list of {describe_type(item)}s" if get_args(item)[:1] == (str,) else "list"
    if origin is dict:
        return "mapping"
    words = {bool: "true or false", int: "integer", float: "number", str: "string"}.get(annotation, "mapping")
    bounds = _bounds(metadata)
    return f"{words}, {bounds}" if bounds else words


def _lies_in(leaf: tuple[str, ...], above: tuple[str, ...]) -> bool:
    return all(known in (given, ANY_NAME) for known, given in zip(leaf, above, strict=False))


def _annotation(field: FieldInfo) -> Any:
    """The declared type with its constraints, which pydantic has moved to `metadata`."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _as_section(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _bounds(metadata: Iterable[Any]) -> str:
    flat: list[Any] = []
    for entry in metadata:
        flat += entry.metadata if isinstance(entry, FieldInfo) else [entry]
    found = {name: getattr(entry, name) for entry in flat for name in ("ge", "gt", "le", "lt") if hasattr(entry, name)}
    if "ge" in found and "le" in found:
        return f"{found['ge']}…{found['le']}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return " and ".join(f"{signs[name]} {found[name]}" for name in ("gt", "ge", "lt", "le") if name in found)
