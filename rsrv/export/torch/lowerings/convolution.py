"""Transposed convolution with groups, which torchax computes with the groups mixed up (relative error above 1), and the
form of a convolution that traced TorchScript holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rsrv.export.torch.lowerings.table import aten, lowering


@lowering(aten.convolution.default)
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """x[n,c,*space]; weight[out,c/groups,*window], transposed: weight[c,out/groups,*window]."""
    spatial = x.ndim - 2
    window = weight.shape[2:]
    stride, padding, dilation, output_padding = (
        _per_axis(values, spatial) for values in (stride, padding, dilation, output_padding)
    )
    if transposed:
        # The same as a convolution over the input spread out by the stride, with the window turned around.
        channels, out = weight.shape[:2]
        grouped = weight.reshape(groups, channels // groups, out, *window)
        kernel = jnp.swapaxes(grouped, 1, 2).reshape(groups * out, channels // groups, *window)
        kernel = jnp.flip(kernel, tuple(range(2, 2 + spatial)))
        reach = [dilation[i] * (window[i] - 1) - padding[i] for i in range(spatial)]
        pads = [(reach[i], reach[i] + output_padding[i]) for i in range(spatial)]
        strides, spread = [1] * spatial, stride
    else:
        kernel, strides, spread = weight, stride, [1] * spatial
        pads = [(size, size) for size in padding]
    y = jax.lax.conv_general_dilated(
        x,
        kernel,
        strides,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(1, -1, *[1] * spatial)


@lowering(aten._convolution.default, aten._convolution.deprecated)
def private_convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_flags: bool,
) -> Any:
    """As `convolution`; the flags choose among kernels of cuDNN."""
    return convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _per_axis(values: Sequence[int], count: int) -> list[int]:
    return list(values) * count if len(values) == 1 else list(values)
