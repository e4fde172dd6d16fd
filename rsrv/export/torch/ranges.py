"""Which integers a model takes: the rows of the tables that an input indexes."""

from __future__ import annotations

from typing import Any

import torch

aten: Any = torch.ops.aten

_TABLES = {aten.embedding.default: (0, 1, 0), aten._embedding_bag.default: (0, 1, 0)}
"""Operator → (table, indices, axis of the table)."""
_PASSING = frozenset(
    {
        aten.clone.default,
        aten.expand.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.dims,
        aten._to_copy.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.permute.default,
        aten._unsafe_view.default,
        aten.index_select.default,
    }
)
"""Operators whose result holds nothing but values of their first argument."""


def index_ranges(module: torch.fx.GraphModule, inputs: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Per input that is looked up in a table: the integers from 0 to the last row of the smallest such table.

    `inputs`: name of a placeholder → name of the input.
    """
    ranges: dict[str, tuple[int, int]] = {}
    for node in module.graph.nodes:
        for table, indices, axis in _lookups(node):
            source = _source(indices)
            name = inputs.get(source.name) if source is not None else None
            rows = table.meta["val"].shape[axis]
            if name is not None and isinstance(rows, int):
                ranges[name] = (0, min(rows - 1, ranges.get(name, (0, rows))[1]))
    return ranges


def _lookups(node: torch.fx.Node) -> list[tuple[torch.fx.Node, torch.fx.Node, int]]:
    """(table, indices, axis of the table) for each lookup that `node` makes."""
    args: Any = node.args
    if node.target in _TABLES:
        table, indices, axis = _TABLES[node.target]
        return [(args[table], args[indices], axis)]
    if node.target in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return [(args[0], index, axis) for axis, index in enumerate(args[1]) if index is not None]
    if node.target in (aten.gather.default, aten.index_select.default, aten.scatter.src, aten.scatter.value):
        return [(args[0], args[2], args[1])]
    return []


def _source(node: torch.fx.Node | None) -> torch.fx.Node | None:
    while node is not None and node.op == "call_function" and node.target in _PASSING:
        first = node.args[0]
        node = first if isinstance(first, torch.fx.Node) else None
    return node if node is not None and node.op == "placeholder" else None
