"""A decomposed torch graph and what its placeholders and results are: inputs, weights, constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.export.graph_signature import InputKind, OutputKind

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.torch.dtypes import bundle_dtype, output_dtype, short
from rsrv.export.torch.interpreter import run
from rsrv.export.torch.lowerings import KEPT
from rsrv.export.torch.refusals import check_graph
from rsrv.export.torch.registry import registry
from rsrv.export.torch.weights import Weights, identity

aten: Any = torch.ops.aten

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Result:
    """An output of the graph; sizes are numbers, or expressions of the one symbol (the batch size)."""

    position: int
    dtype: DType
    sizes: tuple[Any, ...]

    def shape(self, batch: int | None) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else _evaluate(size, batch) for size in self.sizes)


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph that computes ``inputs…, weights…`` → results, at one batch size or, when `dynamic`, at any.

    Attributes:
        module: decomposed, functional.
        used, input_dtypes, input_places: per input of the model, whether a result depends on it, what torch computes
            with, and which placeholder it is.
        weights: the tensors in use, in the order of the graph; each stored once whatever names it has.
        results: what the model returns, in order; None outputs are left out.
        mutated: names of buffers that the model changes; a program leaves them as they are.
        dropped: names of parameters and buffers that no result depends on.
        source: the program before its decomposition.
    """

    module: torch.fx.GraphModule
    dynamic: bool
    used: tuple[bool, ...]
    input_dtypes: tuple[DType, ...]
    input_places: tuple[int, ...]
    weights: Weights
    results: tuple[Result, ...]
    mutated: tuple[str, ...]
    dropped: tuple[str, ...]
    source: torch.export.ExportedProgram
    _slots: tuple[Callable[[Sequence[Any], Sequence[Any]], Any], ...]

    def __call__(self, inputs: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """JAX arrays of all inputs (None for one that is not used), and of `self.weights` → the results."""
        values = run(self.module, [slot(inputs, weights) for slot in self._slots])
        return [jnp.asarray(values[result.position]) for result in self.results]

    def placeholders(self, names: Sequence[str]) -> dict[str, str]:
        """Name of a placeholder → that of the input, from the `names` of all inputs."""
        nodes = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        return {nodes[place].name: name for place, name in zip(self.input_places, names, strict=True)}


def decompose(program: torch.export.ExportedProgram, *, prefix: str = "", dynamic: bool = False) -> Graph:
    """Bring an exported program down to operators with a lowering.

    Args:
        prefix: to be taken off the names of parameters and buffers.
        dynamic: the batch size is a symbol.

    Raises ExportError for what no program can do; the error names the operator and the line of the model.
    """
    check_graph(program.graph_module)
    _reshape_instead_of_view(program.graph_module)
    table: Any = torch.export.default_decompositions()
    table.update(registry().decompositions)
    for operator in KEPT:
        table.pop(operator, None)
    return _read(program.run_decompositions(table), program, prefix, dynamic)


def _reshape_instead_of_view(module: torch.fx.GraphModule) -> None:
    """Strides mean nothing in a program, but `view` checks them, and decomposed operators return others than it saw."""
    for child in module.modules():
        if isinstance(child, torch.fx.GraphModule):
            for node in child.graph.nodes:
                if node.target is aten.view.default:
                    node.target = aten.reshape.default
            child.recompile()


def _read(
    program: torch.export.ExportedProgram, source: torch.export.ExportedProgram, prefix: str, dynamic: bool
) -> Graph:
    signature = program.graph_signature
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    weights = Weights()
    slots: list[Callable[[Sequence[Any], Sequence[Any]], Any]] = []
    places: list[int] = []
    used: list[bool] = []
    dtypes: list[DType] = []
    dropped: list[str] = []
    live = {
        identity(_tensor(program, spec.target))
        for node, spec in zip(placeholders, signature.input_specs, strict=True)
        if spec.kind in _WEIGHTS and node.users
    }
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                slots.append(_input(len(used)))
                places.append(len(slots) - 1)
                used.append(bool(node.users))
                dtypes.append(_input_dtype(node.name, value))
            elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise ExportError(
                    f"the model was exported with a number as an input ({node.name}), which programs do not take",
                    hint="make it a tensor, or fix its value",
                )
            else:
                slots.append(_constant(value))
        elif spec.kind in _WEIGHTS:
            name = str(spec.target).removeprefix(prefix)
            tensor = _tensor(program, spec.target)
            # Of tied weights torch leaves users to one name only, and not to the first.
            if identity(tensor) in live:
                slots.append(_weight(weights.add(name, tensor)))
            else:
                dropped.append(name)
                slots.append(_constant(None))
        elif spec.kind == InputKind.TOKEN:
            slots.append(_constant(None))
        else:
            raise ExportError(f"the model takes a {spec.kind.name.lower()} ({spec.target}), which no program can have")
    results: list[Result] = []
    outputs: Any = program.graph.output_node().args[0]
    for position, (spec_out, made) in enumerate(zip(signature.output_specs, outputs, strict=True)):
        if spec_out.kind == OutputKind.USER_OUTPUT and isinstance(made, torch.fx.Node):
            results.append(_result(position, made, len(results)))
    mutated = sorted(name.removeprefix(prefix) for name in signature.buffers_to_mutate.values())
    return Graph(
        module=program.graph_module,
        dynamic=dynamic,
        used=tuple(used),
        input_dtypes=tuple(dtypes),
        input_places=tuple(places),
        weights=weights,
        results=tuple(results),
        mutated=tuple(mutated),
        dropped=tuple(dropped),
        source=source,
        _slots=tuple(slots),
    )


def _tensor(program: torch.export.ExportedProgram, target: Any) -> torch.Tensor:
    tensor = program.state_dict.get(target, program.constants.get(target))
    assert isinstance(tensor, torch.Tensor), f"{target} has no value"
    return tensor


def _result(position: int, node: torch.fx.Node, number: int) -> Result:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"output {number} is a {type(value).__name__}, want a tensor")
    dtype = output_dtype(f"output {number}", value.dtype)
    return Result(position, dtype, tuple(size if isinstance(size, int) else size.node.expr for size in value.shape))


def _input_dtype(name: str, value: torch.Tensor) -> DType:
    dtype = bundle_dtype(value.dtype)
    if dtype is None:
        raise ExportError(f"input {name!r} is {short(value.dtype)}, which no bundle can hold")
    return dtype


def _evaluate(expression: Any, batch: int | None) -> int:
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, batch)))


def _input(index: int) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    return lambda inputs, weights: inputs[index]


def _weight(index: int) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    return lambda inputs, weights: weights[index]


def _constant(value: Any) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    return lambda inputs, weights: value


def abstract(shape: tuple[int, ...], dtype: DType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype.numpy)  # type: ignore[no-untyped-call]
