"""PyTorch modules as one program with a symbolic batch axis: the same graph, lowered with a symbol for the size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from rsrv.audit import verify_bundle
from rsrv.bundle import open_bundle
from rsrv.core.errors import ExportError
from rsrv.export import export_bundle
from rsrv.stablehlo import report

pytestmark = pytest.mark.torch


class Encoder(nn.Module):
    """Ids and mask → one vector a row, by way of attention, whose shapes all depend on the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(ids), src_key_padding_mask=mask == 0)
        weight = mask.unsqueeze(-1).float()
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x * 3


def export(module: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path, **options: Any) -> Path:
    options = {"batch_sizes": (1, 4), "collect_git": False, **options}
    return export_bundle("torch", module, inputs, dir=path, dynamic_batch=True, **options)


def test_a_transformer_answers_as_eager_pytorch_does_at_any_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = (torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.long))
    path = export(Encoder(), inputs, tmp_path / "encoder", golden=2, int64="narrow")
    bundle = open_bundle(path)
    assert bundle.manifest.batching.dynamic
    assert bundle.manifest.provenance["batch_export"] == "symbolic"
    found = report((path / "model.mlir").read_bytes())
    assert found.custom_calls == ()
    assert [str(tensor) for tensor in found.signature.arguments[:2]] == ["i32[?,7]", "i32[?,7]"]
    assert verify_bundle(path, batches=[3, 8]).passed(strict=True)


def test_a_module_in_which_the_number_matters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no program for every batch size: torch\.export fixes the batch size") as e:
        export(Branch(), (torch.randn(2, 4),), tmp_path / "branch")
    assert "every batch size gets a program of its own" in str(e.value.hint)
    assert not (tmp_path / "branch").exists()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_torchscript_module_answers_at_any_size(tmp_path: Path) -> None:
    scripted = torch.jit.trace(nn.Linear(4, 2).eval(), torch.randn(2, 4))
    path = export(scripted, (torch.randn(2, 4),), tmp_path / "scripted", golden=2)
    assert open_bundle(path).manifest.batching.dynamic
    assert verify_bundle(path, batches=[3, 8]).passed(strict=True)


def test_an_operator_that_needs_the_number_is_named(tmp_path: Path) -> None:
    class Top(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.topk(x, 2, dim=0).values.sum(0)

    with pytest.raises(ExportError, match=r"no program for every batch size: .*aten\.topk|fixes the batch size"):
        export(Top(), (torch.randn(2, 4),), tmp_path / "top", batch_sizes=(2, 4))


def test_weights_do_not_change(tmp_path: Path) -> None:
    module = nn.Linear(4, 2)
    path = export(module, (torch.randn(2, 4),), tmp_path / "linear")
    from rsrv.bundle.tensors import load_tensors

    found = load_tensors(path / "weights.safetensors")
    np.testing.assert_array_equal(found["weight"], module.weight.detach().numpy())
