"""Parameters of a JAX model: any pytree, flattened to named weights and put together again inside a trace.

The order is depth first. Containers that keep the order in which they were written (dict, FrozenDict, nnx.State) are
walked in that order, everything else as JAX flattens it; JAX itself would sort the keys of a dict. The order depends on
nothing else, so it is the same in every process that builds the parameters in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.usercode import user_code


@dataclass(frozen=True, eq=False)
class Weight:
    """A named array of the model, still where the user has it (a JAX array is not copied here)."""

    name: str
    value: Any

    def numpy(self) -> np.ndarray:
        """The array in C order on the host; no copy where the host already has it so."""
        return np.ascontiguousarray(self.value).reshape(np.shape(self.value))

    def spec(self) -> jax.ShapeDtypeStruct:
        weak = bool(getattr(self.value, "weak_type", False))
        return abstract(np.shape(self.value), self.value.dtype, weak_type=weak)


@dataclass(frozen=True, eq=False)
class Params:
    """A flattened pytree: `weights` in program order; leaves that are no arrays stay constants of the trace."""

    weights: tuple[Weight, ...]
    random_keys: Mapping[int, str]
    """``id`` of each leaf that is a typed random key → its name. Keys cannot be weights."""
    _leaves: tuple[Any, ...]
    _positions: tuple[int, ...]
    _treedef: Any

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The pytree with `values` in place of the weights, in their order."""
        leaves = list(self._leaves)
        for position, value in zip(self._positions, values, strict=True):
            leaves[position] = value
        return jax.tree_util.tree_unflatten(self._treedef, leaves)


def flatten_params(params: Any) -> Params:
    """Flatten `params`. Raises ExportError for arrays that no bundle can hold, and for leaves without any array."""
    with user_code("flattening params", hint="the keys of a dict have to be of one kind: all strings or all integers"):
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = tuple(leaf for _, leaf in with_paths)
    names = _Names()
    weights, positions, keys = [], [], {}
    for index, boxes in _declared_order(params, itertools.count(), ()):
        path, leaf = with_paths[index]
        name = names.unique(".".join(_part(key) for depth, key in enumerate(path) if depth not in boxes) or "param")
        if is_random_key(leaf):
            keys[id(leaf)] = name
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            raise ExportError(f"weight {name!r} is a ShapeDtypeStruct, want an array: weights need values")
        elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            weights.append(_checked(name, leaf))
            positions.append(index)
    if leaves and not weights and not keys:
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise ExportError(
            f"params holds no array, only {', '.join(kinds)}",
            hint="make numbers arrays with np.asarray; a class of your own is a pytree after "
            "jax.tree_util.register_dataclass; a model without weights takes params={}",
        )
    return Params(tuple(weights), keys, leaves, tuple(positions), treedef)


def named_weights(weights: Sequence[tuple[str, Any]]) -> Params:
    """Weights that the caller named and ordered; `rebuild` gives them back as a list."""
    seen: set[str] = set()
    for name, value in weights:
        if not isinstance(name, str) or not name:
            raise ExportError(f"weight name {name!r} is not a non-empty string")
        if name in seen:
            raise ExportError(f"two weights are named {name!r}")
        if not isinstance(value, (jax.Array, np.ndarray, np.generic)) or is_random_key(value):
            raise ExportError(f"weight {name!r} is a {type(value).__name__}, want an array")
        seen.add(name)
    checked = tuple(_checked(name, value) for name, value in weights)
    values = [value for _, value in weights]
    return Params(checked, {}, tuple(values), tuple(range(len(values))), jax.tree_util.tree_structure(values))


def is_random_key(value: Any) -> bool:
    """True for a typed key (``jax.random.key``); a raw key is an ordinary array of two integers."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def abstract(shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    """An argument without a value; `weak_type` as JAX promotes it."""
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]


def _checked(name: str, value: Any) -> Weight:
    if isinstance(value, np.ma.MaskedArray):
        raise ExportError(
            f"weight {name!r} is a masked array, whose mask no bundle can hold", hint="use array.filled()"
        )
    try:
        DType.from_numpy(value.dtype)
    except TypeError as error:
        raise ExportError(f"weight {name!r}: {error}", hint="convert it, or split it into parts that fit") from None
    return Weight(name, value)


def _declared_order(
    node: Any, counter: Iterator[int], boxes: tuple[int, ...], depth: int = 0
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (position in JAX's flat order, depths of `boxes` on the path) of every leaf under `node`.

    A box is a node that only wraps one array and calls it ``value`` (nnx.Param, nn.Partitioned): it adds no name.
    """
    level = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
    if level is None:
        yield next(counter), boxes
        return
    children = list(level[0])
    if len(children) == 1 and getattr(children[0][0], "name", None) == "value":
        boxes = (*boxes, depth)
    numbered = [list(_declared_order(child, counter, boxes, depth + 1)) for _, child in children]
    for i in _written_order(node, [key for key, _ in children]):
        yield from numbered[i]


def _written_order(node: Any, keys: Sequence[Any]) -> Sequence[int]:
    if not isinstance(node, Mapping):
        return range(len(keys))
    index = {getattr(key, "key", None): i for i, key in enumerate(keys)}
    written = list(node)
    if len(index) != len(keys) or set(written) != set(index):
        return range(len(keys))
    return [index[key] for key in written]


def _part(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class _Names:
    """Hands out each name once: a repetition (key ``"a.b"`` beside ``{"a": {"b": …}}``) gets ``~1``, ``~2``, …"""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unique(self, name: str) -> str:
        candidates = itertools.chain([name], (f"{name}~{i}" for i in itertools.count(1)))
        free = next(candidate for candidate in candidates if candidate not in self._taken)
        self._taken.add(free)
        return free
