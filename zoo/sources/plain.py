"""Two small models that need PyTorch alone: what the tests of the zoo run."""

from __future__ import annotations

import torch
from torch import nn

from zoo.models import Made, ZooModel
from zoo.weights import calibrate, enliven


def _convolutional() -> Made:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    inputs = {"input": torch.rand(4, 3, 16, 16)}
    return calibrate(enliven(module), inputs.values()), inputs


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(self.words(ids))
        return {"logits": self.head(hidden.mean(1)), "best": hidden.argmax(-1)}


def _attentive() -> Made:
    return enliven(_Attention()).eval(), {"ids": torch.randint(0, 50, (4, 7))}


MODELS = (
    ZooModel("plain-conv", "torch.nn", _convolutional),
    ZooModel("plain-attention", "torch.nn", _attentive, batch_sizes=(1, 2)),
)
