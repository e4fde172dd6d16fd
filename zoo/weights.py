"""Weights for architectures without trained ones: random, seeded, and such that the outputs depend on the inputs.

A parity check proves nothing where the answer is the same whatever is asked. Fresh models often are like that: heads
begin at zero, layer scales near zero, and without statistics from data the signal fades in deep networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_FAINT = 0.01
"""Constants below this are switches that training would open (zero heads, layer scales), not neutral elements."""

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def picture(size: int) -> torch.Tensor:
    """x[4,3,size,size] from -1 to 1, as the samples of an export are: other statistics would not fit them."""
    return torch.rand(4, 3, size, size) * 2 - 1


def enliven(module: nn.Module, seed: int = 0) -> nn.Module:
    """Replace parameters that are one constant: scales (1) vary by a tenth, biases and closed switches become ±0.05."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if (
                parameter.numel() > 1
                and parameter.is_floating_point()
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                value = float(parameter.flatten()[0])
                noise = torch.randn(parameter.shape, generator=generator)
                faint = abs(value) < _FAINT
                parameter.copy_(noise * 0.05 if faint else value * (1 + 0.1 * noise))
    return module


def calibrate(module: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Give batch normalisation the statistics of one batch, so that the signal is as strong at the end as at the start.

    The module is in evaluation mode afterwards.
    """
    module.eval()
    layers = [layer for layer in module.modules() if isinstance(layer, _NORMS) and layer.track_running_stats]
    if layers:
        before = [layer.momentum for layer in layers]
        for layer in layers:
            layer.momentum = 1.0
            layer.train()
        with torch.no_grad():
            module(*inputs, **(kwargs or {}))
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum
            layer.eval()
    return module
