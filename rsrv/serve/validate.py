"""Checks of a request against what its model declares, as functions over plain values.

What depends on the model alone is computed once, when it is prepared. Nothing here knows wire, hooks or scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rsrv.core.dtypes import DType, dtype_text
from rsrv.core.errors import InvalidRequest
from rsrv.core.shm.tensor import Tensor
from rsrv.core.tensors import DimKind, OutputTarget, TensorSpec

Variant = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Declared:
    spec: TensorSpec
    dtype: np.dtype[np.generic]
    rank: int
    fixed: tuple[tuple[int, int], ...]


class TensorCheck:
    """One declared list of tensors: names, dtypes, ranks, fixed extents, and one row count for all batched tensors.

    Args:
        specs: what is declared; batch and variable axes accept any extent.
        model: the model's name, for messages.
        what: what one tensor is called in messages: "input", "output", "executable input".
    """

    def __init__(self, specs: Sequence[TensorSpec], *, model: str, what: str = "input") -> None:
        self._model = model
        self._what = what
        self._table = {
            spec.name: _Declared(
                spec,
                spec.dtype.numpy,
                spec.rank,
                tuple((axis, dim.size) for axis, dim in enumerate(spec.dims) if dim.kind is DimKind.FIXED),
            )
            for spec in specs
        }
        self._batched = tuple((spec.name, spec.batch_axis) for spec in specs if spec.batch_axis is not None)

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors by name. Raises InvalidRequest for what `arrays` refuses, and for a name that comes twice."""
        result: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name in result:
                raise InvalidRequest(f"{self._what} {name!r} of model {self._model!r} is given twice")
            result[name] = tensor
        self.arrays(result)
        return result

    def arrays(self, arrays: Mapping[str, Tensor]) -> None:
        """Raises InvalidRequest unless exactly the declared tensors are there, each as declared."""
        table = self._table
        for name, array in arrays.items():
            declared = table.get(name)
            if declared is None:
                raise InvalidRequest(
                    f"model {self._model!r} has no {self._what} {name!r}; it has: {', '.join(table) or '(none)'}"
                )
            shape = array.shape
            if array.dtype != declared.dtype:
                raise self._mismatch(declared, f"has datatype {_datatype(array.dtype)}", array)
            if len(shape) != declared.rank:
                raise self._mismatch(declared, f"has rank {len(shape)}", array)
            for axis, size in declared.fixed:
                if shape[axis] != size:
                    raise self._mismatch(declared, f"has extent {shape[axis]} at axis {axis}, wanted {size}", array)
        if len(arrays) != len(table):
            missing = [repr(name) for name in table if name not in arrays]
            raise InvalidRequest(f"{self._what} {', '.join(missing)} of model {self._model!r} is missing")
        if len(self._batched) > 1:
            self._require_one_row_count(arrays)

    def _require_one_row_count(self, arrays: Mapping[str, Tensor]) -> None:
        first, axis = self._batched[0]
        rows = arrays[first].shape[axis]
        for name, axis in self._batched[1:]:
            if arrays[name].shape[axis] != rows:
                raise InvalidRequest(
                    f"{self._what}s of model {self._model!r} disagree on the number of rows: "
                    f"{first!r} has {rows}, {name!r} has {arrays[name].shape[axis]} (axis {axis})"
                )

    def _mismatch(self, declared: _Declared, problem: str, array: Tensor) -> InvalidRequest:
        shape = ",".join(map(str, array.shape))
        return InvalidRequest(
            f"{self._what} {declared.spec.name!r} of model {self._model!r} {problem}; "
            f"declared {declared.spec.describe()}, got {dtype_text(array.dtype)}[{shape}]"
        )


