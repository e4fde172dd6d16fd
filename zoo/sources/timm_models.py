"""Architectures of timm, with seeded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zoo.models import Made, ZooModel
from zoo.torchvision_ops import declare
from zoo.weights import calibrate, enliven, picture


def _factory(name: str, size: int) -> Callable[[], Made]:
    def make() -> Made:
        declare()
        import timm

        inputs = {"x": picture(size)}
        return calibrate(enliven(timm.create_model(name, pretrained=False)), inputs.values()), inputs

    return make


def _timm(name: str, size: int = 224, **more: Any) -> ZooModel:
    return ZooModel(f"timm-{name}", "timm", _factory(name, size), **more)


MODELS = (
    _timm("mobilenetv3_small_100"),
    _timm("mobilenetv4_conv_small"),
    _timm("efficientnet_b0"),
    _timm("regnety_004"),
    _timm("ghostnet_100"),
    _timm("repvgg_a0"),
    _timm("resnest14d"),
    _timm("convnextv2_atto"),
    _timm("edgenext_xx_small"),
    _timm("mobilevit_xxs", 256),
    _timm("fastvit_t8", 256),
    _timm("vit_tiny_patch16_224"),
    _timm("deit_tiny_patch16_224"),
    _timm("eva02_tiny_patch14_224"),
    _timm("cait_xxs24_224"),
    _timm("swin_tiny_patch4_window7_224"),
    _timm("mixer_s16_224"),
    _timm("poolformer_s12"),
    _timm("levit_128s"),
    _timm("nfnet_l0"),
)
