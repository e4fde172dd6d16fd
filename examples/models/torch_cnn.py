"""A small convolutional network with batch normalisation in PyTorch, exported in evaluation mode.

rsrv export torch examples/models/torch_cnn.py:make --out models/torch_cnn --batch-sizes 1,8 --golden 3
"""

import torch
from torch import nn


class Block(nn.Module):
    """f32[n,c,h,w] → f32[n,features,h/2,w/2]: two convolutions, the input added to their result."""

    def __init__(self, channels, features):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, features, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(),
            nn.Conv2d(features, features, 3, padding=1, bias=False),
            nn.BatchNorm2d(features),
        )
        self.shortcut = nn.Conv2d(channels, features, 1, stride=2)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


class CNN(nn.Module):
    """``image`` f32[n,1,28,28] → ``logits`` f32[n,10]."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 8), Block(8, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, image):
        return {"logits": self.head(self.blocks(image).mean((2, 3)))}


def make():
    """The network and an example. Random parameters, and statistics that are not zeros and ones, stand for training."""
    torch.manual_seed(0)
    model = CNN()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model, {"image": torch.rand(1, 1, 28, 28)}
