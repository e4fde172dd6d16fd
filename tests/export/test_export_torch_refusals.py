"""Models that no program can express: one message with the operator, the line of the model, and a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import nn

from rsrv.core.errors import ExportError
from rsrv.export import export_bundle
from rsrv.export.torch.arguments import bind
from rsrv.export.torch.dtypes import as_declared
from rsrv.export.torch.lowered import Entry
from rsrv.export.torch.model import TorchModel
from rsrv.export.torch.sources import model_of

pytestmark = pytest.mark.torch

_LIBRARY = torch.library.Library("rsrv_test", "DEF")
_LIBRARY.define("twice(Tensor x) -> Tensor")
_LIBRARY.define("nms(Tensor x) -> Tensor")
_LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
_LIBRARY.impl("nms", lambda x: torch.arange(len(x)), "CPU")
torch.library.register_fake("rsrv_test::twice")(torch.empty_like)
torch.library.register_fake("rsrv_test::nms")(
    lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)
)


class Branch(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:
            return x + 1
        return x - 1


class Loop(nn.Module):
    def forward(self, x: Any) -> Any:
        while x.max() > 1:
            x = x / 2
        return x


class Size(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:, : int(x[0, 0].item())]


class NonZero(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.nonzero()


class Mask(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[x > 0]


class MaskedSelect(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.masked_select(x > 0).sum()


class Unique(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.unique(x)


class Repeat(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.repeat_interleave(x, (x[0] > 0).long(), dim=1)


class Suppression(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.ops.rsrv_test.nms(x)


class Random(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + torch.rand_like(x)


class Dropout(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.dropout(x, 0.5, training=True)


class Unknown(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.ops.rsrv_test.twice(x)


class Quantised(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


class Scan(nn.Module):
    def forward(self, x: Any) -> Any:
        from torch._higher_order_ops import scan

        return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(4), x)[1]


class Mapped(nn.Module):
    def forward(self, x: Any) -> Any:
        from torch._higher_order_ops.map import map as mapped

        return mapped(lambda row: row.sin() + 1, x)


class MaskedValues(nn.Module):
    def forward(self, x: Any) -> Any:
        y = x.clone()
        y[x > 0] = x[0, :2]
        return y


DATA = "decides by the values of a tensor"
SIZED = "depends on values, and a program has fixed shapes"
DRAWS = "draws random numbers"
CUT = "end the model before it"


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*quantiz:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "says", "line", "hint"),
    [
        (Branch, DATA, "if x.sum() > 0:", "torch.where"),
        (Loop, DATA, "while x.max() > 1:", "torch.cond"),
        (Size, DATA, "return x[:, : int(x[0, 0].item())]", "upper bound with a mask"),
        (NonZero, f"aten.nonzero .*the size of its result {SIZED}", "return x.nonzero()", CUT),
        (Mask, f"aten.index.Tensor .*indexing with a boolean mask .*{SIZED}", "return x[x > 0]", "torch.where"),
        (MaskedSelect, f"aten.masked_select .*{SIZED}", "return x.masked_select(x > 0).sum()", "torch.where"),
        (Unique, f"aten._unique2 .*{SIZED}", "return torch.unique(x)", CUT),
        (Repeat, f"aten.repeat_interleave.* {SIZED}", "return torch.repeat_interleave", CUT),
        (Suppression, f"rsrv_test.nms .*{SIZED}", "return torch.ops.rsrv_test.nms(x)", CUT),
        (Random, f"aten.rand_like .*{DRAWS}", "return x + torch.rand_like(x)", "an input of the model"),
        (Dropout, f"aten.dropout .*{DRAWS}", "return F.dropout", "evaluation mode"),
        (Unknown, "rsrv_test.twice .*there is no lowering", "return torch.ops.rsrv_test.twice(x)", CUT),
        (Quantised, "aten.quantize_per_tensor .*no lowering", "return torch.quantize_per_tensor", CUT),
        (Scan, "scan .*there is no lowering", "return scan(", "torch.while_loop"),
        (Mapped, "map_impl .*there is no lowering", "return mapped(", "torch.vmap"),
        (MaskedValues, "aten.index_put.* more than one value .* mask", "y[x > 0] = x[0, :2]", "torch.where"),
    ],
)
def test_the_message_names_operator_line_and_way_out(
    model: Callable[[], nn.Module], says: str, line: str, hint: str
) -> None:
    x = torch.rand(3, 4) + 0.5
    with pytest.raises(ExportError, match=says) as raised:
        lower(TorchModel(model(), bind(model().forward, x, None), None))
    assert f"{__file__}:" in raised.value.message
    assert line in raised.value.message
    assert hint in str(raised.value.hint)
    assert "\n" not in raised.value.message.partition("JAX has removed")[0].strip()


def lower(model: TorchModel) -> None:
    from rsrv.export.inputs import Example
    from rsrv.export.torch.arguments import input_spec

    with jax.enable_x64(True):
        graph = model.export(model.call.tensors)
        entry = Entry.of([graph], model.call.names, drop_unused_inputs=False)
        specs = map(input_spec, model.call.names, model.call.tensors)
        entry.lower(graph, [Example(one.name, one.dtype, one.shape, None) for one in specs], "keep", "cpu", "1.13.7")


@pytest.mark.parametrize(
    ("module", "inputs", "says"),
    [
        (Branch(), torch.rand(2, 3), DATA),
        (Random(), torch.rand(2, 3), DRAWS),
        (nn.Linear(3, 2), torch.rand(2, 4), "running the model for input\\[2, 4\\] raised RuntimeError"),
        (nn.Linear(3, 2), (torch.rand(2, 3), torch.rand(2)), "the examples do not fit forward"),
        (nn.Linear(3, 2), [], "the examples do not fit forward"),
        (nn.LSTM(3, 2), torch.rand(1, 2, 3), "output 1 \\('output_1'\\) is a tuple, want a tensor"),
        (nn.Linear(3, 2, dtype=torch.complex64), torch.rand(2, 3).cfloat(), "input 'input' is complex64"),
        (lambda x: x, torch.rand(2), "the model is a function, want an nn.Module"),
    ],
)
def test_nothing_is_written_when_an_export_fails(module: Any, inputs: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=says):
        export_bundle("torch", module, inputs, dir=tmp_path / "net", collect_git=False)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_no_bundle_can_hold_is_named() -> None:
    with pytest.raises(ExportError, match="output 'spectrum' is complex64, which no bundle can hold") as raised:
        as_declared("spectrum", torch.zeros(2, dtype=torch.complex64), narrow=False)
    assert "view_as_real" in str(raised.value.hint)


def test_a_model_that_fails_shows_its_own_lines_only() -> None:
    class Broken(nn.Module):
        def forward(self, x: Any) -> Any:
            raise ValueError("no such token")

    model = model_of(Broken(), torch.rand(2), None)
    with pytest.raises(ExportError) as raised:
        model.run(model.call.tensors)
    assert raised.value.message.startswith("running the model for x[2] raised ValueError: no such token")
    assert 'raise ValueError("no such token")' in raised.value.message
    assert "site-packages" not in raised.value.message
