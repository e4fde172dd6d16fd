"""The original model behind a bundle, as a function from its inputs to its outputs, on either side of the hooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from rsrv.bundle.golden import Golden
from rsrv.bundle.manifest import Manifest
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError, UsageError
from rsrv.core.tensors import TensorSpec
from rsrv.export.golden import SEED, Range, Reference, make_samples
from rsrv.export.inputs import Example

Side = Literal["program", "client"]
"""What the original takes and returns: the tensors of the program, or those that clients see in front of the hooks."""

_LATER = re.compile(r"(.+)__dynamic([2-9]|[1-9][0-9]+)?")


class Original(Protocol):
    """A model of a framework.

    `inputs` has name, dtype and rank of each; empty when they have no names of their own, and are taken in order.
    """

    @property
    def inputs(self) -> Sequence[tuple[str, DType, int]]: ...

    def answering(self, specs: Sequence[TensorSpec]) -> Reference:
        """The function from arrays for `specs` to the outputs. Raises ExportError for an input that is not there."""
        ...


def load_original(against: str, manifest: Manifest, *, device: str = "cpu") -> Original:
    """The model that ``jax:MODULE:FN`` or ``torch:…`` names.

    It computes on `device` (``cpu`` or ``cuda``; without TF32), in the modes that the bundle's provenance states
    (64-bit, precision). Raises UsageError, or ExportError when the model cannot be made.
    """
    frontend, colon, spec = against.partition(":")
    if frontend not in ("jax", "torch") or not colon or not spec:
        raise UsageError(
            f"--against {against} is none of golden, jax:SPEC and torch:SPEC", hint="for example jax:model.py:make"
        )
    if frontend == "jax":
        from rsrv.export.jax_reference import JaxOriginal

        return JaxOriginal(spec, manifest, device=device)
    from rsrv.export.torch.reference import TorchOriginal

    return TorchOriginal(spec, manifest, device=device)


def load_source(directory: Path, manifest: Manifest, *, device: str = "cpu") -> Original:
    """The model in a directory of a Triton repository (`find_source`), which takes what clients send, in order."""
    from rsrv.export.torch.reference import SourceOriginal

    return SourceOriginal(directory, manifest, device=device)


def find_source(roots: Sequence[Path], bundle: str) -> Path:
    """The directory of the model that the bundle was converted from: ``ROOT/NAME``.

    ``NAME__dynamic`` is of the second root that has NAME, ``NAME__dynamic2`` of the third (X-42). Raises ExportError.
    """
    found = [root / bundle for root in roots if (root / bundle).is_dir()]
    if found:
        return found[0]
    if (later := _LATER.fullmatch(bundle)) is not None:
        again = [root / later[1] for root in roots if (root / later[1]).is_dir()]
        number = int(later[2] or 1)
        if number < len(again):
            return again[number]
    listed = ", ".join(map(str, roots))
    raise ExportError(f"there is no model {bundle!r} in {listed}", hint=f"--exclude {bundle} leaves the bundle out")


def side_of(original: Original, manifest: Manifest) -> Side:
    """On which side of the hooks `original` stands, by the names, kinds and ranks of what it takes.

    An original that fits both is the program, which is what `rsrv export` makes bundles of.
    """
    if manifest.client_inputs is None or not original.inputs:
        return "program" if original.inputs else "client"
    kinds = {name: (_kind(dtype), rank) for name, dtype, rank in original.inputs}

    def fits(specs: Sequence[TensorSpec]) -> bool:
        return all(kinds.get(spec.name) == (_kind(spec.dtype), spec.rank) for spec in specs)

    return "client" if fits(manifest.wire_inputs) and not fits(manifest.executable_inputs) else "program"


def reference_on(side: Side, original: Original, manifest: Manifest) -> Reference:
    """The answers of `original` under the names of the bundle's outputs: by name when they agree, else by position."""
    inputs = manifest.executable_inputs if side == "program" else manifest.wire_inputs
    outputs = manifest.executable_outputs if side == "program" else manifest.wire_outputs
    names = [spec.name for spec in outputs]
    if not original.inputs:
        from rsrv.export.repository.triton import tensor_order

        names = [names[i] for i in tensor_order(names)]
    return _named_as(names, original.answering(inputs))


def sweep(
    reference: Reference, *, count: int = 1, seed: int = SEED, ranges: Mapping[str, Range] | None = None
) -> Callable[[Sequence[tuple[TensorSpec, tuple[int, ...]]]], list[Golden]]:
    """Samples of `verify_bundle`: `count` for the shapes of every program, drawn with `seed` + batch size (X-54)."""

    def goldens(inputs: Sequence[tuple[TensorSpec, tuple[int, ...]]]) -> list[Golden]:
        return [
            Golden(sample, reference(sample))
            for sample in random_samples(inputs, count=count, seed=seed, ranges=ranges)
        ]

    return goldens


def random_samples(
    inputs: Sequence[tuple[TensorSpec, tuple[int, ...]]],
    *,
    count: int = 1,
    seed: int = SEED,
    ranges: Mapping[str, Range] | None = None,
) -> list[dict[str, np.ndarray]]:
    """`count` sets of values, drawn with `seed` + batch size."""
    examples = [Example(spec.name, spec.dtype, shape, spec.batch_axis) for spec, shape in inputs]
    batch = next((shape[spec.batch_axis] for spec, shape in inputs if spec.batch_axis is not None), 0)
    return make_samples(examples, count, seed + batch, ranges)


def _named_as(names: Sequence[str], reference: Reference) -> Reference:
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


def _kind(dtype: DType) -> str:
    """Integers of any width are of one kind: a bundle may have narrowed them."""
    if dtype is DType.BOOL:
        return "bool"
    return "integer" if dtype.value[0] in "iu" else "float"
