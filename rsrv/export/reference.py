"""The original model behind a bundle, ``jax:SPEC`` or ``torch:SPEC``, as a function from its inputs to its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rsrv.bundle.golden import Golden
from rsrv.bundle.manifest import Manifest
from rsrv.core.errors import ExportError, UsageError
from rsrv.core.tensors import TensorSpec
from rsrv.export.golden import SEED, Range, Reference, make_samples
from rsrv.export.inputs import Example


def load_reference(against: str, manifest: Manifest) -> Reference:
    """The model that ``jax:MODULE:FN`` or ``torch:…`` names, to be called with the executable inputs of a bundle.

    It computes in the modes that the bundle's provenance states (64-bit, precision). Outputs that have other names than
    the bundle's are matched by position. Raises UsageError, or ExportError when the model cannot be made.
    """
    frontend, colon, spec = against.partition(":")
    if frontend not in ("jax", "torch") or not colon or not spec:
        raise UsageError(
            f"--against {against} is none of golden, jax:SPEC and torch:SPEC", hint="for example jax:model.py:make"
        )
    if frontend == "jax":
        from rsrv.export.jax_reference import load_jax_reference as load
    else:
        from rsrv.export.torch.reference import load_torch_reference as load
    return _named_as(manifest, load(spec, manifest))


def sweep(
    reference: Reference, *, count: int = 1, seed: int = SEED, ranges: Mapping[str, Range] | None = None
) -> Callable[[Sequence[tuple[TensorSpec, tuple[int, ...]]]], list[Golden]]:
    """Samples of `verify_bundle`: `count` for the shapes of every program, drawn with `seed` + batch size (X-54)."""

    def goldens(inputs: Sequence[tuple[TensorSpec, tuple[int, ...]]]) -> list[Golden]:
        examples = [Example(spec.name, spec.dtype, shape, spec.batch_axis) for spec, shape in inputs]
        batch = next((shape[spec.batch_axis] for spec, shape in inputs if spec.batch_axis is not None), 0)
        samples = make_samples(examples, count, seed + batch, ranges)
        return [Golden(sample, reference(sample)) for sample in samples]

    return goldens


def answered(reference: Reference, samples: Sequence[Mapping[str, np.ndarray]]) -> list[Golden]:
    """Samples that the caller brings, with the answers of `reference`."""
    return [Golden(sample, reference(sample)) for sample in samples]


def _named_as(manifest: Manifest, reference: Reference) -> Reference:
    names = [spec.name for spec in manifest.executable_outputs]

    def answer(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = dict(reference(inputs))
        if set(outputs) == set(names):
            return outputs
        if len(outputs) != len(names):
            raise ExportError(
                f"the original returns {len(outputs)} outputs ({', '.join(outputs)}), the bundle has {', '.join(names)}"
            )
        return dict(zip(names, outputs.values(), strict=True))

    return answer
