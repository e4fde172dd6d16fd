"""What a forward returns, brought to a flat list of named tensors (X-24)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rsrv.core.errors import ExportError

_CUT = "wrap the module in one that returns the tensors to serve as a flat tuple or dict"


def named_results(result: Any, names: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """The tensors of `result` by name, in order; None entries are left out.

    A mapping (a dict, a ModelOutput) brings its own names, which `names` may only reorder. For a tuple or list: `names`
    in order, without them the fields of a named tuple, else ``output`` or ``output_0``, ``output_1``, …
    Raises ExportError that names the offending position.
    """
    if isinstance(result, Mapping):
        found = {str(key): value for key, value in result.items() if value is not None}
        if names is not None:
            if sorted(names) != sorted(found):
                raise ExportError(
                    f"output_names is {list(names)}, but the model returns a dict with the keys {', '.join(found)}",
                    hint="with a dict output_names can only reorder; return a tuple to choose other names",
                )
            found = {name: found[name] for name in names}
    else:
        found = _listed(result, names)
    if not found:
        raise ExportError("the model returns no tensor")
    for position, (name, value) in enumerate(found.items()):
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"output {position} ({name!r}) is a {type(value).__name__}, want a tensor", hint=_CUT)
    return found


def _listed(result: Any, names: Sequence[str] | None) -> dict[str, Any]:
    items = list(result) if isinstance(result, (tuple, list)) else [result]
    kept = [i for i, item in enumerate(items) if item is not None]
    if names is None:
        # Of named tuples, and of what torch.topk and its like return.
        fields = getattr(type(result), "__match_args__", None)
        default = ["output"] if len(kept) == 1 else [f"output_{i}" for i in range(len(kept))]
        names = [fields[i] for i in kept] if fields else default
    if isinstance(names, str) or len(names) != len(kept):
        raise ExportError(f"output_names is {names!r}, but the model returns {len(kept)} outputs")
    if repeated := sorted({name for name in names if list(names).count(name) > 1}):
        raise ExportError(f"two outputs are named {repeated[0]!r}")
    return {name: items[i] for name, i in zip(names, kept, strict=True)}
