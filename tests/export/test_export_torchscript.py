"""TorchScript modules: the program computes what the script computes, whichever way the module came to be."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from rsrv.audit.parity import compare
from rsrv.bundle import open_bundle, read_header
from rsrv.core.errors import ExportError
from rsrv.export import export_bundle
from rsrv.export.inputs import Example
from rsrv.export.torch.arguments import input_spec
from rsrv.export.torch.dtypes import to_numpy
from rsrv.export.torch.lowered import Entry
from rsrv.export.torch.model import TorchModel, preserving
from rsrv.export.torch.sources import model_of
from rsrv.runtime import PjrtDevice, execute
from rsrv.stablehlo.artifact import DEFAULT_VERSION
from tests.support import torch_scripts as scripts

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

X = torch.linspace(-1, 2, 6).reshape(2, 3)
IMAGE = torch.linspace(-1, 1, 2 * 8 * 7).reshape(2, 1, 8, 7)
SERIES = torch.linspace(-1, 1, 30).reshape(2, 5, 3)


def scripted(module: nn.Module, *inputs: Any) -> Any:
    return torch.jit.script(module.eval())


def traced(module: nn.Module, *inputs: Any) -> Any:
    return torch.jit.trace(module.eval(), inputs)


def frozen(module: nn.Module, *inputs: Any) -> Any:
    return torch.jit.freeze(torch.jit.script(module.eval()))


def reloaded(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


CASES: list[tuple[Callable[..., Any], Callable[[], nn.Module], tuple[Any, ...]]] = [
    *((how, scripts.Cnn, (IMAGE,)) for how in (scripted, traced, frozen)),
    *((how, scripts.Transposed, (IMAGE,)) for how in (scripted, traced)),
    *((scripted, lambda double=double: scripts.Switch(double), (X,)) for double in (True, False)),
    (scripted, scripts.Counted, (X,)),
    *(
        (how, lambda kind=kind: scripts.Recurrent(kind), (SERIES,))
        for kind in ("GRU", "LSTM", "RNN")
        for how in (scripted, traced)
    ),
    (scripted, scripts.Several, (X, X + 1, X.long())),
    (scripted, scripts.Named, (X,)),
    (scripted, scripts.Lists, ([X, X + 1],)),
    (scripted, scripts.Number, (X, 3)),
    (scripted, scripts.Maybe, (X,)),
    (scripted, scripts.Maybe, (X, X + 1)),
    (scripted, scripts.Table, (torch.tensor([[1, 2], [3, 9]]),)),
    *((how, scripts.Plain, (X,)) for how in (scripted, traced)),
    *((how, scripts.Filled, (X,)) for how in (scripted, traced)),
    *((how, scripts.Pooled, (IMAGE,)) for how in (scripted, traced)),
    *((how, scripts.Assigned, (X,)) for how in (scripted, traced)),
    (scripted, scripts.Tied, (X,)),
]


@pytest.mark.parametrize(
    ("how", "make", "inputs"), CASES, ids=[f"{how.__name__}-{make().__class__.__name__}" for how, make, _ in CASES]
)
def test_the_program_computes_what_the_script_computes(
    how: Any, make: Callable[[], nn.Module], inputs: tuple[Any, ...], device: PjrtDevice
) -> None:
    torch.manual_seed(0)
    module = how(make(), *inputs)
    report = parity(model_of(reloaded(module), inputs, None), device)
    assert report.ok, str(report)


@pytest.mark.parametrize("how", [scripted, traced, frozen])
def test_a_module_that_still_knows_its_class_is_exported_as_one_from_a_file(how: Any) -> None:
    module = how(scripts.Cnn(), IMAGE)
    with jax.enable_x64(True):
        here, loaded = (
            model.export(model.call.tensors)
            for model in (model_of(made, IMAGE, None) for made in (module, reloaded(module)))
        )
    assert [weight.name for weight in here.weights] == [weight.name for weight in loaded.weights]


def parity(model: TorchModel, device: PjrtDevice) -> Any:
    call = model.call
    with jax.enable_x64(True), preserving(model.module):
        reference = {name: to_numpy(tensor) for name, tensor in model.run(call.tensors).items()}
        graph = model.export(call.tensors)
        entry = Entry.of([graph], call.names, drop_unused_inputs=False, order=model.weight_names())
        examples = [
            Example(spec.name, spec.dtype, spec.shape, None) for spec in map(input_spec, call.names, call.tensors)
        ]
        program = entry.lower(graph, examples, "keep", "cpu", DEFAULT_VERSION)
    arguments = [*map(to_numpy, call.tensors), *(weight.numpy() for weight in entry.weights)]
    results = execute(device, device.compile(program), [np.ascontiguousarray(a).reshape(a.shape) for a in arguments])
    return compare(reference, dict(zip(reference, results, strict=True)))


@pytest.mark.parametrize("overload", ["default", "deprecated"])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_private_convolutions_have_a_lowering(overload: str, transposed: bool, device: PjrtDevice) -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 72).reshape((4, 2, 3, 3)))

        def forward(self, x: Any) -> Any:
            output_padding = [1, 1] if transposed else [0, 0]
            flags = (False, False, True, True) if overload == "default" else (False, False, True)
            operator = getattr(torch.ops.aten._convolution, overload)
            return operator(x, self.weight, None, [2, 2], [1, 1], [1, 1], transposed, output_padding, 2, *flags)

    x = torch.linspace(-1, 1, 2 * 4 * 7 * 5).reshape(2, 4, 7, 5)
    report = parity(model_of(Convolution(), x, None), device)
    assert report.ok, str(report)


def test_weights_keep_their_names_and_the_module_its_tensors(tmp_path: Path) -> None:
    script = reloaded(scripted(scripts.Tied()))
    before = script.one.weight
    path = export_bundle("torch", script, X, dir=tmp_path / "net", batch_sizes=[1, 2], collect_git=False)
    assert read_header(path / "weights.safetensors").argument_order == ("one.weight", "one.bias", "other.bias")
    assert open_bundle(path).manifest.provenance["batch_export"] == "dynamic"
    assert script.one.weight.data_ptr() == before.data_ptr()
    assert script.one.weight.requires_grad == before.requires_grad


def test_a_module_that_is_fixed_in_training_mode_is_exported_with_a_warning(
    caplog: pytest.LogCaptureFixture, device: PjrtDevice
) -> None:
    script = torch.jit.script(scripts.Fixed())
    model = model_of(script, X, None)
    assert "Fixed is fixed in training mode" in caplog.text
    report = parity(model, device)  # the dropout below it is in evaluation mode all the same
    assert report.ok, str(report)
    assert script.layer.training


def test_wrap_exports_a_part_of_the_module_after_the_patches(tmp_path: Path) -> None:
    script = reloaded(scripted(scripts.Detector()))
    image = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)

    class Features(nn.Module):
        def __init__(self, detector: Any) -> None:
            super().__init__()
            assert all(isinstance(tensor, nn.Parameter) for tensor in detector.parameters())
            self.backbone = detector.backbone

        def forward(self, picture: Any) -> Any:
            return {"features": self.backbone(picture / 2)}

    with pytest.raises(ExportError, match=r"aten\.index\.Tensor at .*boolean mask"):
        export_bundle("torch", script, image, dir=tmp_path / "whole", collect_git=False)
    path = export_bundle("torch", script, image, wrap=Features, dir=tmp_path / "net", collect_git=False)
    manifest = open_bundle(path).manifest
    assert [one.name for one in (*manifest.executable_inputs, *manifest.executable_outputs)] == ["picture", "features"]
    assert read_header(path / "weights.safetensors").argument_order == ("backbone.conv.weight", "backbone.conv.bias")
    assert manifest.provenance["source_subframework"] == "torchscript"
    assert manifest.provenance["torchscript_wrap"].endswith("Features")


def test_wrap_can_return_a_script_module_or_call_another_method(device: PjrtDevice) -> None:
    class Encoder(nn.Module):
        def __init__(self, script: Any) -> None:
            super().__init__()
            self.script = script

        def forward(self, x: Any) -> Any:
            return self.script.encode(x)

    part = model_of(scripted(scripts.Detector()), IMAGE.repeat(1, 3, 1, 1), None, wrap=lambda script: script.backbone)
    assert parity(part, device).ok
    assert parity(model_of(scripted(scripts.Methods()), X, None, wrap=Encoder), device).ok


def test_a_script_module_inside_of_a_plain_one_is_exported(device: PjrtDevice) -> None:
    inner = scripted(scripts.Cnn())
    module = nn.Sequential(inner, nn.Linear(3, 2))
    assert parity(model_of(module, IMAGE, None), device).ok
    assert module[0] is inner
