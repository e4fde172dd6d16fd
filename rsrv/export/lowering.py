"""From a Python function to StableHLO modules whose entry is exactly ``inputs…, weights…``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core as jex

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.axes import Output
from rsrv.export.captures import Trace, capture, inner_jaxprs, lift
from rsrv.export.inputs import Example
from rsrv.export.outputs import named_outputs
from rsrv.export.params import Params, Weight, abstract
from rsrv.export.symbolic import is_symbol, lower_symbolic
from rsrv.export.usercode import user_code

if TYPE_CHECKING:
    from jaxlib.mlir import ir


@dataclass(frozen=True, eq=False)
class Model:
    """A function with its parameters and examples, which can be traced at any batch size."""

    fn: Callable[..., Any]
    params: Params
    examples: tuple[Example, ...]
    output_names: Sequence[str] | None = None

    def input_specs(self, batch: Any) -> list[jax.ShapeDtypeStruct]:
        return [abstract(example.shape_at(batch), example.dtype.numpy) for example in self.examples]

    def trace(self, batch: Any) -> tuple[Trace, tuple[Output, ...]]:
        """Trace the function for a batch of `batch` rows, a number or a symbol; None: with the examples' own shapes."""
        names: list[str] = []

        def flat(*args: Any) -> list[jax.Array]:
            count = len(self.examples)
            result = self.fn(self.params.rebuild(args[count:]), *args[:count])
            pairs = named_outputs(result, self.output_names)
            names[:] = [name for name, _ in pairs]
            return [value for _, value in pairs]

        specs = [*self.input_specs(batch), *(weight.spec() for weight in self.params.weights)]
        at = "" if batch is None else f" at batch size {batch}"
        called = f"it was called as fn({', '.join(('params', *(example.name for example in self.examples)))})"
        with user_code(f"tracing the function{at}", hint=called):
            closed = jax.make_jaxpr(flat)(*specs)
        outputs = [_output(name, aval) for name, aval in zip(names, closed.out_avals, strict=True)]
        return capture(closed, self.params.random_keys), tuple(outputs)


@dataclass(frozen=True, eq=False)
class Programs:
    """What the programs of one model have in common: which arguments they take."""

    inputs: tuple[Example, ...]
    weights: tuple[Weight, ...]
    dropped_inputs: tuple[str, ...]
    dropped_weights: tuple[str, ...]
    lifted: tuple[str, ...]
    _traces: tuple[Trace, ...]
    _slots: tuple[tuple[int | np.ndarray | None, ...], ...]
    """Per trace and argument of its jaxpr: position in the entry, a constant, or None for an argument left out."""

    @classmethod
    def of(cls, model: Model, traces: Sequence[Trace], *, drop_unused_inputs: bool) -> Programs:
        """Decide on the entry. An argument that any of the traces uses stays in all of them."""
        used = [any(flags) for flags in zip(*(trace.used for trace in traces), strict=True)]
        count = len(model.examples)
        inputs = [example for example, wanted in zip(model.examples, used[:count], strict=True) if wanted]
        dropped = [example.name for example, wanted in zip(model.examples, used[:count], strict=True) if not wanted]
        if dropped and not drop_unused_inputs:
            raise ExportError(
                f"no output depends on the input {dropped[0]!r}",
                hint="remove it from the model, or leave it out with drop_unused_inputs=True",
            )
        if not inputs:
            raise ExportError("no output depends on any input: there is nothing to serve")
        own = [weight for weight, wanted in zip(model.params.weights, used[count:], strict=True) if wanted]
        unused = [w.name for w, wanted in zip(model.params.weights, used[count:], strict=True) if not wanted]
        lifted, indices = lift(traces, {weight.name for weight in model.params.weights})
        positions = _numbered(used)
        first = len(inputs) + len(own)
        slots = [
            (
                *(
                    np.asarray(value) if index is None else first + index
                    for value, index in zip(trace.captured, row, strict=True)
                ),
                *positions,
            )
            for trace, row in zip(traces, indices, strict=True)
        ]
        return cls(
            inputs=tuple(inputs),
            weights=(*own, *lifted),
            dropped_inputs=tuple(dropped),
            dropped_weights=tuple(unused),
            lifted=tuple(weight.name for weight in lifted),
            _traces=tuple(traces),
            _slots=tuple(slots),
        )

    def lower(self, index: int, batch: Any, platform: str, inputs: Sequence[Example] | None = None) -> ir.Module:
        """The StableHLO module of trace number `index`, which was traced for `batch`: a number, a symbol or None.

        `inputs` replaces `self.inputs` for a trace that was made with other shapes.
        """
        arguments = [abstract(one.shape_at(batch), one.dtype.numpy) for one in inputs or self.inputs]
        specs = [*arguments, *(weight.spec() for weight in self.weights)]
        if is_symbol(batch):
            return lower_symbolic(self._main(index), specs, platform)
        traced = jax.jit(self._main(index), keep_unused=True).trace(*specs)
        module: ir.Module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
        return module

    def runner(self, index: int) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
        """Runs the program of trace number `index` with the model's own weights, where JAX runs here."""
        compiled = jax.jit(self._main(index))
        weights = [weight.value for weight in self.weights]

        def run(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [np.asarray(output) for output in compiled(*inputs, *weights)]

        return run

    def _main(self, index: int) -> Callable[..., list[Any]]:
        """The entry function of trace number `index`: inputs, then weights, to outputs."""
        trace, slots = self._traces[index], self._slots[index]

        def main(*args: Any) -> list[Any]:
            values = [args[slot] if isinstance(slot, int) else slot for slot in slots]
            return jax.core.eval_jaxpr(trace.jaxpr, (), *values)

        return main


def computes_in_float64(traces: Iterable[Trace]) -> bool:
    """True when a program computes arrays in float64 although none of its arguments is float64."""

    def wide(atom: Any) -> bool:
        return getattr(atom.aval, "dtype", None) == np.float64 and bool(atom.aval.shape)

    def computed(jaxpr: jex.Jaxpr) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            yield from eqn.outvars
            for inner in inner_jaxprs(eqn):
                yield from computed(inner.jaxpr)

    return any(
        not any(wide(atom) for atom in trace.jaxpr.invars) and any(wide(atom) for atom in computed(trace.jaxpr))
        for trace in traces
    )


def _numbered(used: Sequence[bool]) -> list[int | None]:
    """Positions 0, 1, 2, … for the arguments in use."""
    numbers = iter(range(len(used)))
    return [next(numbers) if wanted else None for wanted in used]


def _output(name: str, aval: Any) -> Output:
    try:
        dtype = DType.from_numpy(aval.dtype)
    except TypeError:
        raise ExportError(
            f"output {name!r} has dtype {aval.dtype}, which no bundle can hold",
            hint=f"convert it inside the function; dtypes: {', '.join(d.value for d in DType)}",
        ) from None
    return Output(name, dtype, tuple(aval.shape))
