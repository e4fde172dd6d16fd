"""`--lowering torch-xla`: a conversion in another environment, brought to our entry, and all that can fail there.

The other interpreter is a script here that answers what torch-xla would; the last test needs the real one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from rsrv.audit import check_bundle
from rsrv.bundle import open_bundle, read_header
from rsrv.cli.main import main
from rsrv.core.errors import ExportError, ParityMismatch, UsageError
from rsrv.export import export_bundle
from rsrv.export.torch.xla.converter import Converter
from rsrv.runtime import CompilePool

pytestmark = pytest.mark.torch

REAL = os.environ.get("RSRV_TORCH_XLA_PYTHON")
SCRIPT = Path(importlib.util.find_spec("rsrv.export.torch").submodule_search_locations[0]) / "xla" / "convert.py"  # type: ignore[union-attr, index]


class Model(nn.Module):
    """What torch-xla may leave out, and what it makes of constants: see `PROGRAM`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.zero = nn.Parameter(torch.zeros(2))
        self.register_buffer("shift", torch.tensor([3.0, 4.0]), persistent=False)

    def forward(self, x: Any, y: Any, *, z: Any) -> Any:
        return self.linear(x) * self.shift + torch.tensor([1.0, 2.0]) - z + self.zero * 0 + y * 0


# As torch-xla has it: arguments from the last use to the first, without what is multiplied by zero.
ARGUMENTS = [["input", 2], ["constant", 0], ["weight", "module.shift"], ["weight", "module.linear.bias"]]
ARGUMENTS += [["weight", "module.linear.weight"], ["input", 0]]
PROGRAM = """module @IrToHlo.1 attributes {mhlo.input_output_alias = [], mhlo.is_dynamic = false} {
  func.func @main(%z: tensor<2x2xf32>, %c: tensor<2xf32>, %s: tensor<2xf32>, %b: tensor<2xf32>, %w: tensor<2x3xf32>,
                  %x: tensor<2x3xf32>) -> tensor<2x2xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [1]
      : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x2xf32>
    %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<2xf32>) -> tensor<2x2xf32>
    %2 = stablehlo.add %0, %1 : tensor<2x2xf32>
    %3 = stablehlo.broadcast_in_dim %s, dims = [1] : (tensor<2xf32>) -> tensor<2x2xf32>
    %4 = stablehlo.multiply %2, %3 : tensor<2x2xf32>
    %5 = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<2xf32>) -> tensor<2x2xf32>
    %6 = stablehlo.add %4, %5 : tensor<2x2xf32>
    %7 = stablehlo.subtract %6, %z : tensor<2x2xf32>
    return %7 : tensor<2x2xf32>
  }
}"""
REPORT = {
    "arguments": ARGUMENTS,
    "constants": [{"dtype": "float32", "shape": [2]}],
    "versions": {"python": "3.10.1", "torch": "2.9.1", "torch_xla": "2.9.0"},
}


