"""What a program cannot do, said once: the operator, the line of the model that asks for it, and a way out."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from rsrv.core.errors import ExportError

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s*(?P<code>[^\n]*))?')
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]), "<")

CUT = "end the model before it and do the rest in a hook or in a meta model"
MISSING = f"express it with other operators, or {CUT}"
_MASK = f"use torch.where or multiply with the mask, which keeps the shape; or {CUT}"
_LOOP = "write the loop in Python over a size that is fixed, which unrolls it, or use torch.while_loop"
_HINTS = {
    "aten.nonzero": f"torch.where(condition, a, b) and masks keep their shape; or {CUT}",
    "aten.masked_select": _MASK,
    "aten.index": _MASK,
    "aten.index_put": _MASK,
    "aten.item": f"compute with the tensor itself instead of .item(); or {CUT}",
    "aten.repeat_interleave": f"repeat by a number that does not depend on values; or {CUT}",
    "scan": _LOOP,
    "associative_scan": _LOOP,
    "map_impl": f"torch.vmap does the same at once; or {_LOOP}",
    "torchvision.nms": "end the model before non-maximum suppression, which a hook (postprocess) or meta model can do",
}
_RANDOM = "put the module in evaluation mode, or make the random numbers an input of the model"
BRANCH = (
    "torch.where(condition, a, b) or torch.cond keep both branches in the program; a size can be an upper bound with a "
    "mask; or cut the model there and join the parts in a meta model"
)


def operator_name(target: Any) -> str:
    """``aten.nonzero`` for ``aten.nonzero.default``; other overloads keep their names."""
    return str(target).removesuffix(".default")


def source_line(node: torch.fx.Node) -> str | None:
    """``model.py:12 (`x.nonzero()`)``: the innermost line of the user's code that made `node`, else of a library."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return None
    frame = ([one for one in frames if not one["file"].startswith(_INSTALLED)] or frames)[-1]
    return _line(frame["file"], int(frame["line"]), frame["code"])


def refuse(node: torch.fx.Node, why: str, hint: str | None = None) -> ExportError:
    """An error about `node`; the hint is that of its operator unless given."""
    line = source_line(node)
    name = operator_name(node.target)
    return ExportError(f"{name}{f' at {line}' if line else ''}: {why}", hint=hint or hint_for(name))


def hint_for(name: str) -> str | None:
    """The way around the operator `name` that this module knows."""
    return next(
        (hint for known, hint in _HINTS.items() if name == known or name.startswith((f"{known}.", f"{known}_"))), None
    )


def check_graph(graph_module: torch.fx.GraphModule) -> None:
    """Refuse results whose size depends on values, and random numbers: no program can have them."""
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function":
                    _check_node(node)


def _check_node(node: torch.fx.Node) -> None:
    if _draws(node):
        raise refuse(node, "draws random numbers; a bundle's answers depend on its inputs alone", hint=_RANDOM)
    if not any(isinstance(value, torch.Tensor) and free_unbacked_symbols(value) for value in _values(node)):
        return
    made = _origin(node)
    masked = made.target is torch.ops.aten.index.Tensor
    what = "indexing with a boolean mask gives a result whose size" if masked else "the size of its result"
    raise refuse(
        made,
        f"{what} depends on values, and a program has fixed shapes",
        hint=hint_for(operator_name(made.target)) or CUT,
    )


def _values(node: torch.fx.Node) -> Iterator[Any]:
    value = node.meta.get("val")
    yield from value if isinstance(value, (tuple, list)) else (value,)


def _origin(node: torch.fx.Node) -> torch.fx.Node:
    """The first operator of the graph whose result has a size, or is a number, that depends on values."""
    for earlier in node.graph.nodes:
        if earlier.op == "call_function" and any(
            isinstance(value, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(value)
            for value in _values(earlier)
        ):
            found: torch.fx.Node = earlier
            return found
    return node


def _draws(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    values = {argument.name: argument.default_value for argument in target._schema.arguments}
    values.update(zip(values, node.args, strict=False))
    values.update(node.kwargs)
    if "dropout_p" in values:  # attention
        return bool(values["dropout_p"])
    if "dropout" in values:  # recurrent layers
        return bool(values["dropout"]) and bool(values.get("train"))
    switch = next((values[name] for name in ("train", "training") if name in values), True)
    return bool(switch)


_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "PendingUnbackedSymbolNotFound", "DataDependentOutputException")


def explain(error: BaseException) -> ExportError | None:
    """What torch.export said, when it is about branches or sizes that depend on values; else None."""
    if not is_data_dependent(error):
        return None
    line = next((line for cause in _chain(error) if (line := _user_line(cause)) is not None), None)
    return ExportError(
        f"the model decides by the values of a tensor what to compute{f' at {line}' if line else ''}: a branch, a loop "
        "or a size that depends on data cannot be part of a program",
        hint=BRANCH,
    )


def is_data_dependent(error: BaseException) -> bool:
    """True when torch.export gave up because values decide what to compute."""
    return any(
        type(one).__name__ in _DATA_DEPENDENT or any(name in str(one) for name in ("data-dependent", *_DATA_DEPENDENT))
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen


def _user_line(error: BaseException) -> str | None:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_INSTALLED)]
    return _line(frames[-1].filename, frames[-1].lineno or 0, frames[-1].line) if frames else None


def _line(file: str, number: int, code: str | None) -> str:
    return f"{file}:{number}" + (f" (`{code.strip()}`)" if code and code.strip() else "")
