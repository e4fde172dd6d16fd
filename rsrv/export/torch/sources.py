"""What can be exported: an nn.Module, a TorchScript module, a program that torch.export made, and files of the two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rsrv.core.errors import ExportError
from rsrv.export.options import ExportOptions
from rsrv.export.specs import InputSpec
from rsrv.export.torch.arguments import bind, input_spec
from rsrv.export.torch.dtypes import bundle_dtype
from rsrv.export.torch.lowered import narrowed
from rsrv.export.torch.model import ExportedModel, TorchModel
from rsrv.export.torch.refusals import check_graph
from rsrv.export.torch.torchscript import Wrap, holds_script, load_script, require_forward
from rsrv.export.torch.torchscript_model import ScriptModel


def model_of(
    module: Any,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    output_names: Sequence[str] | None = None,
    wrap: Wrap | None = None,
) -> TorchModel:
    """The model with its example call; `wrap` is for TorchScript alone.

    Raises ExportError for what is no model, and for examples that do not fit.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return ScriptModel.of(module, inputs, kwargs, output_names, wrap)
    if wrap is not None:
        raise ExportError(
            f"wrap is for TorchScript modules, and the model is a {type(module).__name__}",
            hint="export the module that wraps it",
        )
    if isinstance(module, torch.export.ExportedProgram):
        return _exported(module, inputs, kwargs, output_names)
    if not isinstance(module, nn.Module):
        raise ExportError(f"the model is a {type(module).__name__}, want an nn.Module")
    if holds_script(module):
        return ScriptModel.of(module, inputs, kwargs, output_names, None)
    return TorchModel(module, bind(module.forward, inputs, kwargs), output_names)


def read_file(path: Path) -> Any:
    """The model in a ``.pt2`` (torch.export) or ``.pt`` (TorchScript) file. Raises ExportError."""
    if path.suffix != ".pt2":
        return load_script(path)
    try:
        return torch.export.load(path)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ExportError(f"{path} is no program of torch.export: {first}") from error


def forward_of(module: Any) -> Callable[..., Any]:
    """What is called of a model that `read_file` returned. Raises ExportError for a TorchScript module without it."""
    if isinstance(module, torch.jit.ScriptModule):
        require_forward(module)
    elif isinstance(module, torch.export.ExportedProgram):
        module = module.module()
    found: Callable[..., Any] = module.forward
    return found


def file_facts(path: Path) -> dict[str, Any]:
    """What provenance says about a model that came as a file."""
    kind = "exported_program" if path.suffix == ".pt2" else "torchscript"
    return {f"{kind}_path": str(path), f"{kind}_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def load_state(module: nn.Module, path: str | Path) -> None:
    """Load a state dict (safetensors, or a pickle that holds tensors only) into `module`. Raises ExportError."""
    state = _read_state(Path(path))
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        text = "; ".join(line.strip() for line in str(error).splitlines()[1:])[:600]
        raise ExportError(f"{path} does not fit the module: {text}") from None


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ExportError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except Exception as error:
            raise ExportError(f"{path} is no safetensors file: {error}") from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ExportError(
            f"{path} is no state dict: {str(error).strip().partition(chr(10))[0]}",
            hint="save module.state_dict(); a pickled module would run code when it is loaded",
        ) from None
    if isinstance(state, Mapping) and isinstance(inner := state.get("state_dict"), Mapping):
        state = inner
    if not isinstance(state, Mapping):
        raise ExportError(f"{path} holds a {type(state).__name__}, want a state dict")
    return dict(state)


def input_specs(model: TorchModel, options: ExportOptions) -> tuple[list[InputSpec], ExportOptions]:
    """The inputs, and the shape variants of `options`, in the words that every front end shares."""
    names = model.call.names
    if (chosen := options.input_names) is not None:
        if isinstance(chosen, str) or len(chosen) != len(names):
            raise ExportError(f"input_names is {chosen!r}, but there are {len(names)} inputs: {', '.join(names)}")
        names = tuple(chosen)
    specs = [_narrow(input_spec(name, tensor), options) for name, tensor in zip(names, model.call.tensors, strict=True)]
    variants = options.shape_variants
    if isinstance(variants, Sequence) and not isinstance(variants, str):
        variants = [_variant(variant, names, options) for variant in variants]
    return specs, replace(options, shape_variants=variants, input_names=None)


def _variant(variant: Any, names: Sequence[str], options: ExportOptions) -> Any:
    """Tensors as specs; what is no tensor stays, and is judged by those who resolve it."""
    if isinstance(variant, Mapping):
        return {name: _spec(str(name), value, options) for name, value in variant.items()}
    if isinstance(variant, torch.Tensor):
        variant = (variant,)
    if isinstance(variant, (tuple, list)) and len(variant) == len(names):
        return [_spec(name, value, options) for name, value in zip(names, variant, strict=True)]
    return variant


def _spec(name: str, value: Any, options: ExportOptions) -> Any:
    if isinstance(value, torch.Tensor) and bundle_dtype(value.dtype) is not None:
        value = input_spec(name, value)
    return _narrow(value, options) if isinstance(value, InputSpec) else value


def _narrow(spec: InputSpec, options: ExportOptions) -> InputSpec:
    return replace(spec, dtype=narrowed(spec.dtype, options.int64))


def _exported(
    program: torch.export.ExportedProgram,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    output_names: Sequence[str] | None,
) -> TorchModel:
    """Through the module that the program unlifts to; its graph is checked first, while it knows its source lines."""
    check_graph(program.graph_module)
    if inputs is None and kwargs is None:
        if program.example_inputs is None:
            raise ExportError("the exported program holds no example inputs", hint="give examples with --inputs")
        inputs, kwargs = program.example_inputs
    module = program.module()
    call = bind(module.forward, inputs, kwargs)
    return ExportedModel(program, module, call, output_names)
