"""TorchScript modules that cannot be exported: the operator, the line of the model, and a way out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from rsrv.core.errors import ExportError
from rsrv.export import export_bundle
from rsrv.export.torch.model import TorchModel
from rsrv.export.torch.sources import model_of, read_file
from tests.support import torch_scripts as scripts

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

X = torch.rand(3, 4) + 0.5
DATA = "the values of a tensor decide what to compute"
SIZED = "depends on values, and a program has fixed shapes"


def script(module: nn.Module) -> Any:
    return torch.jit.script(module.eval())


def export(model: TorchModel) -> None:
    model.export(model.call.tensors)


@pytest.mark.parametrize(
    ("module", "says", "line", "hint"),
    [
        (scripts.Branch(), f"prim::If .*{DATA}", "if bool(x.sum() > 0):", "torch.where"),
        (scripts.Loop(), f"prim::Loop .*{DATA}", "while bool(x.max() > 1):", "torch.cond"),
        (scripts.Size(), DATA, "return x[:, : int(x[0, 0].item())]", "upper bound with a mask"),
        (scripts.NonZero(), f"aten.nonzero .*the size of its result {SIZED}", "return x.nonzero()", "end the model"),
        (scripts.Mask(), f"aten.index.Tensor .*boolean mask .*{SIZED}", "return x[x > 0]", "torch.where"),
        (scripts.Twice(), f"aten.masked_select .*{SIZED}", "the first of 2 places", "torch.where"),
        (scripts.Random(), "aten.rand_like .*draws random numbers", "x + torch.rand_like(x)", "evaluation mode"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("saved", [False, True], ids=["here", "saved"])
def test_the_message_names_operator_line_and_way_out(
    module: nn.Module, says: str, line: str, hint: str, saved: bool, tmp_path: Path
) -> None:
    made = script(module)
    if saved:
        torch.jit.save(made, tmp_path / "net.pt")
        made = read_file(tmp_path / "net.pt")
    with pytest.raises(ExportError, match=says) as raised:
        export(model_of(made, X, None))
    assert f"{scripts.__file__}:" in raised.value.message
    assert line in raised.value.message
    assert hint in str(raised.value.hint)
    assert "\n" not in raised.value.message


def test_a_traced_module_names_the_line_without_its_text(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(scripts.NonZero(), X), tmp_path / "net.pt")
    with pytest.raises(ExportError, match=f"aten.nonzero at {scripts.__file__}:[0-9]+: the size of its result {SIZED}"):
        export(model_of(read_file(tmp_path / "net.pt"), X, None))


def test_outputs_in_containers_are_refused_by_position() -> None:
    model = model_of(script(scripts.Nested()), X, None)
    with pytest.raises(ExportError, match=r"output 1 \('output_1'\) is a tuple"):
        model.run(model.call.tensors)


def test_a_module_made_for_another_runtime_is_refused() -> None:
    made = torch.jit.optimize_for_inference(torch.jit.script(scripts.Cnn().eval()))
    with pytest.raises(ExportError, match=r"aten::to_mkldnn.*optimize_for_inference") as raised:
        export(model_of(made, torch.rand(2, 1, 8, 8), None))
    assert "before that step" in str(raised.value.hint)


def test_a_tensor_in_the_place_of_a_number_does_not_become_a_constant() -> None:
    with pytest.raises(ExportError, match="forward wants a int for 'times', and the example is a tensor"):
        export(model_of(script(scripts.Number()), (X, torch.tensor(3)), None))


def test_a_module_without_forward_lists_its_methods(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="has no forward; its methods: encode") as raised:
        export_bundle("torch", script(scripts.Methods()), X, dir=tmp_path / "net", collect_git=False)
    assert "wrap=" in str(raised.value.hint)


def test_wrap_is_for_torchscript_and_returns_a_module(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dir": tmp_path / "net", "collect_git": False}
    with pytest.raises(ExportError, match="wrap is for TorchScript modules, and the model is a Linear"):
        export_bundle("torch", nn.Linear(4, 2), X, wrap=lambda script: script, **options)
    with pytest.raises(ExportError, match=r"wrap returned a int, want an nn\.Module"):
        export_bundle("torch", script(scripts.Branch()), X, wrap=lambda script: 3, **options)
    with pytest.raises(ExportError, match=r"wrap raised AttributeError.*'neck'"):
        export_bundle("torch", script(scripts.Branch()), X, wrap=lambda script: script.neck, **options)
    with pytest.raises(ExportError, match="wrap is an option of the front end torch only"):
        export_bundle("jax", lambda p, x: x, {}, X.numpy(), wrap=lambda script: script, **options)
    assert list(tmp_path.iterdir()) == []


def test_operators_of_another_package_are_named_or_their_package_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = torch.library.Library("torchaudio", "FRAGMENT")
    library.define("rsrv_test_twice(Tensor x) -> Tensor")

    class Foreign(nn.Module):
        def forward(self, x):
            return torch.ops.torchaudio.rsrv_test_twice(x)

    torch.jit.save(script(Foreign()), tmp_path / "net.pt")
    library._destroy()
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    monkeypatch.setitem(sys.modules, "torchaudio", None)
    with pytest.raises(
        ExportError, match=r"net\.pt uses torchaudio::rsrv_test_twice, which is not registered"
    ) as raised:
        read_file(tmp_path / "net.pt")
    assert raised.value.hint == "pip install torchaudio"
    monkeypatch.delitem(sys.modules, "torchaudio")
    (tmp_path / "torchaudio.py").write_text(
        'import torch\nlibrary = torch.library.Library("torchaudio", "FRAGMENT")\n'
        'library.define("rsrv_test_twice(Tensor x) -> Tensor")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(read_file(tmp_path / "net.pt"), torch.jit.ScriptModule)
    monkeypatch.delitem(sys.modules, "torchaudio")
