"""`export_bundle("torch")`: what ends up in the bundle, and that nothing wrong does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from rsrv.audit import check_bundle
from rsrv.bundle import open_bundle, read_header
from rsrv.bundle.golden import read_golden
from rsrv.cli import output
from rsrv.cli.main import main
from rsrv.core.errors import ExportError, ParityMismatch
from rsrv.export import export_bundle, parse_input_spec
from rsrv.export.torch.lowerings import OWN
from rsrv.export.torch.reference import TorchOriginal
from rsrv.runtime import CompilePool
from rsrv.stablehlo.artifact import artifact_version

pytestmark = pytest.mark.torch

MODELS = '''
import torch
from torch import nn


class Text(nn.Module):
    """Embedding, LSTM and attention, with weights that are tied and weights that are not used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, ids, mask=None, *, scale):
        x, _ = self.lstm(self.embed(ids))
        x = self.layer(x, src_key_padding_mask=mask == 0)
        return {"logits": self.head(x), "pooled": x.mean(1) * scale[:, None], "hidden": None, "best": x.argmax(-1)}


def text():
    torch.manual_seed(0)
    inputs = {"scale": torch.rand(2), "ids": torch.randint(0, 20, (2, 5))}
    return {"module": Text(), "inputs": inputs, "kwargs": {"mask": torch.ones(2, 5, dtype=torch.int64)}}


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.rand(2, 1, 6, 6)
'''


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "torch_models.py"
    path.write_text(MODELS)
    return path


@pytest.fixture
def export(tmp_path: Path, pool: CompilePool) -> Any:
    def call(module: Any, inputs: Any, **options: Any) -> Path:
        return export_bundle(
            "torch", module, inputs, **{"dir": tmp_path / "net", "collect_git": False, "pool": pool, **options}
        )

    return call


def provenance(path: Path) -> dict[str, Any]:
    return dict(open_bundle(path).manifest.provenance)


def test_a_model_of_many_inputs_is_exported_once_for_all_batch_sizes(export: Any, models: Path, tmp_path: Path) -> None:
    from rsrv.export.torch.factory import load_model

    made = load_model(f"{models}:text")
    path = export(made.module, made.inputs, kwargs=made.kwargs, batch_sizes=[3, 1], golden=2)
    manifest = open_bundle(path).manifest
    assert [(one.name, one.describe()) for one in manifest.executable_inputs] == [
        ("ids", "i64[n,5]"),
        ("mask", "i64[n,5]"),
        ("scale", "f32[n]"),
    ]
    assert [(one.name, one.describe()) for one in manifest.executable_outputs] == [
        ("logits", "f32[n,5,20]"),
        ("pooled", "f32[n,8]"),
        ("best", "i64[n,5]"),
    ]
    assert sorted(file.name for file in path.glob("*.mlir")) == ["model.b1.mlir", "model.b3.mlir"]
    names = read_header(path / "weights.safetensors").argument_order
    assert names[:2] == ("embed.weight", "lstm.weight_ih_l0")
    assert "head.weight" not in names
    facts = provenance(path)
    assert facts["batch_export"] == "dynamic"
    assert facts["dropped_weights"] == ["unused.weight", "unused.bias"]
    assert facts["parity"]["tolerances"] == {"f32": 1e-5}
    goldens = read_golden(path / "golden.safetensors")
    assert [list(golden.inputs) for golden in goldens] == [["ids", "mask", "scale"]] * 2
    assert check_bundle(path, run=True).errors == []
    reference = TorchOriginal(f"{models}:text", manifest).answering(manifest.executable_inputs)
    for golden in goldens:
        again = reference(golden.inputs)
        assert all(np.array_equal(again[name], golden.outputs[name]) for name in golden.outputs)


def test_the_module_is_left_as_it_was(export: Any) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    module[1].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    export(module, torch.rand(2, 3))
    assert [child.training for child in module.modules()] == [True, True, False, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_provenance_says_what_made_the_bundle(export: Any) -> None:
    path = export(nn.Linear(3, 2), torch.rand(1, 3), matmul_precision="highest", stablehlo_version="1.10.0")
    facts = provenance(path)
    assert facts["source_framework"] == "pytorch"
    assert facts["converter"] == "rsrv.export torch"
    assert facts["torch_version"].startswith("2.")
    assert {"torchax_version", "jax_version", "jaxlib_version"} <= set(facts)
    assert (facts["matmul_precision"], facts["stablehlo_version"]) == ("highest", "1.10.0")
    assert artifact_version((path / "model.b1.mlir").read_bytes()) == "1.10.0"


def test_integers_can_be_narrowed_at_the_border(export: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2, (x + 2**33) % 7

    path = export(Model(), {"x": torch.tensor([[3, 4]])}, int64="narrow")
    manifest = open_bundle(path).manifest
    assert [one.describe() for one in (*manifest.executable_inputs, *manifest.executable_outputs)] == ["i32[n,2]"] * 3


def test_a_model_that_looks_at_its_batch_size_is_exported_for_each(export: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * (10 if x.shape[0] == 1 else 1)

    path = export(Model(), torch.rand(2, 3), batch_sizes=None)
    assert "batch_export" not in provenance(path)
    with pytest.raises(ParityMismatch, match=r"model\.b4\.mlir does not compute"):
        # Rows of a bundle are answered alike whatever batch they are in, and this model's are not.
        export(Model(), torch.rand(2, 3), batch_sizes=[1, 4], overwrite=True)
    assert open_bundle(path).manifest.batching.compiled_batch_sizes == ()


def test_a_batch_size_that_torch_fixes_is_retraced(export: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            rows = [x[i] * 2 for i in range(int(x.shape[0]))]
            return torch.stack(rows)

    path = export(Model(), torch.rand(1, 3), batch_sizes=[1, 2])
    assert provenance(path)["batch_export"] == "retraced"


def test_shape_variants_share_their_weights(export: Any) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())
    path = export(
        module,
        {"input": torch.rand(1, 1, 6, 6)},
        shape_variants=[{"input": torch.rand(1, 1, 6, 6)}, {"input": torch.rand(1, 1, 8, 4)}],
        batch_sizes=[2],
    )
    manifest = open_bundle(path).manifest
    assert sorted(file.name for file in path.glob("*.mlir")) == ["model.v0.b2.mlir", "model.v1.b2.mlir"]
    assert manifest.input_shapes == ((6, 6), (8, 4))
    assert manifest.executable_outputs[0].describe() == "f32[n,2,?,?]"


def test_a_wrong_lowering_is_never_written(export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, torch.ops.aten.relu.default, lambda x: x)
    with pytest.raises(ParityMismatch, match="does not compute what the framework computed: output 'output': rel"):
        export(nn.ReLU(), torch.randn(4, 3))
    assert list(tmp_path.iterdir()) == []


def test_state_that_outputs_depend_on_is_refused(export: Any) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.calls.add_(1)
            return x + self.calls

    module = Counter()
    with pytest.raises(ParityMismatch) as raised:
        export(module, torch.rand(2, 3))
    assert "changes its buffer 'calls'" in str(raised.value.hint)
    assert module.calls.item() == 0


def test_an_unused_input_is_refused_or_dropped(export: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return x * 2

    with pytest.raises(ExportError, match="no output depends on the input 'y'"):
        export(Model(), (torch.rand(2), torch.rand(2)))
    path = export(Model(), (torch.rand(2), torch.rand(2)), drop_unused_inputs=True)
    assert [one.name for one in open_bundle(path).manifest.executable_inputs] == ["x"]
    assert provenance(path)["dropped_inputs"] == ["y"]


def test_programs_of_torch_export_and_torchscript_are_exported(export: Any, tmp_path: Path) -> None:
    from rsrv.export.torch.factory import load_model

    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).eval()
    x = torch.rand(2, 3)
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.export.save(torch.export.export(module, (x,), dynamic_shapes=({0: batch},)), tmp_path / "any.pt2")
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "fixed.pt2")
    made = load_model(str(tmp_path / "any.pt2"))
    path = export(made.module, made.inputs, batch_sizes=[1, 4], provenance=made.facts)
    facts = provenance(path)
    assert (facts["source_subframework"], facts["batch_export"]) == ("torch.export", "dynamic")
    assert len(facts["exported_program_sha256"]) == 64
    made = load_model(str(tmp_path / "fixed.pt2"))
    with pytest.raises(ExportError, match=r"exported for input\[2, 3\], and is to take \[1, 3\]") as raised:
        export(made.module, made.inputs, overwrite=True)
    assert 'batch = torch.export.Dim("batch", min=1, max=64)' in str(raised.value.hint)
    assert 'dynamic_shapes={"input": {0: batch}}' in str(raised.value.hint)
    assert "--no-batch" in str(raised.value.hint)
    with pytest.raises(
        ExportError, match=r"second batch size, and the program was exported for input\[2, 3\]"
    ) as raised:
        export(made.module, made.inputs, batch_sizes=[2], overwrite=True)
    assert "torch.export.Dim" in str(raised.value.hint)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_torchscript_module_is_exported(export: Any, tmp_path: Path) -> None:
    from rsrv.export.torch.factory import load_model

    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2)).eval()
    torch.jit.save(torch.jit.trace(module, torch.rand(1, 1, 6, 6)), tmp_path / "net.pt")
    made = load_model(str(tmp_path / "net.pt"), inputs=[parse_input_spec("input=f32[1,1,6,6]")])
    path = export(made.module, made.inputs, batch_sizes=[1, 2], provenance=made.facts)
    facts = provenance(path)
    assert (facts["source_subframework"], facts["batch_export"]) == ("torchscript", "dynamic")
    assert read_header(path / "weights.safetensors").argument_order == ("0.weight", "0.bias")


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them is this one, with another hash seed."""
    arguments = ["export", "torch", f"{models}:small", "--golden", "1", "--batch-sizes", "1,2", "--no-diff", "--json"]
    command = [sys.executable, "-W", "ignore", "-m", "rsrv", *arguments, "--out", str(tmp_path / "1" / "net")]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=170)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*arguments, "--out", str(tmp_path / "2" / "net")]) == 0
    output.set_mode("human")
    for printed in (done.stdout, capsys.readouterr().out):
        assert json.loads(printed)["batch_sizes"] == [1, 2]
    one, other = (tmp_path / str(number) / "net" for number in (1, 2))
    files = sorted(file.name for file in one.iterdir())
    assert files == sorted(file.name for file in other.iterdir())
    for name in files:
        left, right = (re.sub(rb"exported_at: .*", b"", (path / name).read_bytes()) for path in (one, other))
        assert left == right, name
