"""Architectures of torchvision, with seeded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.models import Made, ZooModel
from zoo.torchvision_ops import declare
from zoo.weights import calibrate, enliven, picture


def _close_branches(module: nn.Module) -> nn.Module:
    """Begin the residual branches of a ResNet at zero (torchvision: zero_init_residual); `enliven` opens them a little.

    Fully open, fifty random layers with the statistics of a batch multiply rounding errors by a hundred.
    """
    from torchvision.models.resnet import BasicBlock, Bottleneck

    for block in module.modules():
        if isinstance(block, BasicBlock | Bottleneck):
            last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
            nn.init.zeros_(last.weight)
    return module


def _classifier(name: str, size: int) -> Callable[[], Made]:
    def make() -> Made:
        declare()
        from torchvision.models import get_model

        options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        inputs = {"x": picture(size)}
        return calibrate(enliven(_close_branches(get_model(name, weights=None, **options))), inputs.values()), inputs

    return make


class _Segmentation(nn.Module):
    """The per-pixel scores alone; the auxiliary head is for training."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.module(x)["out"]
        return scores


def _segmentation(name: str) -> Callable[[], Made]:
    def make() -> Made:
        declare()
        from torchvision.models import get_model

        inputs = {"x": picture(128)}
        module = get_model(name, weights=None, weights_backbone=None, num_classes=21)
        return calibrate(_Segmentation(enliven(_close_branches(module))), inputs.values()), inputs

    return make


def _tv(name: str, size: int = 224, **more: Any) -> ZooModel:
    return ZooModel(f"tv-{name}", "torchvision", _classifier(name, size), **more)


MODELS = (
    _tv("alexnet"),
    _tv("resnet18"),
    _tv("resnet50"),
    _tv("resnext50_32x4d", 160),
    _tv("vgg11_bn", 96),
    _tv("densenet121", 128),
    _tv("googlenet", 128),
    _tv("inception_v3", 299),
    _tv("mobilenet_v2"),
    _tv("mobilenet_v3_small"),
    _tv("mnasnet0_5"),
    _tv("shufflenet_v2_x0_5"),
    _tv("squeezenet1_1"),
    _tv("efficientnet_b0"),
    _tv("regnet_y_400mf"),
    _tv("convnext_tiny", 128),
    _tv("vit_b_32"),
    _tv("swin_t", 128),
    _tv("swin_v2_t", 128),
    _tv("maxvit_t"),
    ZooModel("tv-lraspp_mobilenet_v3_large", "torchvision", _segmentation("lraspp_mobilenet_v3_large")),
    ZooModel("tv-deeplabv3_mobilenet_v3_large", "torchvision", _segmentation("deeplabv3_mobilenet_v3_large")),
    ZooModel("tv-fcn_resnet50", "torchvision", _segmentation("fcn_resnet50"), batch_sizes=(1, 2)),
)
