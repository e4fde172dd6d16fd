"""Operators of PyTorch, one small model each: the program has to compute what eager PyTorch computes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from rsrv.audit.parity import ParityReport, compare
from rsrv.export.inputs import Example
from rsrv.export.torch.arguments import bind, input_spec
from rsrv.export.torch.dtypes import to_numpy
from rsrv.export.torch.lowered import Entry
from rsrv.export.torch.model import TorchModel, preserving
from rsrv.runtime import PjrtDevice, execute
from rsrv.stablehlo.artifact import DEFAULT_VERSION
from tests.support.torch_ops import CASES, Case

pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_program_computes_what_eager_pytorch_computes(case: Case, device: PjrtDevice) -> None:
    report = parity(case, device)
    assert report.ok, str(report)


def parity(case: Case, device: PjrtDevice) -> ParityReport:
    """The steps of an export without the files."""
    torch.manual_seed(0)
    module, *inputs = case.make()
    model = TorchModel(module, bind(module.forward, tuple(inputs), case.kwargs), None)
    call = model.call
    with jax.enable_x64(True), preserving(module):
        reference = {name: to_numpy(tensor) for name, tensor in model.run(call.tensors).items()}
        graph = model.export(call.tensors)
        entry = Entry.of([graph], call.names, drop_unused_inputs=False)
        examples = [
            Example(spec.name, spec.dtype, spec.shape, None) for spec in map(input_spec, call.names, call.tensors)
        ]
        program = entry.lower(graph, examples, "keep", "cpu", DEFAULT_VERSION)
    arguments = [*map(to_numpy, call.tensors), *(weight.numpy() for weight in entry.weights)]
    results = execute(device, device.compile(program), [np.ascontiguousarray(a).reshape(a.shape) for a in arguments])
    return compare(reference, dict(zip(reference, results, strict=True)))
