"""What JAX itself computes: the answers that programs made from a JAX function are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

from rsrv.bundle.manifest import Manifest
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError, UsageError
from rsrv.core.tensors import TensorSpec
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


class JaxOriginal:
    """The function that the factory `spec` makes, with its parameters.

    It computes on `device`, in the modes that the provenance in `manifest` states (64-bit, precision). Inputs that the
    bundle left out, since no output depends on them, are zero.
    """

    def __init__(self, spec: str, manifest: Manifest, *, device: str = "cpu") -> None:
        made = call_factory(spec)
        batched = any(tensor.batch_axis is not None for tensor in manifest.executable_inputs)
        source = made.inputs if made.inputs is not None else made.shape_variants[0]
        self._examples = resolve_examples(
            source, names=made.input_names, batch_axes=made.input_batch_axes if batched else None, batched=batched
        )
        self._reference = jax_reference(Model(made.fn, flatten_params(made.params), self._examples, made.output_names))
        self._spec = spec
        self._provenance = manifest.provenance
        self._device = _device(device)

    @property
    def inputs(self) -> list[tuple[str, DType, int]]:
        return [(example.name, example.dtype, len(example.shape)) for example in self._examples]

    def answering(self, specs: Sequence[TensorSpec]) -> Reference:
        names = [example.name for example in self._examples]
        for tensor in specs:
            if tensor.name not in names:
                raise ExportError(
                    f"the bundle has the input {tensor.name!r}; those of {self._spec} are {', '.join(names)}"
                )

        def answer(sample: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            missing = {
                example.name: np.zeros(example.shape_at(_rows(sample, specs)), example.dtype.numpy)
                for example in self._examples
                if example.name not in sample
            }
            with self._modes():
                return self._reference({**sample, **missing})

        return answer

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with ExitStack() as modes:
            modes.enter_context(jax.default_device(self._device))
            if isinstance(x64 := self._provenance.get("x64"), bool):
                modes.enter_context(jax.enable_x64(x64))
            precision = self._provenance.get("matmul_precision")
            if self._device.platform != "cpu":
                modes.enter_context(jax.default_matmul_precision("highest"))  # without TF32, whatever the bundle does
            elif precision in ("default", "high", "highest"):
                modes.enter_context(jax.default_matmul_precision(precision))
            yield


def _device(name: str) -> jax.Device:
    try:
        return jax.devices(name)[0]
    except RuntimeError as error:
        raise UsageError(
            f"--device {name}: JAX has no such device: {str(error).partition(chr(10))[0]}",
            hint="install JAX with its CUDA extra, or use --device cpu" if name == "cuda" else None,
        ) from None


def _rows(sample: Mapping[str, np.ndarray], specs: Sequence[TensorSpec]) -> int | None:
    for tensor in specs:
        if tensor.batch_axis is not None:
            return int(sample[tensor.name].shape[tensor.batch_axis])
    return None
