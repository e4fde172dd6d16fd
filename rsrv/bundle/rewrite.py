"""The manifest of a bundle, written anew in the row-major format 3.0 or in the older column-major 2.0 (§1.11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rsrv.bundle.manifest import FORMAT_VERSION, KEYS, OLDER_FORMAT_VERSION, Manifest
from rsrv.bundle.problems import violation
from rsrv.bundle.variants import variable_axes, variant_entries
from rsrv.core.errors import BundleError
from rsrv.core.shapes import AUTO_LETTERS, BATCH_LETTERS
from rsrv.core.tensors import DimKind, TensorSpec

_TENSORS = ("executable_inputs", "executable_outputs", "client_inputs", "client_outputs")
_OURS_ALONE = ("hooks", "axis_order")
_HOOK_KEYS = ("mode", "processes", "timeout_seconds")


def rewritten(
    manifest: Manifest, mapping: Mapping[str, Any], *, name: str, to: str, drop_hooks: bool = False
) -> dict[str, Any]:
    """The manifest for format `to`, without ``files``.

    Args:
        manifest: what was read, axes row-major.
        mapping: the parsed text that it was read from; gives the keys that have no axes.
        name: of the new bundle.
        drop_hooks: leave out what only hooks can serve.

    Keys that the format does not know are left out. Letters are kept, except where the other format cannot have them.
    Raises BundleError for what format 2.0 cannot express.
    """
    older = to == OLDER_FORMAT_VERSION
    if older and manifest.batching.dynamic:
        raise violation(
            BundleError,
            "B-12a",
            f"bundle {manifest.name!r} has a symbolic batch axis, which format {to} cannot express",
        )
    result = {key: value for key, value in mapping.items() if key in KEYS or str(key).startswith("x-")}
    for key in ("files", *(_OURS_ALONE if older else ()), *(("hooks", *_TENSORS[2:]) if drop_hooks else ())):
        result.pop(key, None)
    inputs = _inputs_for(manifest.executable_inputs, older=older)
    for key in _TENSORS:
        specs = inputs if key == "executable_inputs" else getattr(manifest, key)
        if key in result:
            result[key] = [_entry(spec.reversed() if older else _without_capitals(spec)) for spec in specs or ()]
    if manifest.input_shapes:
        result["input_shapes"] = variant_entries(manifest.input_shapes, variable_axes(inputs))
    result |= {"format_version": to, "name": name}
    if "description" in mapping:
        result["description"] = manifest.description
    if manifest.is_meta:
        result["meta"] = {"calls": list(manifest.meta_calls)}
    if "batching" in mapping or not manifest.is_meta:
        dynamic = {"dynamic": True} if manifest.batching.dynamic else {}
        result["batching"] = {"compiled_batch_sizes": list(manifest.batching.compiled_batch_sizes), **dynamic}
    if "hooks" in result:
        result["hooks"] = {key: value for key, value in mapping["hooks"].items() if key in _HOOK_KEYS}
    if not manifest.provenance:
        result.pop("provenance", None)
    if to == FORMAT_VERSION:
        result["axis_order"] = "row_major"
    return result


def _inputs_for(inputs: Sequence[TensorSpec], *, older: bool) -> tuple[TensorSpec, ...]:
    """The executable inputs with letters that ``input_shapes`` can name in the format.

    Format 2.0 has bare letters only, so no two variable axes may share one (B-48).
    """
    if not older:
        return tuple(_without_capitals(spec) for spec in inputs)
    taken: set[str] = set()
    renamed = []
    for spec in inputs:
        shared = [axis for axis in spec.variable_axes if spec.letters[axis] in taken]
        spec = _renamed(spec, shared, taken)
        taken |= {spec.letters[axis] for axis in spec.variable_axes}
        renamed.append(spec)
    return tuple(renamed)


def _without_capitals(spec: TensorSpec) -> TensorSpec:
    """Format 3.0 has no ``N`` and ``B``, which read like the batch axis (B-28)."""
    return _renamed(spec, [i for i, letter in enumerate(spec.letters) if letter in BATCH_LETTERS.upper()], ())


def _renamed(spec: TensorSpec, axes: Sequence[int], taken: Iterable[str]) -> TensorSpec:
    """`spec` with letters of its own at `axes`, none of them in `taken`."""
    letters = list(spec.letters)
    for axis in axes:
        free = [letter for letter in AUTO_LETTERS if letter not in letters and letter not in taken]
        if not free:
            raise violation(BundleError, "B-29", f"tensor {spec.name!r}: no letter is left for axis {axis}")
        letters[axis] = free[0]
    return replace(spec, letters="".join(letters)) if axes else spec


def _entry(spec: TensorSpec) -> dict[str, Any]:
    dims = {
        letter: dim.size if dim.kind is DimKind.FIXED else -1
        for letter, dim in zip(spec.letters, spec.dims, strict=True)
        if dim.kind is not DimKind.BATCH
    }
    return {
        "name": spec.name,
        "dtype": spec.dtype.value,
        "shape": spec.letters,
        **({"dims": dims} if dims else {}),
    }
