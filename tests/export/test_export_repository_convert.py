"""Converting a Triton repository of real TorchScript modules: numbers, batch sizes, and what fails alone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("torch")

import torch
from support.triton import config_pbtxt, write_convert_config, write_triton_model
from torch import nn

from rsrv.audit import check_bundle
from rsrv.bundle import Bundle, open_bundle
from rsrv.bundle.tensors import load_tensors
from rsrv.export.reference import load_source, reference_on
from rsrv.export.repository import ConversionReport, convert_repository, load_convert_config
from rsrv.runtime import PjrtDevice, execute

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # torch.jit
]

X, Z = ("INPUT__0", "TYPE_FP32", [4]), ("INPUT__1", "TYPE_FP32", [3])
Y, S = ("OUTPUT__0", "TYPE_FP32", [3]), ("OUTPUT__1", "TYPE_FP32", [1])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.layer(a)) - b, a.sum(1, keepdim=True)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        if a.size(0) > 2:
            raise RuntimeError("too many rows")
        return self.layer(a)


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        if a.size(0) > 5:
            raise RuntimeError("too many rows")
        return self.layer(a)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.layer(a).reshape(1, 3) * 2


class Deciding(nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        if bool(a.sum() > 0):
            return a
        return a * 2


class Flat(nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a.to(torch.float32).mean(-1) * 0.5


class Optional3(nn.Module):
    """x · 2, times `mask` and plus `bias` where they are given."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = x * 2
        if mask is not None:
            y = y * mask
        if bias is not None:
            y = y + bias
        return y


