"""What JAX itself computes: the answers that programs made from a JAX function are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from rsrv.bundle.manifest import Manifest
from rsrv.core.errors import ExportError
from rsrv.export.factory import call_factory
from rsrv.export.golden import Reference
from rsrv.export.inputs import resolve_examples
from rsrv.export.lowering import Model
from rsrv.export.outputs import named_outputs
from rsrv.export.params import flatten_params
from rsrv.export.usercode import user_code


def jax_reference(model: Model) -> Reference:
    """``jax.jit`` of the function with its parameters, in the modes that JAX is in when it is called."""
    names: list[str] = []
    inputs = [example.name for example in model.examples]

    def flat(*args: Any) -> list[jax.Array]:
        result = model.fn(model.params.rebuild(args[len(inputs) :]), *args[: len(inputs)])
        pairs = named_outputs(result, model.output_names)
        names[:] = [name for name, _ in pairs]
        return [value for _, value in pairs]

    compiled = jax.jit(flat)

    def answer(sample: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arguments = [*(sample[name] for name in inputs), *(weight.value for weight in model.params.weights)]
        with user_code("running the function"):
            results = compiled(*arguments)
        return {name: np.asarray(value) for name, value in zip(names, results, strict=True)}

    return answer


def load_jax_reference(spec: str, manifest: Manifest) -> Reference:
    """The function that the factory `spec` makes, called with the executable inputs of a bundle.

    Inputs that the bundle left out, since no output depends on them, are zero.
    """
    made = call_factory(spec)
    batched = any(tensor.batch_axis is not None for tensor in manifest.executable_inputs)
    source = made.inputs if made.inputs is not None else made.shape_variants[0]
    examples = resolve_examples(
        source, names=made.input_names, batch_axes=made.input_batch_axes if batched else None, batched=batched
    )
    names = [example.name for example in examples]
    for tensor in manifest.executable_inputs:
        if tensor.name not in names:
            raise ExportError(f"the bundle has the input {tensor.name!r}; those of {spec} are {', '.join(names)}")
    reference = jax_reference(Model(made.fn, flatten_params(made.params), examples, made.output_names))

    def answer(sample: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        missing = {
            example.name: np.zeros(example.shape_at(_rows(sample, manifest)), example.dtype.numpy)
            for example in examples
            if example.name not in sample
        }
        with ExitStack() as modes:
            if isinstance(x64 := manifest.provenance.get("x64"), bool):
                modes.enter_context(jax.enable_x64(x64))
            if (precision := manifest.provenance.get("matmul_precision")) in ("default", "high", "highest"):
                modes.enter_context(jax.default_matmul_precision(precision))
            return reference({**sample, **missing})

    return answer


def _rows(sample: Mapping[str, np.ndarray], manifest: Manifest) -> int | None:
    for tensor in manifest.executable_inputs:
        if tensor.batch_axis is not None:
            return int(sample[tensor.name].shape[tensor.batch_axis])
    return None
