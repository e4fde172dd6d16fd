"""Eager PyTorch as the original behind a bundle: ``rsrv bundle verify --against torch:SPEC``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rsrv.bundle.manifest import Manifest
from rsrv.core.errors import ExportError
from rsrv.core.tensors import DimKind, TensorSpec
from rsrv.export.golden import Reference
from rsrv.export.specs import InputSpec
from rsrv.export.torch.dtypes import as_declared, to_torch
from rsrv.export.torch.factory import load_model
from rsrv.export.torch.sources import model_of


def load_torch_reference(spec: str, manifest: Manifest) -> Reference:
    """The model that `spec` names as in ``rsrv export torch``, to be called with the inputs of the bundle.

    An input that the bundle left out keeps the value of the factory's example. 64-bit integers that the bundle narrowed
    are narrowed here, too. Raises UsageError, or ExportError when the model cannot be made.
    """
    made = load_model(spec, inputs_if_missing=[_spec(one) for one in manifest.executable_inputs])
    model = model_of(made.module, made.inputs, made.kwargs, made.output_names)
    names = tuple(made.input_names or model.call.names)
    served = [one.name for one in manifest.executable_inputs]
    if unknown := [name for name in served if name not in names]:
        raise ExportError(f"the model has no input {unknown[0]!r}; its inputs are {', '.join(names)}")
    narrow = manifest.provenance.get("int64") == "narrow"

    def answer(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = [
            to_torch(inputs[name]).to(device=example.device, dtype=example.dtype) if name in inputs else example
            for name, example in zip(names, model.call.tensors, strict=True)
        ]
        return {name: as_declared(name, tensor, narrow=narrow) for name, tensor in model.run(tensors).items()}

    return answer


def _spec(spec: TensorSpec) -> InputSpec:
    sizes = tuple(dim.size if dim.kind is DimKind.FIXED else 1 for dim in spec.dims)
    return InputSpec(spec.name, spec.dtype, sizes)
