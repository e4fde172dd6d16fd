"""Antialiased resizing: one small matrix per axis, computed as torch's CPU kernel computes its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rsrv.export.torch.lowerings.table import aten, lowering


@lowering(aten._upsample_bilinear2d_aa.default)
def bilinear(
    x: Any, size: Sequence[int], align_corners: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Any:
    """x[n,c,h,w] → [n,c,*size]."""
    return _resize(x, size, align_corners, (scale_h, scale_w), _triangle, 1.0)


@lowering(aten._upsample_bicubic2d_aa.default)
def bicubic(
    x: Any, size: Sequence[int], align_corners: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Any:
    """x[n,c,h,w] → [n,c,*size]."""
    return _resize(x, size, align_corners, (scale_h, scale_w), _cubic, 2.0)


@lowering(aten._upsample_bilinear2d_aa.vec)
def bilinear_vec(x: Any, size: Sequence[int] | None, align_corners: bool, scales: Sequence[float] | None = None) -> Any:
    return bilinear(x, _size(x, size, scales), align_corners, *(scales or (None, None)))


@lowering(aten._upsample_bicubic2d_aa.vec)
def bicubic_vec(x: Any, size: Sequence[int] | None, align_corners: bool, scales: Sequence[float] | None = None) -> Any:
    return bicubic(x, _size(x, size, scales), align_corners, *(scales or (None, None)))


def _size(x: Any, size: Sequence[int] | None, scales: Sequence[float] | None) -> Sequence[int]:
    if size is not None:
        return size
    assert scales is not None  # ATen's schema: one of the two is given
    return [int(extent * scale) for extent, scale in zip(x.shape[-2:], scales, strict=True)]


def _resize(
    x: Any,
    size: Sequence[int],
    align_corners: bool,
    scales: tuple[float | None, float | None],
    kernel: Callable[[np.ndarray], np.ndarray],
    radius: float,
) -> Any:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rows, columns = (
        _weights(extent, out, align_corners, scale, kernel, radius).astype(wide)
        for extent, out, scale in zip(x.shape[-2:], size, scales, strict=True)
    )
    return jnp.einsum("oh,...hw,pw->...op", rows, x, columns).astype(x.dtype)


def _weights(
    extent: int,
    out: int,
    align_corners: bool,
    factor: float | None,
    kernel: Callable[[np.ndarray], np.ndarray],
    radius: float,
) -> np.ndarray:
    """[out,extent]: the share of each element in each result; after `_compute_indices_min_size_weights_aa` of ATen."""
    if align_corners:
        scale = (extent - 1) / (out - 1) if out > 1 else 0.0
    else:
        scale = 1 / factor if factor else extent / out
    stretch = max(scale, 1.0)
    weights = np.zeros((out, extent))
    for i in range(out):
        centre = scale * (i + 0.5)
        low = max(int(centre - radius * stretch + 0.5), 0)
        high = min(int(centre + radius * stretch + 0.5), extent)
        share = kernel((np.arange(low, high) - centre + 0.5) / stretch)
        weights[i, low:high] = share / share.sum()
    return weights


def _triangle(x: np.ndarray) -> np.ndarray:
    share: np.ndarray = np.maximum(0, 1 - np.abs(x))
    return share


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic with a = -0.5, as in Pillow."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    value: np.ndarray = np.where(x < 1, near, np.where(x < 2, far, 0))
    return value
