"""One model of a Triton repository as a bundle, by what its ``config.pbtxt`` says (X-43). Runs beside torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.bundle.directory import open_bundle
from rsrv.bundle.provenance import collect_provenance
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.repository.triton import TritonTensor, find_model_file, read_triton_model, tensor_order
from rsrv.export.specs import InputSpec


class GenericModel:
    """A model that is loaded once and exported for one set of batch sizes after the other.

    Raises ExportError when it cannot be loaded, or its forward does not take what the configuration declares: no choice
    of batch sizes changes that.
    """

    def __init__(self, source: Path) -> None:
        from rsrv.export.torch.sources import file_facts, forward_of, read_file

        self.config = read_triton_model(source)
        file = find_model_file(source, self.config)
        self._module = read_file(file)
        self._forward = forward_of(self._module)
        # Of the model's own repository; a diff of weights would help nobody, the digest of the file says what it was.
        self._facts = collect_provenance(source, file_facts(file), diff=False)
        self._inputs = self._ordered_inputs()
        order = tensor_order([tensor.name for tensor in self.config.outputs])
        self._outputs = [self.config.outputs[i] for i in order]

    def export(
        self, target: Path, sizes: Sequence[int] | None, *, golden: int, provenance: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Write the bundle `target`, with programs for `sizes` (None: as the dims are, for one row of a batched model).

        Returns the batch sizes of the bundle. Raises ExportError or BundleError.
        """
        from rsrv.export.bundle import export_bundle

        rows = sizes[0] if sizes else 1
        export_bundle(
            "torch",
            self._module,
            self._call(rows),
            dir=target,
            batch_sizes=sizes,
            input_names=[tensor.name for tensor in self._inputs],
            output_names=[tensor.name for tensor in self._outputs],
            output_batch_axes=[0] * len(self._outputs) if sizes else None,
            golden=golden,
            collect_git=False,
            provenance={"converter": "rsrv export convert", **self._facts, **provenance},
        )
        self._require_declared(target, batched=sizes is not None)
        return tuple(sizes or ())

    def _ordered_inputs(self) -> list[TritonTensor]:
        _, order = self._bound(1)
        declared = {tensor.name: tensor for tensor in self.config.inputs}
        return [declared[name] for name in order]

    def _call(self, rows: int) -> Any:
        """The example call, marked as made up: its values say nothing about the range of integers."""
        call, _ = self._bound(rows)
        specs = [
            InputSpec(name, _dtype(tensor), self._shape(tensor, rows))
            for name, tensor in zip(call.names, self._inputs, strict=True)
        ]
        return call.replaced(specs)

    def _bound(self, rows: int) -> tuple[Any, list[str]]:
        from rsrv.export.torch.arguments import bind_as_triton

        inputs = self.config.inputs
        return bind_as_triton(
            self._forward, {one.name: np.zeros(self._shape(one, rows), _dtype(one).numpy) for one in inputs}
        )

    def _shape(self, tensor: TritonTensor, rows: int) -> tuple[int, ...]:
        return (rows, *tensor.dims) if self.config.max_batch_size else tensor.dims

    def _require_declared(self, target: Path, *, batched: bool) -> None:
        """Refuse outputs of another dtype or size than the configuration promises: names may be mixed up."""
        rows = [1] if self.config.max_batch_size and not batched else []
        for spec, tensor in zip(open_bundle(target).manifest.executable_outputs, self._outputs, strict=True):
            found = [size for axis, size in enumerate(spec.wire_shape) if not (batched and axis == 0)]
            wanted = [*rows, *tensor.dims]
            same = len(found) == len(wanted) and all(
                size in (-1, here) for size, here in zip(wanted, found, strict=True)
            )
            if not same or spec.dtype is not tensor.dtype:
                raise ExportError(
                    f"output {tensor.name!r} is {spec.describe()}, and config.pbtxt declares {tensor.data_type} with "
                    f"dims {list(tensor.dims)}",
                    hint="outputs are in the order of their numbers (OUTPUT__0, OUTPUT__1), or else of config.pbtxt",
                )


def _dtype(tensor: TritonTensor) -> DType:
    assert tensor.dtype is not None  # `obstacle` has refused the others
    return tensor.dtype
