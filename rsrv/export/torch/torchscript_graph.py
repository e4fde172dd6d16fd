"""The graph of a TorchScript module: its operators, and the lines of the model that they come from. No JAX here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_TRACED = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?P<function>\S+)$", re.MULTILINE)
_MARK = re.compile(r"\s*~+(\s*<--- HERE)?\s*")
_FOREIGN = ("/site-packages/", "/dist-packages/", "/torch/", "code/__torch__/")


@dataclass(frozen=True)
class Place:
    """A line of Python, maybe of another machine; `code` is empty when the module does not hold it."""

    file: str
    line: int
    function: str = "forward"
    code: str = ""

    @property
    def text(self) -> str:
        return f"{self.file}:{self.line}" + (f" (`{self.code}`)" if self.code else "")

    @property
    def frame(self) -> str:
        """As tracebacks write it."""
        return f'File "{self.file}", line {self.line}, in {self.function}' + (f"\n    {self.code}" if self.code else "")

    def among(self, count: int) -> Place:
        """The same, saying that it is the first of `count` lines with the same operator."""
        return Place(self.file, self.line, self.function, f"{self.code or self.function}, the first of {count} places")


@dataclass(frozen=True)
class Operator:
    """A node of a graph: ``aten::relu``, ``prim::If``, …"""

    kind: str
    place: Place | None


def operators(module: torch.nn.Module) -> list[Operator]:
    """All nodes of the inlined forward in their order, those of branches and loops after the node that holds them.

    Empty for a module without a forward.
    """
    script: Any = module
    if not script._c._has_method("forward"):
        return []
    return [Operator(str(node.kind()), _place(node)) for node in _nodes(script.inlined_graph)]


def places_in(text: str) -> Place | None:
    """The innermost line of the model that a traceback of TorchScript names."""
    head, _, original = text.partition("Traceback of TorchScript, original code")
    return _innermost(_scripted(original or head))


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _place(node: Any) -> Place | None:
    text = str(node.sourceRange())
    original, _, serialised = text.partition("\nSerialized ")
    found = _innermost(_scripted(original)) or _innermost(_traced(original))
    return found or _innermost(_scripted(serialised))


def _scripted(text: str) -> list[Place]:
    """Frames with the lines around them, the marked one being meant; innermost last."""
    found = []
    for match in _FRAME.finditer(text):
        below = text[match.end() :]
        until = below.find('File "')
        lines = (below if until < 0 else below[:until]).splitlines()
        marked = next((i for i, line in enumerate(lines) if _MARK.fullmatch(line)), 0)
        code = lines[marked - 1].strip() if marked else ""
        found.append(Place(match["file"], int(match["line"]), match["function"] or "forward", code))
    return found


def _traced(text: str) -> list[Place]:
    """Frames of a traced module, innermost first in the text and last here."""
    return [Place(match["file"], int(match["line"]), match["function"]) for match in _TRACED.finditer(text)][::-1]


def _innermost(places: list[Place]) -> Place | None:
    own = [place for place in places if not any(part in place.file for part in _FOREIGN)]
    found = own or places
    return found[-1] if found else None
