"""Small models for TorchScript: what has to convert, and what has to be refused."""

from typing import Dict, List, Optional, Tuple  # noqa: UP035 - TorchScript reads these names

import torch
import torch.nn.functional as F
from torch import nn


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.drop(F.relu(self.norm(self.conv(x)))).mean([2, 3]))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)

    def forward(self, x):
        return self.up(x.repeat(1, 4, 1, 1))


class Switch(nn.Module):
    """A branch on a constant, and one on a size."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.double = double
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        if self.double:
            x = self.layer(x) * 2
        else:
            x = x - 1
        if x.size(1) > 2:
            x = x + 1
        return x


class Counted(nn.Module):
    def forward(self, x):
        for i in range(3):
            x = x * 2 + i
        return x


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(3, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.cell(x)[0]


class Several(nn.Module):
    def forward(self, a, b, index):
        return a + b, index * 2, (a * index).sum(1)


class Named(nn.Module):
    def forward(self, x) -> Dict[str, torch.Tensor]:  # noqa: UP006
        return {"sum": x + 1, "double": x * 2}


class Lists(nn.Module):
    def forward(self, xs: List[torch.Tensor]):  # noqa: UP006
        return torch.cat(xs, 1)


class Number(nn.Module):
    def forward(self, x, times: int):
        return x * times


class Maybe(nn.Module):
    def forward(self, x, mask: Optional[torch.Tensor] = None):  # noqa: UP045
        if mask is not None:
            x = x * mask
        return x + 1


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids):
        return self.table(ids)


class Plain(nn.Module):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(3)

    def forward(self, x):
        return x * self.scale


class Filled(nn.Module):
    def forward(self, x):
        counted = torch.full_like(x, 2, dtype=torch.int64)
        return torch.full_like(x, 2.0) + torch.ones_like(x) * torch.empty_like(x).fill_(3.0) + counted


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.AdaptiveMaxPool2d(3)
        self.both = nn.AdaptiveMaxPool2d((2, 3), return_indices=True)

    def forward(self, x):
        values, places = self.both(x)
        return self.values(x), values, places


class Assigned(nn.Module):
    def forward(self, x):
        y = torch.zeros(x.size(0), 3)
        y[:, 0] = x[:, 1]
        return x + y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.one(x))


class Fixed(nn.Module):
    """Its mode is a constant of its code."""

    training: torch.jit.Final[bool]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def forward(self, x):
        return self.layer(x) + 1


class Branch(nn.Module):
    def forward(self, x):
        if bool(x.sum() > 0):
            x = x + 1
        return x


class Loop(nn.Module):
    def forward(self, x):
        while bool(x.max() > 1):
            x = x / 2
        return x


class Size(nn.Module):
    def forward(self, x):
        return x[:, : int(x[0, 0].item())]


class NonZero(nn.Module):
    def forward(self, x):
        return x.nonzero()


class Mask(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Twice(nn.Module):
    def forward(self, x):
        y = x.masked_select(x > 0).sum() + 1
        if x.size(0) > 100:
            y = x.masked_select(x > 1).sum()
        return y


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Nested(nn.Module):
    def forward(self, x) -> Tuple[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:  # noqa: UP006
        return x, (x + 1, x + 2)


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).relu()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 2)

    def forward(self, features):
        boxes = self.score(features.mean([2, 3]))
        return boxes[boxes[:, 0] > 0]


class Detector(nn.Module):
    """Converts up to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = Head()

    def forward(self, image):
        return self.head(self.backbone(image))


class Methods(nn.Module):
    @torch.jit.export
    def encode(self, x):
        return x * 2