def _datatype(dtype: np.dtype[np.generic]) -> str:
    try:
        return DType.from_numpy(dtype).wire or str(dtype)
    except TypeError:
        return str(dtype)


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The rows that the programs of one variant take: `sizes` ascending; `exact` means these and nothing between."""

    sizes: tuple[int, ...]
    exact: bool


class RowCheck:
    """Finds a request's rows and shape variant from its executable inputs, and refuses what no program can take.

    Args:
        specs: the executable inputs.
        variants: what is compiled. A variant whose `sizes` are empty takes any number of rows.
    """

    def __init__(self, specs: Sequence[TensorSpec], variants: Mapping[Variant, RowSizes], *, model: str) -> None:
        self._model = model
        self._variants = dict(variants)
        self._batch = next(((s.name, s.batch_axis) for s in specs if s.batch_axis is not None), None)
        self._variable = tuple((s.name, axis) for s in specs for axis in s.variable_axes)
        self._labels = tuple(f"{s.name}.{s.letters[axis]}" for s in specs for axis in s.variable_axes)

    def plan(self, inputs: Mapping[str, Tensor]) -> tuple[int, Variant]:
        """Rows and variant of checked executable inputs. Raises InvalidRequest when nothing is compiled for them."""
        variant: Variant = ()
        if self._variable:
            variant = tuple(inputs[name].shape[axis] for name, axis in self._variable)
        compiled = self._variants.get(variant)
        if compiled is None:
            raise InvalidRequest(
                f"model {self._model!r} has no program for {self._describe(variant)}; "
                f"compiled: {' or '.join(self._describe(v) for v in self._variants)}"
            )
        if self._batch is None:
            return 1, variant
        name, axis = self._batch
        rows = inputs[name].shape[axis]
        if rows < 1:
            raise InvalidRequest(
                f"input {name!r} of model {self._model!r} has 0 rows (axis {axis}); at least 1 is wanted"
            )
        sizes = compiled.sizes
        if sizes and (rows > sizes[-1] or (compiled.exact and rows not in sizes)):
            wanted = f"exactly {' or '.join(map(str, sizes))}" if compiled.exact else f"at most {sizes[-1]}"
            raise InvalidRequest(
                f"input {name!r} of model {self._model!r} has {rows} rows (axis {axis}); {wanted} can run at once"
            )
        return rows, variant

    def _describe(self, variant: Variant) -> str:
        return ", ".join(f"{label}={size}" for label, size in zip(self._labels, variant, strict=True)) or "one shape"


class OutputCheck:
    """The requested outputs of a request, and the shared-memory windows that they shall be written to.

    Args:
        specs: the client-facing outputs, in model order.
        rows_known: rows of an output are the rows of the request (no hook can change them).
    """

    def __init__(self, specs: Sequence[TensorSpec], *, model: str, rows_known: bool) -> None:
        self._model = model
        self.names = tuple(spec.name for spec in specs)
        self._known = frozenset(self.names)
        # Bytes of an output whose size is known before it is computed: (bytes, or bytes per row; whether per row).
        self._bytes: dict[str, tuple[int, bool]] = {}
        for spec in specs:
            batched = spec.batch_axis is not None
            if not spec.variable_axes and (rows_known or not batched):
                self._bytes[spec.name] = (spec.dtype.itemsize * prod(spec.concrete_shape(1)), batched)

    def names_of(self, requested: Sequence[str]) -> Sequence[str]:
        """The outputs to send: `requested`, or all when it is empty. Raises InvalidRequest for unknown or repeated."""
        if not requested:
            return self.names
        seen: set[str] = set()
        for name in requested:
            if name not in self._known:
                raise InvalidRequest(
                    f"model {self._model!r} has no output {name!r}; it has: {', '.join(self.names) or '(none)'}"
                )
            if name in seen:
                raise InvalidRequest(f"output {name!r} of model {self._model!r} is requested twice")
            seen.add(name)
        return requested

    def windows(self, targets: Mapping[str, OutputTarget], rows: int) -> None:
        """Raises InvalidRequest when a window is smaller than an output whose size `rows` already tells."""
        for name, target in targets.items():
            known = self._bytes.get(name)
            if known is None:
                continue
            wanted = known[0] * rows if known[1] else known[0]
            if target.byte_size < wanted:
                raise InvalidRequest(
                    f"output {name!r} of model {self._model!r} needs {wanted} bytes, its window in region "
                    f"{target.region!r} has {target.byte_size}"
                )
