"""Bundles of format 2.0, whose axes are written in the reverse order: what reading and writing them takes (§1.11).

A C-order array and the Fortran-order array of the reversed shape are the same bytes; so only letters, and the weights
(which the older system re-lays), have to be turned round. Programs are row-major in both formats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from rsrv.bundle.manifest import Manifest
from rsrv.bundle.safetensors import WeightsHeader
from rsrv.bundle.variants import VariantKey, variable_axes
from rsrv.core.tensors import TensorSpec

Specs = TypeVar("Specs", tuple[TensorSpec, ...], tuple[TensorSpec, ...] | None)


def with_reversed_axes(manifest: Manifest) -> Manifest:
    """`manifest` as it reads when its letters are taken in the other order; variants keep their places in the list."""
    reversed_inputs = tuple(spec.reversed() for spec in manifest.executable_inputs)
    turned = replace(
        manifest,
        executable_inputs=reversed_inputs,
        executable_outputs=tuple(spec.reversed() for spec in manifest.executable_outputs),
        client_inputs=_turned(manifest.client_inputs),
        client_outputs=_turned(manifest.client_outputs),
    )
    return replace(turned, input_shapes=tuple(turned_key(manifest, key) for key in manifest.input_shapes))


def turned_key(manifest: Manifest, key: VariantKey) -> VariantKey:
    """The key of a variant of `manifest` after `with_reversed_axes`: the same sizes in the new order of the axes."""
    sizes = dict(zip(((axis.input, axis.letter) for axis in manifest.variable_axes), key, strict=True))
    axes = variable_axes([spec.reversed() for spec in manifest.executable_inputs])
    return tuple(sizes[axis.input, axis.letter] for axis in axes)


def weights_with_reversed_axes(header: WeightsHeader) -> WeightsHeader:
    """`header` with every shape reversed; where the bytes are stays the same."""
    tensors = {name: replace(entry, shape=entry.shape[::-1]) for name, entry in header.tensors.items()}
    return replace(header, tensors=tensors, column_major=not header.column_major)


def _turned(specs: tuple[TensorSpec, ...] | None) -> tuple[TensorSpec, ...] | None:
    return None if specs is None else tuple(spec.reversed() for spec in specs)
