"""Which integers a JAX model takes: the rows of the tables that an input indexes, read from its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from rsrv.export.captures import inner_jaxprs

_PASSING = frozenset(
    {
        *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "expand_dims"),
        *("reshape", "rev", "select_n", "slice", "squeeze", "transpose"),
    }
)
"""Primitives whose result holds values of their operands. A negative index is made positive by a ``select_n``."""


def index_ranges(jaxpr: jex.Jaxpr, inputs: Mapping[int, str]) -> dict[str, tuple[int, int]]:
    """Per input that is looked up in a table: the integers from 0 to the last row of the smallest such table.

    Args:
        inputs: position among the arguments of `jaxpr` → name of the input.
    """
    ranges: dict[str, tuple[int, int]] = {}
    _follow(jaxpr, [inputs.get(position) for position in range(len(jaxpr.invars))], ranges)
    return ranges


def _follow(jaxpr: jex.Jaxpr, arguments: Sequence[str | None], ranges: dict[str, tuple[int, int]]) -> list[str | None]:
    """Walk through `jaxpr`, whose arguments hold the values of the named inputs; the same for its results."""
    holds: dict[Any, str | None] = dict(zip(jaxpr.invars, arguments, strict=True))

    def name_of(atom: Any) -> str | None:
        return None if isinstance(atom, jex.Literal) else holds.get(atom)

    for eqn in jaxpr.eqns:
        names = [name_of(atom) for atom in eqn.invars]
        bodies = [body.jaxpr for body in inner_jaxprs(eqn)]
        results: Sequence[str | None] = [None] * len(eqn.outvars)
        if eqn.primitive.name == "gather":
            _note(eqn, names[1], ranges)
        elif eqn.primitive.name in _PASSING:
            results = [next(filter(None, names), None)] * len(eqn.outvars)
        elif len(bodies) == 1 and len(bodies[0].invars) == len(names):
            inner = _follow(bodies[0], names, ranges)
            results = inner if len(inner) == len(eqn.outvars) else results
        holds.update(zip(eqn.outvars, results, strict=True))
    return [name_of(atom) for atom in jaxpr.outvars]


def _note(eqn: jex.JaxprEqn, name: str | None, ranges: dict[str, tuple[int, int]]) -> None:
    axes = eqn.params["dimension_numbers"].start_index_map
    if name is None or len(axes) != 1:
        return
    table: Any = eqn.invars[0].aval
    last = int(table.shape[axes[0]]) - eqn.params["slice_sizes"][axes[0]]
    ranges[name] = (0, min(last, ranges.get(name, (0, last))[1]))
