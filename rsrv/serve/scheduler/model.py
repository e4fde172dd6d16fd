"""A model as the scheduler sees it: its programs, its weights, and the exact shapes that each of them takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from rsrv.core.errors import InvalidRequest
from rsrv.core.tensors import TensorSpec
from rsrv.serve.scheduler.plan import ANY_BATCH, Variant

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.core.shm.tensor import Tensor
    from rsrv.runtime.device import Buffer, Executable


class Weights(Protocol):
    """The weights of a model, wherever they are.

    Attributes:
        uses: batches that are staged, running or being answered, and others that hold them; the scheduler's lock
            guards it.
        resident: whether a batch may be made that uses them; the dispatch thread alone changes it.
        leaving: they are to go once nobody uses them.
    """

    uses: int
    resident: bool
    leaving: bool

    @property
    def nbytes(self) -> int: ...
    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """On the device, in argument order; they stay while `uses` is not 0."""
        ...


class InputShape(NamedTuple):
    """One program input at a certain variant and number of rows."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    batch_axis: int | None


@dataclass(frozen=True, eq=False)
class ServableModel:
    """One incarnation of a model, ready to run.

    Attributes:
        name: the model's name.
        incarnation: counts the loads of this name; requests prepared for one incarnation never run on another.
        manifest: declares the executable inputs and outputs.
        programs: variant to batch key to executable; key 0 is a single program without a declared batch size.
        weights: what follows the inputs as program arguments.
        max_batch_size: most rows that are merged into one dispatch; None = the largest compiled size.
    """

    name: str
    incarnation: int
    manifest: Manifest
    programs: Mapping[Variant, Mapping[int, Executable]]
    weights: Weights
    max_batch_size: int | None = None
    _shapes: dict[tuple[Variant, int], tuple[InputShape, ...]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        """The executable inputs, in argument order."""
        return self.manifest.executable_inputs

    @cached_property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        """The executable outputs, in result order."""
        return self.manifest.executable_outputs

    @cached_property
    def coalescable(self) -> bool:
        """Whether requests may share a dispatch: every input and output is batched and no program has key 0."""
        return self.manifest.coalescable_specs and not any(ANY_BATCH in keys for keys in self.programs.values())

    @cached_property
    def batch_keys_by_variant(self) -> Mapping[Variant, tuple[int, ...]]:
        return {variant: tuple(sorted(programs)) for variant, programs in self.programs.items()}

    @cached_property
    def row_sizes_by_variant(self) -> Mapping[Variant, tuple[int, ...]]:
        """Rows that the programs of each variant take, ascending; as `batch_keys`, with key 0 resolved to its rows."""
        return {variant: tuple(sorted(map(self._rows_of, p, p.values()))) for variant, p in self.programs.items()}

    def batch_keys(self, variant: Variant) -> tuple[int, ...]:
        """Compiled batch sizes, ascending; ``(0,)`` for a single program without one; ``()`` when not compiled."""
        return self.batch_keys_by_variant.get(variant, ())

    def largest(self, variant: Variant) -> int:
        """Most rows that one request may have. Raises InvalidRequest for a variant that is not compiled."""
        return self._row_sizes(variant)[-1]

    def input_shapes(self, variant: Variant, rows: int) -> tuple[InputShape, ...]:
        """What each input looks like at `variant` with `rows` rows, in argument order."""
        try:
            return self._shapes[variant, rows]
        except KeyError:
            # Bounded: only row counts that some program of a compiled variant takes get here.
            return self._shapes.setdefault((variant, rows), self._shapes_of(variant, rows))

    def _shapes_of(self, variant: Variant, rows: int) -> tuple[InputShape, ...]:
        shapes, sizes = [], iter(variant)
        for spec in self.input_specs:
            shape = spec.concrete_shape(rows, [next(sizes) for _ in spec.variable_axes])
            shapes.append(InputShape(spec.name, spec.dtype.numpy, shape, spec.batch_axis))
        return tuple(shapes)

    def check(self, inputs: Mapping[str, Tensor], rows: int, variant: Variant) -> None:
        """Raises InvalidRequest unless a compiled program can take `inputs`: exactly the declared names, dtype, shape.

        Merging trusts what passed here: an array with a row too many would shift its neighbours' rows.
        """
        sizes = self._row_sizes(variant)
        if not 0 < rows <= sizes[-1]:
            raise InvalidRequest(
                f"a request to model {self.name!r} has {rows} rows; 1 to {sizes[-1]} can run at once "
                f"(compiled: {', '.join(map(str, sizes))})"
            )
        if not self.coalescable and rows not in sizes:
            raise InvalidRequest(
                f"a request to model {self.name!r} has {rows} rows; its programs take exactly "
                f"{' or '.join(map(str, sizes))} rows and cannot be padded"
            )
        self._check_shapes(inputs, rows, self.input_shapes(variant, rows))

    def check_oversize(self, inputs: Mapping[str, Tensor], rows: int, variant: Variant) -> None:
        """As `check`, for a request that is cut into pieces before it runs."""
        self._row_sizes(variant)
        self._check_shapes(inputs, rows, self._shapes_of(variant, rows))

    def _check_shapes(self, inputs: Mapping[str, Tensor], rows: int, shapes: tuple[InputShape, ...]) -> None:
        if len(inputs) != len(shapes):
            declared = {shape.name for shape in shapes}
            raise InvalidRequest(
                f"inputs of model {self.name!r} have to be {', '.join(sorted(declared)) or '(none)'}; "
                f"missing: {', '.join(sorted(declared - inputs.keys())) or '(none)'}, "
                f"unknown: {', '.join(sorted(inputs.keys() - declared)) or '(none)'}"
            )
        for name, dtype, shape, _ in shapes:
            array = inputs.get(name)
            if array is None:
                raise InvalidRequest(f"input {name!r} of model {self.name!r} is missing; got {', '.join(inputs)}")
            if array.dtype != dtype or array.shape != shape:
                raise InvalidRequest(
                    f"input {name!r} of model {self.name!r} is {array.dtype}{list(array.shape)}; "
                    f"a request of {rows} rows needs {dtype}{list(shape)}"
                )

    def _row_sizes(self, variant: Variant) -> tuple[int, ...]:
        sizes = self.row_sizes_by_variant.get(variant)
        if not sizes:
            axes = ", ".join(axis.qualified for axis in self.manifest.variable_axes) or "(no variable axis)"
            compiled = ", ".join(str(list(v)) for v in sorted(self.programs)) or "(none)"
            raise InvalidRequest(
                f"model {self.name!r} has no program for the sizes {list(variant)} of {axes}; compiled: {compiled}"
            )
        return sizes

    def _rows_of(self, batch_key: int, executable: Executable) -> int:
        if batch_key != ANY_BATCH:
            return batch_key
        for spec, argument in zip(self.input_specs, executable.signature.arguments, strict=False):
            if spec.batch_axis is not None:
                return argument.shape[spec.batch_axis]
        return 1
