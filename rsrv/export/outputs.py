"""What a model returns: one array, a flat tuple or list, or a flat dict, brought to a list of named arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv.core.errors import ExportError

_WRAP = "wrap the function in one that returns only the arrays to serve"


def named_outputs(result: Any, names: Sequence[str] | None) -> list[tuple[str, jax.Array]]:
    """The arrays of `result` in program order with their names.

    A dict brings its own names, in the order of its keys; `names` may only reorder them. For a tuple or list `names`
    are given in order; without them the fields of a named tuple, else ``output`` or ``output_0``, ``output_1``, …
    Raises ExportError that names the offending position.
    """
    if isinstance(result, Mapping):
        pairs = _from_mapping(result, names)
    elif isinstance(result, (tuple, list)):
        pairs = _from_sequence(result, names)
    elif _is_array(result):
        pairs = _from_sequence([result], names)
    else:
        raise ExportError(
            f"the function returned a {type(result).__name__}, want an array, a flat tuple or list, or a flat dict",
            hint=_WRAP,
        )
    if not pairs:
        raise ExportError("the function returned no array")
    return [(name, _array(name, position, value)) for position, (name, value) in enumerate(pairs)]


def _from_mapping(result: Mapping[Any, Any], names: Sequence[str] | None) -> list[tuple[str, Any]]:
    for key in result:
        if not isinstance(key, str) or not key:
            raise ExportError(f"the function returned a dict with the key {key!r}, want output names")
    if names is None:
        return list(result.items())
    if sorted(names) != sorted(result):
        raise ExportError(
            f"output_names is {list(names)}, but the function returns a dict with the keys {', '.join(result)}",
            hint="with a dict output_names can only reorder; return a tuple to choose other names",
        )
    return [(name, result[name]) for name in names]


def _from_sequence(result: Sequence[Any], names: Sequence[str] | None) -> list[tuple[str, Any]]:
    if names is None:
        default = ["output"] if len(result) == 1 else [f"output_{i}" for i in range(len(result))]
        names = getattr(result, "_fields", default)
    if isinstance(names, str) or len(names) != len(result):
        raise ExportError(f"output_names is {names!r}, but the function returns {len(result)} outputs")
    if repeated := sorted({name for name in names if list(names).count(name) > 1}):
        raise ExportError(f"two outputs are named {repeated[0]!r}")
    return list(zip(names, result, strict=True))


def _array(name: str, position: int, value: Any) -> jax.Array:
    if not _is_array(value):
        raise ExportError(f"output {position} ({name!r}) is a {type(value).__name__}, want an array", hint=_WRAP)
    return jnp.asarray(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float))
