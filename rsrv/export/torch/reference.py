"""Eager PyTorch as the original behind a bundle: ``--against torch:SPEC`` and ``--sources`` of `rsrv bundle verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rsrv.bundle.manifest import Manifest
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError, UsageError
from rsrv.core.tensors import DimKind, TensorSpec
from rsrv.export.golden import Reference
from rsrv.export.repository.triton import CONFIG, find_model_file, read_triton_model
from rsrv.export.specs import InputSpec
from rsrv.export.torch.arguments import bind_as_triton, input_spec
from rsrv.export.torch.dtypes import as_declared, to_torch, torch_dtype
from rsrv.export.torch.factory import load_model
from rsrv.export.torch.model import TorchModel
from rsrv.export.torch.sources import forward_of, model_of, read_file


class TorchOriginal:
    """The model that `spec` names as in ``rsrv export torch``, run eagerly on `device`.

    An input that the bundle left out keeps the value of the factory's example. 64-bit integers that the bundle narrowed
    are narrowed here, too.
    """

    def __init__(self, spec: str, manifest: Manifest, *, device: str = "cpu") -> None:
        self._device = _device(device)
        made = load_model(spec, inputs_if_missing=[_spec(one) for one in manifest.executable_inputs])
        self._model = model_of(made.module, made.inputs, made.kwargs, made.output_names)
        self._names = tuple(made.input_names or self._model.call.names)
        self._narrow = manifest.provenance.get("int64") == "narrow"
        _move(made.module, self._device)

    @property
    def inputs(self) -> list[tuple[str, DType, int]]:
        specs = [input_spec(name, one) for name, one in zip(self._names, self._model.call.tensors, strict=True)]
        return [(spec.name, spec.dtype, len(spec.shape)) for spec in specs]

    def answering(self, specs: Sequence[TensorSpec]) -> Reference:
        if unknown := [spec.name for spec in specs if spec.name not in self._names]:
            raise ExportError(f"the model has no input {unknown[0]!r}; its inputs are {', '.join(self._names)}")
        return _answering(self._model, self._names, self._device, narrow=self._narrow)


class SourceOriginal:
    """The model in the directory `source` of a Triton repository, run eagerly on `device`.

    Its inputs have no names of their own: the tensors of the bundle go to forward in Triton's order (``INPUT__0``, …,
    or forward's own names, or the order of the manifest).
    """

    inputs: Sequence[tuple[str, DType, int]] = ()

    def __init__(self, source: Path, manifest: Manifest, *, device: str = "cpu") -> None:
        self._device = _device(device)
        config = read_triton_model(source) if (source / CONFIG).is_file() else None
        if config is None and not (source / "1" / "model.pt").is_file():
            raise ExportError(f"{source}: there is no 1/model.pt")
        self._file = source / "1" / "model.pt" if config is None else find_model_file(source, config)
        self._module = read_file(self._file)
        self._narrow = manifest.provenance.get("int64") == "narrow"

    def answering(self, specs: Sequence[TensorSpec]) -> Reference:
        zeros = {one.name: torch.zeros(_spec(one).shape, dtype=torch_dtype(one.dtype)) for one in specs}
        call, names = bind_as_triton(forward_of(self._module), zeros)
        model = model_of(self._module, call, None)
        _move(self._module, self._device)
        return _answering(model, names, self._device, narrow=self._narrow)


def _answering(model: TorchModel, names: Sequence[str], device: torch.device, *, narrow: bool) -> Reference:
    def answer(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = [
            to_torch(inputs[name]).to(device=device, dtype=example.dtype) if name in inputs else example.to(device)
            for name, example in zip(names, model.call.tensors, strict=True)
        ]
        return {name: as_declared(name, tensor, narrow=narrow) for name, tensor in model.run(tensors).items()}

    return answer


def _device(name: str) -> torch.device:
    """Without TF32 there: its ten bits are no reference. CUDA is not tested by this project's CI."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no CUDA device here", hint="--device cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device(name)


def _move(module: Any, device: torch.device) -> None:
    if device.type != "cpu":
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"--device {device.type}: a program of torch.export stays on the device it was made for")
        module.to(device)


def _spec(spec: TensorSpec) -> InputSpec:
    sizes = tuple(dim.size if dim.kind is DimKind.FIXED else 1 for dim in spec.dims)
    return InputSpec(spec.name, spec.dtype, sizes)
