"""Programs by torch-xla, brought to the entry ``inputs…, weights…`` that all programs of a bundle share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.inputs import Example
from rsrv.export.torch.dtypes import to_torch
from rsrv.export.torch.graph import Graph
from rsrv.export.torch.lowered import Entry, narrowed
from rsrv.export.torch.tracing import PREFIX
from rsrv.export.torch.weights import Weight, identity
from rsrv.export.torch.xla.converter import Conversion, Converter
from rsrv.stablehlo.artifact import serialize
from rsrv.stablehlo.entry import with_entry
from rsrv.stablehlo.signature import TensorType, tensor_type


@dataclass(frozen=True, eq=False)
class Lowered:
    """`modules` in the order of the graphs, what they take and leave out, and the versions of what made them."""

    entry: Entry
    modules: tuple[bytes, ...]
    dropped: tuple[str, ...]
    versions: dict[str, str]


def lower_by_torch_xla(
    entry: Entry, graphs: Sequence[tuple[Graph, Sequence[Example]]], converter: Converter, *, int64: str, version: str
) -> Lowered:
    """Convert each graph, whose shapes are fixed, for inputs of exactly its examples' shapes.

    Args:
        entry: says which inputs are kept; its weights give the order of those that torch-xla left.

    The weights are the parameters and buffers that any of the programs takes, and after them the constants that
    torch-xla made arguments of, ``constant_0``, … An input that a program does not take stays, unused.

    Raises ExportError when torch-xla cannot convert a graph, and for a weight that no bundle can hold.
    """
    conversions = [converter.convert(graph.source) for graph, _ in graphs]
    pool = _Pool()
    taken = [
        [pool.place(argument, graph) for argument in conversion.arguments]
        for conversion, (graph, _) in zip(conversions, graphs, strict=True)
    ]
    known = {weight.name: place for place, weight in enumerate(entry.weights)}
    weights = tuple(sorted(pool.weights, key=lambda weight: known.get(weight.name, len(known))))
    left = {weight.name for weight in weights}
    lifted = (name for graph, _ in graphs for name in graph.source.graph_signature.lifted_tensor_constants)
    constants = {name.removeprefix(PREFIX) for name in lifted}
    dropped = [*graphs[0][0].dropped, *(weight.name for weight in entry.weights if weight.name not in left)]
    entry = replace(entry, weights=weights)
    modules = [
        _module(entry, conversion, places, graph, examples, int64, version)
        for conversion, places, (graph, examples) in zip(conversions, taken, graphs, strict=True)
    ]
    return Lowered(
        entry, tuple(modules), tuple(name for name in dropped if name not in constants), dict(conversions[0].versions)
    )


def _module(
    entry: Entry,
    conversion: Conversion,
    taken: Sequence[int | Weight],
    graph: Graph,
    examples: Sequence[Example],
    int64: str,
    version: str,
) -> bytes:
    numbers = [number for number, kept in enumerate(entry.kept) if kept]
    places: dict[int | Weight, int] = {number: place for place, number in enumerate(numbers)}
    places |= {weight: len(numbers) + place for place, weight in enumerate(entry.weights)}
    for one in taken:
        if one not in places:  # pragma: no cover - an input without users in the graph of torch
            raise ExportError(f"torch-xla's program takes input {one}, which no output depends on")
    arguments = [
        *(_type(example.dtype, example.shape) for example in examples),
        *(_type(weight.dtype, weight.shape) for weight in entry.weights),
    ]
    results = [_type(narrowed(result.dtype, int64), result.shape(None)) for result in graph.results]
    return serialize(with_entry(conversion.code, arguments, [places[one] for one in taken], results), version)


class _Pool:
    """The weights of all programs: each once, whatever names it has and however many programs take it."""

    def __init__(self) -> None:
        self._named: dict[str, Weight] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Weight] = {}

    @property
    def weights(self) -> list[Weight]:
        return [*self._named.values(), *self._constants.values()]

    def place(self, argument: str | int | np.ndarray, graph: Graph) -> int | Weight:
        """The number of an input, or a weight."""
        if isinstance(argument, int):
            return argument
        if isinstance(argument, str):
            return self._parameter(argument, graph)
        return self._constant(argument)

    def _parameter(self, target: str, graph: Graph) -> Weight:
        source = graph.source
        tensor = source.state_dict.get(target, source.constants.get(target))
        if not isinstance(tensor, torch.Tensor):
            raise ExportError(f"torch-xla's program takes the weight {target!r}, which the model does not have")
        # One name for tied weights: that of the graph.
        used = {identity(weight.tensor): weight for weight in graph.weights}
        weight = used.get(identity(tensor)) or Weight(target.removeprefix(PREFIX), tensor)
        if weight.is_complex:
            raise ExportError(
                f"weight {weight.name!r} is complex, which --lowering torch-xla cannot do",
                hint="use the default, --lowering torchax",
            )
        known = self._named.setdefault(weight.name, weight)
        if (known.shape, known.dtype) != (weight.shape, weight.dtype):
            raise ExportError(f"weight {weight.name!r} has another shape or dtype at another batch size")
        return known

    def _constant(self, value: np.ndarray) -> Weight:
        key = (value.dtype.name, value.shape, value.tobytes())
        return self._constants.setdefault(key, Weight(f"constant_{len(self._constants)}", to_torch(value)))


def _type(dtype: DType, shape: Sequence[int]) -> TensorType:
    return tensor_type(dtype.stablehlo, tuple(shape))
