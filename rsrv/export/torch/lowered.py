"""From graphs to programs ``inputs…, weights…``, one per batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.axes import Output
from rsrv.export.inputs import Example
from rsrv.export.symbolic import is_symbol, lower_symbolic
from rsrv.export.torch.graph import Graph, abstract
from rsrv.export.torch.weights import Weight
from rsrv.stablehlo.artifact import serialize


@dataclass(frozen=True, eq=False)
class Entry:
    """What all programs of one model take: the inputs in use (`kept`), and the weights that any of them uses."""

    kept: tuple[bool, ...]
    weights: tuple[Weight, ...]

    @classmethod
    def of(
        cls, graphs: Sequence[Graph], names: Sequence[str], *, drop_unused_inputs: bool, order: Sequence[str] = ()
    ) -> Entry:
        """The entry of `graphs`; `names` are those of all inputs, weights come in the `order` of their names.

        Raises ExportError when an input is not used, or when the graphs have different weights of one name.
        """
        kept = tuple(any(flags) for flags in zip(*(graph.used for graph in graphs), strict=True))
        unused = [name for name, used in zip(names, kept, strict=True) if not used]
        if unused and not drop_unused_inputs:
            raise ExportError(
                f"no output depends on the input {unused[0]!r}",
                hint="leave it out of the examples, or drop it with drop_unused_inputs=True (--drop-unused-inputs)",
            )
        if not any(kept):
            raise ExportError("no output depends on any input: there is nothing to serve")
        weights: dict[str, Weight] = {}
        for graph in graphs:
            for weight in graph.weights:
                known = weights.setdefault(weight.name, weight)
                if (known.shape, known.dtype) != (weight.shape, weight.dtype):
                    raise ExportError(f"weight {weight.name!r} has another shape or dtype at another batch size")
        places = {name: place for place, name in enumerate(order)}
        return cls(kept, tuple(sorted(weights.values(), key=lambda one: places.get(one.name, len(places)))))

    def lower(self, graph: Graph, examples: Sequence[Example], int64: str, platform: str, version: str) -> bytes:
        """The program of `graph` for inputs of exactly the examples' shapes, `examples` being those in use.

        A batch size that is a symbol stays one. Raises ExportError.
        """
        places = {weight.name: i for i, weight in enumerate(self.weights)}
        order = [places[weight.name] for weight in graph.weights]
        count = len(examples)

        def main(*args: Any) -> list[Any]:
            given = iter(args[:count])
            # A narrowed input is widened first, so that the model computes with what it was written for.
            inputs = [
                next(given).astype(dtype.numpy) if used else None
                for used, dtype in zip(self.kept, graph.input_dtypes, strict=True)
            ]
            weights = [weight.value(argument) for weight, argument in zip(self.weights, args[count:], strict=True)]
            results = graph(inputs, [weights[place] for place in order])
            return [
                value.astype(narrowed(result.dtype, int64).numpy)
                for value, result in zip(results, graph.results, strict=True)
            ]

        specs = [
            *(abstract(example.shape, example.dtype) for example in examples),
            *(abstract(weight.shape, weight.dtype) for weight in self.weights),
        ]
        if any(is_symbol(size) for example in examples for size in example.shape):
            return serialize(lower_symbolic(main, specs, platform), version)
        traced = jax.jit(main, keep_unused=True).trace(*specs)
        return serialize(traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo"), version)


def outputs(graph: Graph, names: Sequence[str], batch: int | None, int64: str) -> tuple[Output, ...]:
    """The results of `graph` at one batch size as the manifest declares them."""
    return tuple(
        Output(name, narrowed(result.dtype, int64), result.shape(batch))
        for name, result in zip(names, graph.results, strict=True)
    )


def narrowed(dtype: DType, int64: str) -> DType:
    return DType.I32 if int64 == "narrow" and dtype is DType.I64 else dtype