@pytest.fixture
def interpreter(tmp_path: Path) -> Any:
    """Makes an interpreter that runs `body`, shell commands with ``$directory`` to write to."""

    def make(body: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nscript="$2" program="$3" directory="$4"\n{body}\n')
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def torch_xla(tmp_path: Path, interpreter: Any) -> Any:
    """Makes an interpreter that answers with `code` and `report` whatever it is given."""

    def make(code: str = PROGRAM, report: dict[str, Any] = REPORT) -> Path:
        answer = tmp_path / "answer"
        answer.mkdir()
        (answer / "program.mlir").write_text(code)
        (answer / "report.json").write_text(json.dumps(report))
        (answer / "constant_0").write_bytes(np.array([1, 2], np.float32).tobytes())
        python: Path = interpreter(f'test -s "$program" && cp {answer}/* "$directory"')
        return python

    return make


@pytest.fixture
def export(tmp_path: Path, pool: CompilePool) -> Any:
    def call(python: Path, **options: Any) -> Path:
        torch.manual_seed(0)
        return export_bundle(
            "torch",
            Model(),
            {"z": torch.rand(2, 2), "y": torch.rand(2, 2), "x": torch.rand(2, 3)},
            dir=tmp_path / "net",
            lowering="torch-xla",
            torch_xla_python=python,
            batch_sizes=[2],
            collect_git=False,
            pool=pool,
            **options,
        )

    return call


def small() -> torch.export.ExportedProgram:
    return torch.export.export(nn.Linear(3, 2), (torch.rand(1, 3),))


def test_the_program_takes_inputs_first_and_answers_as_torch_does(export: Any, torch_xla: Any) -> None:
    path = export(torch_xla(), golden=2)
    bundle = open_bundle(path)
    assert [one.name for one in bundle.manifest.executable_inputs] == ["x", "y", "z"]
    assert read_header(path / "weights.safetensors").argument_order == (
        "shift",
        "linear.weight",
        "linear.bias",
        "constant_0",
    )
    assert check_bundle(path, run=True).errors == []
    facts = bundle.manifest.provenance
    assert facts["lowering"] == "torch-xla"
    assert facts["torch_xla_environment"] == {"python": "3.10.1", "torch": "2.9.1", "torch_xla": "2.9.0"}
    assert facts["dropped_weights"] == ["zero"]
    assert facts["batch_export"] == "retraced"


def test_a_program_that_answers_something_else_is_refused(export: Any, torch_xla: Any, tmp_path: Path) -> None:
    with pytest.raises(ParityMismatch, match="output") as caught:
        export(torch_xla(PROGRAM.replace("subtract %6", "add %6")))
    assert "--lowering torchax" in str(caught.value.hint)
    assert not (tmp_path / "net").exists()


def test_weights_in_the_wrong_places_are_refused(export: Any, torch_xla: Any) -> None:
    swapped = [*ARGUMENTS]
    swapped[2], swapped[3] = swapped[3], swapped[2]
    with pytest.raises(ParityMismatch):
        export(torch_xla(report={**REPORT, "arguments": swapped}))


def test_64_bit_integers_can_be_narrowed_at_the_border(tmp_path: Path, torch_xla: Any, pool: CompilePool) -> None:
    class Double(nn.Module):
        def forward(self, ids: Any) -> Any:
            return ids + ids

    code = """func.func @main(%i: tensor<1x3xi64>) -> tensor<1x3xi64> {
      %0 = stablehlo.add %i, %i : tensor<1x3xi64>
      return %0 : tensor<1x3xi64>
    }"""
    path = export_bundle(
        "torch",
        Double(),
        torch.tensor([[1, 2, 3]]),
        dir=tmp_path / "double",
        lowering="torch-xla",
        torch_xla_python=torch_xla(code, {**REPORT, "arguments": [["input", 0]], "constants": []}),
        int64="narrow",
        collect_git=False,
        pool=pool,
    )
    manifest = open_bundle(path).manifest
    assert [one.describe() for one in (*manifest.executable_inputs, *manifest.executable_outputs)] == ["i32[n,3]"] * 2


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere/python cannot be run: No such file") as caught:
        Converter(tmp_path / "nowhere" / "python").convert(small())
    assert "torch_xla==2.9.0" in str(caught.value.hint)
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(UsageError, match="plain cannot be run: Permission denied"):
        Converter(plain).convert(small())


def test_an_interpreter_without_torch_xla_says_what_it_lacks(interpreter: Any) -> None:
    with pytest.raises(ExportError, match=r"has torch 2\.1\d\..*; wanted torch==2\.9\.1 torch_xla==2\.9\.0") as caught:
        Converter(Path(sys.executable)).convert(small())
    assert "python3.11 -m venv" in str(caught.value.hint)
    with pytest.raises(ExportError, match="python has no torch, which --lowering torch-xla needs"):
        Converter(interpreter(f'exec {sys.executable} -S "$@"')).convert(small())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (("import", "ImportError: undefined symbol"), "cannot import torch-xla: ImportError: undefined symbol"),
        (("read", "KeyError: schema"), rf"cannot read a program that torch {torch.__version__[:4]}.* saved: KeyError"),
        (
            ("convert", "RuntimeError: This model contains ops not capturable by Pytorch/XLA: aten::a aten::b"),
            "^torch-xla has no lowering for aten::a, aten::b$",
        ),
        (("convert", "TypeError: bfloat16"), "^torch-xla cannot convert the model: TypeError: bfloat16$"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_the_script_reports_becomes_one_message(torch_xla: Any, error: tuple[str, str], message: str) -> None:
    kind, text = error
    with pytest.raises(ExportError, match=message) as caught:
        Converter(torch_xla(report={"error": {"kind": kind, "message": text}})).convert(small())
    assert caught.value.hint


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo one; echo two >&2; exit 3", r"ended with exit status 3: two$"),
        ("kill -SEGV $$", rf"ended with signal {signal.SIGSEGV:d} \(Segmentation fault\)"),
        ("true", "ended with no result$"),
        ('echo "{" > "$directory/report.json"', "ended with no result$"),
        ('echo "{}" > "$directory/report.json"; echo broken; exit 1', "ended with exit status 1: broken$"),
        ('echo \'{"arguments": []}\' > "$directory/report.json"', "wrote a report that cannot be read: "),
        ('echo \'{"error": "no"}\' > "$directory/report.json"', "wrote a report that cannot be read: KeyError"),
    ],
)
def test_a_conversion_that_dies_shows_its_last_words(interpreter: Any, body: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        Converter(interpreter(body)).convert(small())


@pytest.mark.parametrize(
    "argument", [["constant", -1], ["constant", 1], ["input", -1], ["input", "x"], ["weight", 0], ["output", 0], 3]
)
def test_arguments_that_are_none_are_refused(torch_xla: Any, argument: Any) -> None:
    with pytest.raises(ExportError, match="wrote a report that cannot be read: "):
        Converter(torch_xla(report={**REPORT, "arguments": [argument]})).convert(small())


def test_a_weight_that_the_model_does_not_have_is_named(export: Any, torch_xla: Any, tmp_path: Path) -> None:
    arguments = [["weight", "module.other"] if one[1] == "module.shift" else one for one in ARGUMENTS]
    with pytest.raises(ExportError, match=r"takes the weight 'module\.other', which the model does not have"):
        export(torch_xla(report={**REPORT, "arguments": arguments}))
    assert not (tmp_path / "net").exists()


def test_a_conversion_that_hangs_is_ended_with_its_children(interpreter: Any, tmp_path: Path) -> None:
    python = interpreter(f"sleep 100 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(ExportError, match=r"did not finish within 2 s"):
        Converter(python, seconds=2).convert(small())
    status = Path("/proc", (tmp_path / "child").read_text().strip(), "status")
    while status.exists() and "(zombie)" not in status.read_text():  # the test's own time limit ends this
        time.sleep(0.05)


def test_the_other_interpreter_does_not_see_our_paths_and_settings(
    interpreter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "XLA_FLAGS", "PJRT_DEVICE"):
        monkeypatch.setenv(name, "ours")
    with pytest.raises(ExportError, match=r"exit status 1: -I,CPU,,$"):
        Converter(interpreter('echo "$1,$PJRT_DEVICE,$XLA_FLAGS,$PYTHONPATH"; exit 1')).convert(small())


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_script_names_the_axes_of_reductions_that_name_none() -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sum(), x.amax(), x.std(), x.sum(1), x.any(), x[0, 0].sum(), torch.linalg.vector_norm(x)

    spec = importlib.util.spec_from_file_location("convert", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    x = torch.rand(2, 3)
    program = torch.export.export(Model(), (x,)).run_decompositions()
    before = program.module()(x)
    script.reduce_all_axes(program.graph_module)
    reductions = re.findall(
        r"aten\.(\w+)\.\w+\(\w+, (?:correction = 1.0, )?(?:dim = )?(\[.*?\])\)", program.graph_module.code
    )
    assert reductions == [
        ("sum", "[0, 1]"),
        ("amax", "[0, 1]"),
        ("var", "[0, 1]"),
        ("sum", "[1]"),
        ("sum", "[]"),
        ("linalg_vector_norm", "[0, 1]"),
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, program.module()(x), strict=True))


def test_the_options_belong_together_and_to_torch(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"lowering 'torch-xla' and torch_xla_python \(--torch-xla-python\)"):
        export_bundle("torch", nn.Linear(3, 2), torch.rand(1, 3), dir=tmp_path / "net", lowering="torch-xla")
    with pytest.raises(ExportError, match="belong together"):
        export_bundle("torch", nn.Linear(3, 2), torch.rand(1, 3), dir=tmp_path / "net", torch_xla_python="python")
    with pytest.raises(ExportError, match="lowering is 'tvm', want 'torchax' or 'torch-xla'"):
        export_bundle("torch", nn.Linear(3, 2), torch.rand(1, 3), dir=tmp_path / "net", lowering="tvm")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="lowering is an option of the front end torch only"):
        export_bundle(
            "jax", abs, None, [], dir=tmp_path / "net", lowering="torch-xla", torch_xla_python=tmp_path / "python"
        )


def test_the_command_names_what_it_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Linear(3, 2), torch.rand(2, 3)\n"
    )
    arguments = ["export", "torch", f"{tmp_path}/net.py:make", "--out", str(tmp_path / "net")]
    assert main([*arguments, "--lowering", "tvm"]) == 2
    assert "--lowering tvm is none of torchax, torch-xla" in capsys.readouterr().err
    assert main([*arguments, "--lowering", "torch-xla", "--torch-xla-python", "/nowhere/python"]) == 2
    assert "--torch-xla-python /nowhere/python cannot be run: No such file" in capsys.readouterr().err