class Never(nn.Module):
    """Whether rows sum to more than random ones do: never."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sum(1, keepdim=True) > 100.0).to(torch.float32)


def scripted(module: nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return torch.jit.script(module.eval())


@pytest.fixture(scope="module")
def two() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scripted(Two())


def convert(here: Path, *, isolate: bool = False, **options: Any) -> ConversionReport:
    keys = options.pop("keys", {})
    return convert_repository(load_convert_config(write_convert_config(here, **keys)), isolate=isolate, **options)


def answers(device: PjrtDevice, bundle: Bundle, size: int, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert bundle.weights_path is not None
    program = device.compile(bundle.programs[()][size].read_bytes())
    ordered = [inputs[spec.name] for spec in bundle.manifest.executable_inputs]
    weights = list(load_tensors(bundle.weights_path).values())
    found = execute(device, program, [*ordered, *weights])
    return dict(zip([spec.name for spec in bundle.manifest.executable_outputs], found, strict=True))


def test_numbers_are_those_of_torch_at_every_batch_size_whatever_the_order_of_the_config(
    tmp_path: Path, two: Any, device: PjrtDevice
) -> None:
    write_triton_model(tmp_path / "source", "net", config_pbtxt([Z, X], [S, Y], 12), two)
    report = convert(tmp_path, keys={"golden": 2})
    (result,) = report.results
    assert (result.outcome, result.batch_sizes, result.reason) == ("success", (1, 3, 6, 12), "")
    bundle = open_bundle(tmp_path / "out/net")
    assert [spec.describe() for spec in bundle.manifest.executable_inputs] == ["f32[n,4]", "f32[n,3]"]
    assert [spec.name for spec in bundle.manifest.executable_outputs] == ["OUTPUT__0", "OUTPUT__1"]
    draw = np.random.default_rng(3)
    for size in (1, 3, 6, 12):
        a, b = draw.normal(size=(size, 4)).astype(np.float32), draw.normal(size=(size, 3)).astype(np.float32)
        expected = two(torch.from_numpy(a), torch.from_numpy(b))
        found = answers(device, bundle, size, {"INPUT__0": a, "INPUT__1": b})
        for name, value in zip(("OUTPUT__0", "OUTPUT__1"), expected, strict=True):
            np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=1e-5, atol=1e-6)
    facts = bundle.manifest.provenance
    assert facts["converter"] == "rsrv export convert"
    assert facts["torchscript_path"] == str(tmp_path / "source/net/1/model.pt")
    assert facts["parity"]["tolerances"] == {"f32": 1e-5}
    assert check_bundle(bundle.path, run=True).errors == []  # the two goldens


@pytest.mark.parametrize("names", [("bias", "x"), ("INPUT__2", "INPUT__0")])
def test_an_input_behind_an_optional_one_reaches_its_own_parameter(
    tmp_path: Path, names: tuple[str, str], device: PjrtDevice
) -> None:
    config = config_pbtxt([(name, "TYPE_FP32", [3]) for name in names], [("y", "TYPE_FP32", [3])])
    source = write_triton_model(tmp_path / "source", "net", config, scripted(Optional3()))
    (result,) = convert(tmp_path).results
    assert (result.outcome, result.batch_sizes) == ("success", (1,))
    bundle = open_bundle(tmp_path / "out/net")
    bias, x = np.array([[10, 20, 30]], np.float32), np.array([[1, 2, 3]], np.float32)
    found = answers(device, bundle, 1, dict(zip(names, (bias, x), strict=True)))
    np.testing.assert_array_equal(found["y"], [[12, 24, 36]])
    original = reference_on("program", load_source(source, bundle.manifest), bundle.manifest)
    np.testing.assert_array_equal(original(dict(zip(names, (bias, x), strict=True)))["y"], [[12, 24, 36]])


def test_an_output_that_proves_nothing_is_in_the_report(tmp_path: Path) -> None:
    """As it is when a process of its own finds out: see the model that is left where the other one is killed."""
    config = config_pbtxt([("x", "TYPE_FP32", [3])], [("y", "TYPE_FP32", [1])])
    write_triton_model(tmp_path / "source", "net", config, scripted(Never()))
    (result,) = convert(tmp_path).results
    assert result.outcome == "success"
    assert "parity is unproven" in result.note
    assert "the reference is 0 everywhere" in result.note
    assert "the reference is 0 everywhere" in (tmp_path / "report.md").read_text()


def test_a_model_that_takes_few_rows_keeps_size_one_and_remembers_why(tmp_path: Path) -> None:
    write_triton_model(tmp_path / "source", "net", config_pbtxt([X], [Y], 8), scripted(Small()))
    (result,) = convert(tmp_path).results
    assert (result.outcome, result.batch_sizes, result.dropped) == ("partial", (1,), (2, 4, 8))
    assert "too many rows" in result.reason
    assert "| net | 1 | 2, 4, 8 |" in (tmp_path / "report.md").read_text()
    (again,) = convert(tmp_path).results
    assert again.was_there
    assert (again.outcome, again.dropped, again.reason) == (result.outcome, result.dropped, result.reason)


@pytest.mark.slow
def test_with_bisect_all_sizes_that_work_are_kept(tmp_path: Path) -> None:
    write_triton_model(tmp_path / "source", "net", config_pbtxt([X], [Y], 8), scripted(Four()))
    (result,) = convert(tmp_path, ladder="bisect").results
    assert (result.outcome, result.batch_sizes, result.dropped) == ("partial", (1, 2, 4), (8,))
    assert open_bundle(tmp_path / "out/net").manifest.batching.compiled_batch_sizes == (1, 2, 4)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["net"]


@pytest.mark.slow
@pytest.mark.parametrize("ladder", ["halve", "bisect"])
def test_a_model_with_one_row_built_in_takes_one_row(tmp_path: Path, ladder: Any, device: PjrtDevice) -> None:
    module = Fixed().eval()
    traced = torch.jit.trace(module, torch.rand(1, 4))
    write_triton_model(tmp_path / "source", "net", config_pbtxt([X], [Y], 2), traced)
    (result,) = convert(tmp_path, ladder=ladder).results
    assert (result.outcome, result.batch_sizes, result.dropped) == ("partial", (), (2,))
    assert result.note == "takes one row only, without a batch axis"
    assert result.sizes_text == "1, without a batch axis"
    bundle = open_bundle(tmp_path / "out/net")
    assert [spec.describe() for spec in bundle.manifest.executable_inputs] == ["f32[1,4]"]
    x = np.arange(4, dtype=np.float32)[None]
    found = answers(device, bundle, 0, {"INPUT__0": x})["OUTPUT__0"]
    np.testing.assert_allclose(found, module(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_cannot_be_converted_fails_or_is_skipped_alone(tmp_path: Path, two: Any) -> None:
    source = tmp_path / "source"
    flat4 = ("OUTPUT__0", "TYPE_FP32", [4])
    write_triton_model(source, "bf16", config_pbtxt([("INPUT__0", "TYPE_BF16", [4])], [flat4], 4))
    write_triton_model(source, "broken", "input [ {")
    write_triton_model(source, "deciding", config_pbtxt([X], [flat4], 4), torch.jit.script(Deciding()))
    write_triton_model(source, "dynamic", config_pbtxt([("INPUT__0", "TYPE_FP32", [-1])], [flat4], 4))
    write_triton_model(source, "junk", config_pbtxt([X], [Y]))
    (source / "junk/1/model.pt").write_bytes(b"not a model")
    write_triton_model(source, "more", config_pbtxt([X, Z, ("INPUT__2", "TYPE_FP32", [1])], [Y], 2), two)
    write_triton_model(source, "string", config_pbtxt([("INPUT__0", "TYPE_STRING", [1])], [flat4], 4))
    write_triton_model(source, "swapped", config_pbtxt([X, Z], [("OUTPUT__1", *Y[1:]), ("OUTPUT__0", *S[1:])], 1), two)
    write_triton_model(source, "works", config_pbtxt([X, Z], [Y, S], 1), two)
    report = convert(tmp_path)
    found = {result.bundle: (result.outcome, result.reason) for result in report.results}
    assert report.counts == {"success": 1, "partial": 0, "failed": 7, "skipped": 1}
    assert not report.ok
    assert found["bf16"] == (
        "failed",
        "input 'INPUT__0' is TYPE_BF16, which is not supported; a handler can convert it",
    )
    assert 'broken/config.pbtxt: 1:9 : Expected "}"' in found["broken"][1]
    assert "values of a tensor" in found["deciding"][1]
    assert found["dynamic"][0] == "skipped"
    assert found["dynamic"][1].startswith("dynamic input shape: 'INPUT__0' has dims [-1]")
    assert "junk/1/model.pt is no TorchScript module" in found["junk"][1]
    assert "the examples do not fit forward(a, b)" in found["more"][1]
    assert "TYPE_STRING" in found["string"][1]
    assert "output 'OUTPUT__0' is f32[n,3], and config.pbtxt declares TYPE_FP32 with dims [1]" in found["swapped"][1]
    assert found["works"] == ("success", "")
    assert all(len(reason) <= 500 for _, reason in found.values())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["works"]


@pytest.mark.slow
def test_dims_are_complete_when_nothing_is_batched(tmp_path: Path, two: Any) -> None:
    whole = [("INPUT__0", "TYPE_FP32", [2, 4]), ("INPUT__1", "TYPE_FP32", [2, 3])]
    config = config_pbtxt(whole, [("OUTPUT__0", "TYPE_FP32", [2, 3]), ("OUTPUT__1", "TYPE_FP32", [2, -1])], 0)
    write_triton_model(tmp_path / "source", "net", config, two)
    (result,) = convert(tmp_path).results
    assert (result.outcome, result.batch_sizes, result.note) == ("success", (), "")
    assert (tmp_path / "out/net/model.mlir").is_file()


@pytest.mark.slow
def test_integer_inputs_and_parameter_names_are_taken(tmp_path: Path) -> None:
    config = config_pbtxt([("a", "TYPE_UINT8", [5])], [("mean", "TYPE_FP32", [])], 2)
    write_triton_model(tmp_path / "source", "net", config, torch.jit.script(Flat()))
    (result,) = convert(tmp_path).results
    assert (result.outcome, result.batch_sizes) == ("success", (1, 2)), result.reason
    (spec,) = open_bundle(tmp_path / "out/net").manifest.executable_inputs
    assert (spec.name, spec.describe()) == ("a", "u8[n,5]")


def test_a_program_of_torch_export_is_taken(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Two().eval(), (torch.rand(2, 4), torch.rand(2, 3)), dynamic_shapes=({0: batch},) * 2)
    directory = write_triton_model(tmp_path / "source", "net", config_pbtxt([Z, X], [Y, S], 2))
    torch.export.save(program, directory / "1/model.pt2")
    (result,) = convert(tmp_path).results
    assert (result.outcome, result.batch_sizes) == ("success", (1, 2)), result.reason
    assert "exported_program_sha256" in open_bundle(tmp_path / "out/net").manifest.provenance


@pytest.mark.slow
def test_a_second_run_builds_nothing_anew(tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        write_triton_model(tmp_path / "source", name, config_pbtxt([X, Z], [Y, S]), two)
    convert(tmp_path, only=["one"])
    assert not (tmp_path / "report.md").exists()
    before = (tmp_path / "out/one/manifest.yaml").stat().st_mtime_ns
    started: list[str] = []
    report = convert(tmp_path, on_start=lambda item: started.append(item.bundle))
    assert started == ["one", "other"]
    assert [(result.outcome, result.was_there) for result in report.results] == [("success", True), ("success", False)]
    assert (tmp_path / "out/one/manifest.yaml").stat().st_mtime_ns == before
    assert "| one | 1 | was there |" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_process_that_is_killed_in_the_middle_leaves_no_half_bundle(tmp_path: Path, two: Any) -> None:
    write_triton_model(tmp_path / "source", "first", config_pbtxt([X, Z], [Y, S]), two)
    unproven = config_pbtxt([("x", "TYPE_FP32", [3])], [("y", "TYPE_FP32", [1])])
    write_triton_model(tmp_path / "source", "second", unproven, scripted(Never()))
    killed: list[int] = []
    before = psutil.Process().children(recursive=True)

    def watch() -> None:
        """Kill the process of the first model each time it has begun to write the bundle."""
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):  # directories come and go while they are looked through
                for staged in (tmp_path / "out").glob(".rsrv-convert.*.partial/*/.first.*.partial"):
                    pid = int(staged.name.split(".")[-2])
                    if pid not in killed:
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
            done.wait(0.002)

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        first, second = convert(tmp_path, isolate=True).results
    finally:
        done.set()
        watcher.join()
    assert killed
    assert (first.outcome, second.outcome) == ("failed", "success")
    assert "it was ended by SIGKILL" in first.reason
    assert "the reference is 0 everywhere" in second.note
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["second"]
    gone = time.monotonic() + 10
    while (left := set(psutil.Process().children(recursive=True)) - set(before)) and time.monotonic() < gone:
        time.sleep(0.05)
    assert not left
