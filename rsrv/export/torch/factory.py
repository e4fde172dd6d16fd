"""Models named on the command line: ``MODULE:FN``, ``FILE.pt2`` or ``FILE.pt``, with their examples and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rsrv.core.errors import ExportError, UsageError
from rsrv.export.factory import made_by
from rsrv.export.specs import InputSpec
from rsrv.export.torch.arguments import bind
from rsrv.export.torch.sources import file_facts, load_state, read_file

_SUFFIXES = (".pt2", ".pt")


@dataclass(frozen=True)
class TorchFactory:
    """What a factory returned: the module and its examples, and optionally what `export_bundle` takes."""

    module: Any
    inputs: Any = None
    kwargs: Mapping[str, Any] | None = None
    input_names: Any = None
    output_names: Any = None
    input_batch_axes: Any = None
    output_batch_axes: Any = None
    axis_letters: Any = None
    shape_variants: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)


_KEYS = tuple(key.name for key in fields(TorchFactory) if key.name != "facts")
_WANTED = (
    "want an nn.Module, (module, inputs), (module, inputs, kwargs), or a dict with the key module and optionally "
    + ", ".join(_KEYS[1:])
)


def load_model(
    spec: str,
    *,
    weights: Path | None = None,
    inputs: Sequence[InputSpec] = (),
    inputs_if_missing: Sequence[InputSpec] = (),
) -> TorchFactory:
    """The model that `spec` names.

    Args:
        weights: a state dict (safetensors, or a pickle of tensors alone) to load into the module of a factory.
        inputs: examples from the command line, instead of or beside those of the factory.
        inputs_if_missing: examples for a factory that gives none.

    Raises UsageError, or ExportError with the user's own traceback.
    """
    if spec.endswith(_SUFFIXES):
        path = Path(spec)
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
        if weights is not None:
            raise UsageError(f"--weights has no meaning for {path.name}, which holds its own weights")
        made = TorchFactory(read_file(path), facts=file_facts(path))
    else:
        made = _checked(spec, made_by(spec))
        if weights is not None:
            load_state(made.module, weights)
    if made.inputs is None and made.kwargs is None and not isinstance(made.module, torch.export.ExportedProgram):
        inputs = inputs or inputs_if_missing
    return _with_inputs(spec, made, inputs)


def _with_inputs(spec: str, made: TorchFactory, inputs: Sequence[InputSpec]) -> TorchFactory:
    exported = isinstance(made.module, torch.export.ExportedProgram)
    if not inputs:
        if made.inputs is None and made.kwargs is None and not exported:
            raise UsageError(
                f"{spec} comes without example inputs", hint="give one --inputs NAME=DTYPE[SIZES] for each of them"
            )
        return made
    if made.inputs is None and made.kwargs is None:
        return replace(made, inputs={one.name: one for one in inputs})
    call = bind(made.module.forward, made.inputs, made.kwargs)
    return replace(made, inputs=call.replaced(inputs), kwargs=None)


def _checked(spec: str, made: Any) -> TorchFactory:
    if isinstance(made, nn.Module):
        return TorchFactory(made)
    if isinstance(made, Mapping):
        unknown = sorted(str(key) for key in made if key not in _KEYS)
        if unknown or "module" not in made:
            what = f"unknown keys {', '.join(unknown)}" if unknown else "no module"
            raise ExportError(f"{spec} returned a dict with {what}", hint=_WANTED)
        result = TorchFactory(**made)
    elif isinstance(made, tuple) and len(made) in (2, 3):
        result = TorchFactory(*made)
    else:
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise ExportError(f"{spec} returned {what}", hint=_WANTED)
    if not isinstance(result.module, (nn.Module, torch.export.ExportedProgram)):
        raise ExportError(f"{spec} returned a {type(result.module).__name__} as module", hint=_WANTED)
    return result