# --- the real one -------------------------------------------------------------------------------------------------


class Reductions(nn.Module):
    """What torch-xla gets wrong by itself: reductions over all axes."""

    def forward(self, x: Any) -> Any:
        return {"sum": x.sum(), "largest": x.amax(), "norm": x.norm(), "spread": x.std(), "any": (x > 0.5).any()}


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3), nn.Softmax(-1)), (2, 6)),
    "cnn": (cnn, (2, 3, 12, 12)),
    "reductions": (Reductions, (2, 3, 4)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), (2, 5, 16)),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(REAL is None, reason="RSRV_TORCH_XLA_PYTHON names no environment with torch-xla")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", CASES)
def test_torch_xla_itself_converts_models_that_answer_as_torch_does(
    name: str, tmp_path: Path, pool: CompilePool
) -> None:
    torch.manual_seed(0)
    make, shape = CASES[name]
    path = export_bundle(
        "torch",
        make(),
        torch.rand(shape),
        dir=tmp_path / name,
        lowering="torch-xla",
        torch_xla_python=REAL,
        batch_sizes=None if name == "reductions" else [1, 3],
        golden=2,
        collect_git=False,
        pool=pool,
    )
    assert check_bundle(path, run=True).errors == []
    environment = open_bundle(path).manifest.provenance["torch_xla_environment"]
    assert environment["torch_xla"].startswith("2.9.")
