"""Example inputs: what the model's inputs are called, and their dtype, shape and batch axis. Values are never used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rsrv.bundle.iospec import IOSpec
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.specs import InputSpec, parse_input_spec

MAX_INPUT_BYTES = 2**40
"""Most bytes of one row of an input; above, a size was mistyped."""


@dataclass(frozen=True)
class Example:
    """One input. `shape` is row-major and holds any extent at `batch_axis` (0-based; None = not batched)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    batch_axis: int | None

    def shape_at(self, batch: int | None) -> tuple[int, ...]:
        """The shape for a batch of `batch` rows."""
        if self.batch_axis is None or batch is None:
            return self.shape
        return (*self.shape[: self.batch_axis], batch, *self.shape[self.batch_axis + 1 :])

    def io_spec(self, letters: str | None) -> IOSpec:
        return IOSpec(self.name, self.dtype, self.shape, batch_axis=self.batch_axis, letters=letters)


def resolve_examples(
    inputs: Any,
    *,
    names: Sequence[str] | None = None,
    batch_axes: Sequence[int | None] | Mapping[str, int | None] | None = None,
    batched: bool = True,
) -> tuple[Example, ...]:
    """Normalise example inputs.

    Args:
        inputs: one example, a sequence of them, or a mapping name → example. An example is anything with a dtype and a
            shape, or a text ``name=f32[1,3,224,224]``.
        names: names in order; default: what the examples say, else ``input`` or ``input_0``, ``input_1``, …
        batch_axes: per input (in order, or by name) its batch axis; default 0 for each. Negative counts from the end.
        batched: False for a program without a batch axis.

    Raises ExportError that names the input.
    """
    examples = _listed(inputs)
    named = _named(examples, names)
    if not named:
        raise ExportError("a model needs at least one input")
    axes = _axes(batch_axes, [name for name, _ in named], batched)
    found = tuple(_example(name, value, axis) for (name, value), axis in zip(named, axes, strict=True))
    if batched:
        _require_all_batched(found)
    return found


def _listed(inputs: Any) -> list[tuple[str | None, Any]]:
    """The examples in order, each with the name that it brings along, if any."""
    if isinstance(inputs, Mapping):
        return [(str(name), value) for name, value in inputs.items()]
    if isinstance(inputs, (str, InputSpec)) or _has_shape(inputs):
        inputs = [inputs]
    if not isinstance(inputs, Sequence):
        raise ExportError(f"inputs is a {type(inputs).__name__}, want an example, a sequence or a mapping of examples")
    texts = [parse_input_spec(value) if isinstance(value, str) else value for value in inputs]
    return [(value.name if isinstance(value, InputSpec) else None, value) for value in texts]


def _named(examples: Sequence[tuple[str | None, Any]], names: Sequence[str] | None) -> list[tuple[str, Any]]:
    if names is not None:
        if isinstance(names, str) or len(names) != len(examples):
            raise ExportError(f"input_names is {names!r}, but there are {len(examples)} inputs")
        for wanted, (own, _) in zip(names, examples, strict=True):
            if own is not None and own != wanted:
                raise ExportError(f"the example named {own!r} is called {wanted!r} in input_names")
    default = ["input"] if len(examples) == 1 else [f"input_{i}" for i in range(len(examples))]
    chosen = names or [own if own is not None else default[i] for i, (own, _) in enumerate(examples)]
    if repeated := sorted({name for name in chosen if list(chosen).count(name) > 1}):
        raise ExportError(f"two inputs are named {repeated[0]!r}")
    return [(name, value) for name, (_, value) in zip(chosen, examples, strict=True)]


def _axes(
    batch_axes: Sequence[int | None] | Mapping[str, int | None] | None, names: Sequence[str], batched: bool
) -> list[int | None]:
    if not batched:
        if batch_axes is not None:
            raise ExportError("input_batch_axes has no meaning with batch_sizes=None: such a program has no batch axis")
        return [None] * len(names)
    if batch_axes is None:
        return [0] * len(names)
    if isinstance(batch_axes, Mapping):
        if unknown := sorted(set(batch_axes) - set(names)):
            raise ExportError(f"input_batch_axes names {unknown[0]!r}; the inputs are {', '.join(names)}")
        return [batch_axes.get(name, 0) for name in names]
    if len(batch_axes) != len(names):
        raise ExportError(f"input_batch_axes has {len(batch_axes)} entries for {len(names)} inputs")
    return list(batch_axes)


def _example(name: str, value: Any, axis: int | None) -> Example:
    if not _has_shape(value):
        raise ExportError(
            f"input {name!r} is a {type(value).__name__}, want an array, a jax.ShapeDtypeStruct or 'NAME=f32[1,3]'",
            hint="np.asarray(value, np.float32) makes an array of numbers",
        )
    try:
        dtype = value.dtype if isinstance(value.dtype, DType) else DType.from_numpy(value.dtype)
    except TypeError as error:
        raise ExportError(f"input {name!r}: {error}") from None
    shape = tuple(int(size) for size in value.shape)
    valid = _is_axis(axis, len(shape))
    batch_axis = axis % len(shape) if axis is not None and valid else None
    fixed = [size for index, size in enumerate(shape) if index != batch_axis]
    if 0 in fixed or math.prod(fixed) * dtype.itemsize > MAX_INPUT_BYTES:
        raise ExportError(f"input {name!r} has shape {list(shape)}, want sizes above 0 that fit into memory")
    if axis is None:
        return Example(name, dtype, shape, None)
    if not valid:
        raise ExportError(
            f"input {name!r} has shape {list(shape)}, which has no axis {axis!r} for the batch",
            hint="say which axis in input_batch_axes, or use batch_sizes=None",
        )
    return Example(name, dtype, shape, batch_axis)


def _is_axis(axis: object, rank: int) -> bool:
    return isinstance(axis, int) and not isinstance(axis, bool) and -rank <= axis < rank


def _require_all_batched(examples: Sequence[Example]) -> None:
    without = [example.name for example in examples if example.batch_axis is None]
    if without:
        raise ExportError(
            f"input {without[0]!r} has no batch axis; with batch sizes every input needs one",
            hint="use batch_sizes=None, which serves one request per execution",
        )


def _has_shape(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
