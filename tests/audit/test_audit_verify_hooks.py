"""`verify_bundle` by the way of a request: preprocess, program, postprocess; and by a server that is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import N, lower, write_affine

from rsrv.audit import AuditProcess, verify_bundle
from rsrv.audit.shapes import SizedInput
from rsrv.bundle import open_bundle
from rsrv.bundle.golden import Golden
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.writer import write_bundle
from rsrv.core.errors import BundleError, InvalidRequest

HOOKS = """
import os
import numpy as np
import rsrv

def preprocess(inputs):
    image = inputs["image"]
    if image.max() == 255:
        raise rsrv.HookRejected("255 is no pixel")
    if image.max() == 254:
        raise ValueError("254 is odd")
    if image.max() == 253:
        return {"x": image}
    if image.max() == 252:
        os._exit(3)
    return {"x": image.astype(np.float32)}

def postprocess(outputs):
    return {"sum": outputs["y"].sum(-1), "rows": np.full(len(outputs["y"]), len(outputs["y"]), np.int32)}
"""


@pytest.fixture(scope="module")
def process() -> Iterator[AuditProcess]:
    with AuditProcess(backend="cpu") as process:
        yield process


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hooked(tmp_path_factory.mktemp("hooks") / "net")


def hooked(path: Path, hooks: str = HOOKS, **changes: Any) -> Path:
    client: dict[str, Any] = {
        "client_inputs": {"image": ((N, 3), np.uint8)},
        "client_outputs": {"sum": ((N,), np.float32), "rows": ((N,), np.int32)},
    }
    return write_affine(path, batch_sizes=(1, 4), hooks=hooks, **{**client, **changes})


def sample(*values: int) -> Golden:
    """What the bundle above is to answer to an image with a row of three equal pixels for each of `values`."""
    image = np.repeat(np.array(values, np.uint8)[:, None], 3, 1)
    total = (image.astype(np.float32) * 2 + 1).sum(-1)
    return Golden({"image": image}, {"sum": total, "rows": np.full(len(values), len(values), np.int32)})


def test_samples_go_through_both_hooks_each_with_its_own_rows(bundle: Path, process: AuditProcess) -> None:
    report = verify_bundle(bundle, goldens=[sample(1, 2, 3), sample(4), sample(5, 6)], hooks=True, process=process)
    assert report.hooks
    assert [(p.file, p.verdict, len(p.samples)) for p in report.programs] == [
        ("model.b1.mlir", "ok", 3),
        ("model.b4.mlir", "ok", 3),
    ]
    assert report.counts == (6, 6)
    assert report.to_json()["hooks"] is True


def test_a_difference_behind_the_hooks_is_a_mismatch(bundle: Path, process: AuditProcess) -> None:
    wrong = sample(1)
    golden = Golden(wrong.inputs, {**wrong.outputs, "rows": np.array([7], np.int32)})
    report = verify_bundle(bundle, goldens=[sample(1), golden], hooks=True, batches=[4], process=process)
    (program,) = report.programs
    assert {index: parity.ok for index, parity in program.samples.items()} == {0: True, 1: False}
    assert not report.passed()


def test_a_sample_that_a_hook_fails_on_fails_alone(bundle: Path, process: AuditProcess) -> None:
    goldens = [sample(1), sample(255), sample(254), sample(253)]
    report = verify_bundle(bundle, goldens=goldens, hooks=True, batches=[4], process=process)
    (program,) = report.programs
    problems = {index: str(parity) for index, parity in program.samples.items()}
    assert problems[0] == ""
    assert "hook preprocess of model 'net' rejected it: 255 is no pixel" in problems[1]
    assert "raised ValueError: 254 is odd" in problems[2]
    assert "what the hook preprocess returned input 'x' is u8[1,3], want f32[n,3]" in problems[3]
    assert report.counts == (1, 4)


def test_a_hook_that_ends_its_process_fails_its_program_and_the_next_bundle_is_verified(
    bundle: Path, process: AuditProcess
) -> None:
    report = verify_bundle(bundle, goldens=[sample(252)], hooks=True, batches=[1], process=process)
    assert "ended its process" in str(report.programs[0].problem)
    assert verify_bundle(bundle, goldens=[sample(1)], hooks=True, process=process).passed()


def test_a_sweep_with_hooks_asks_for_what_clients_send(bundle: Path, process: AuditProcess) -> None:
    asked: list[Any] = []

    def sweep(inputs: Sequence[SizedInput]) -> list[Golden]:
        asked.extend((spec.name, spec.dtype.value, shape) for spec, shape in inputs)
        return [sample(*range(inputs[0][1][0]))]

    assert verify_bundle(bundle, sweep=sweep, hooks=True, process=process).passed()
    assert asked == [("image", "u8", (1, 3)), ("image", "u8", (4, 3))]


def test_sizes_that_only_callers_know_ask_for_samples(tmp_path: Path, process: AuditProcess) -> None:
    tensor = IOSpec("x", np.float32, (1, 3), batch_axis=0)
    path = write_bundle(
        tmp_path / "net",
        name="net",
        executable_inputs=[tensor],
        executable_outputs=[IOSpec("y", np.float32, (1, 3), batch_axis=0)],
        modules={1: lower(lambda x: (x,), [((1, 3), np.float32)])},
        weights=[],
        client_inputs=[IOSpec("text", np.uint8, (1, -1, 2), batch_axis=0)],
        client_outputs=[IOSpec("y", np.float32, (1, 3), batch_axis=0)],
        hooks="def preprocess(inputs): return inputs\n",
    )
    report = verify_bundle(path, sweep=lambda inputs: [], hooks=True, process=process)
    assert "client input 'text' is u8[n,?,2], whose sizes only callers know" in str(report.programs[0].problem)
    assert not report.passed()


def test_goldens_of_the_bundle_are_of_the_program_alone(bundle: Path, process: AuditProcess) -> None:
    report = verify_bundle(bundle, hooks=True, process=process)
    assert "its goldens are of the program alone" in str(report.problem)


def test_hooks_run_by_themselves_for_an_original_between_them(bundle: Path, process: AuditProcess) -> None:
    opened = open_bundle(bundle)
    made = process.call_hook(opened, "preprocess", sample(1, 2).inputs)
    assert made["x"].dtype == np.float32
    assert process.call_hook(opened, "postprocess", {"y": made["x"]})["sum"].tolist() == [3, 6]
    with pytest.raises(BundleError, match="255 is no pixel"):
        process.call_hook(opened, "preprocess", sample(255).inputs)
    with pytest.raises(BundleError, match="the hook preprocess ended its process"):
        process.call_hook(opened, "preprocess", sample(252).inputs)


def test_a_hook_that_is_not_there_passes_its_arrays_on(tmp_path: Path, process: AuditProcess) -> None:
    post = "def postprocess(outputs): return {'z': outputs['y'] + 1}\n"
    tensor = {"x": ((N, 3), np.float32)}
    path = hooked(tmp_path / "net", post, client_inputs=tensor, client_outputs={"z": ((N, 3), np.float32)})
    x = np.ones((2, 3), np.float32)
    assert process.call_hook(open_bundle(path), "preprocess", {"x": x})["x"].tolist() == x.tolist()
    assert verify_bundle(path, goldens=[Golden({"x": x}, {"z": x * 2 + 2})], hooks=True, process=process).passed()


def test_a_process_sees_that_another_bundle_has_taken_the_place_of_the_last(
    tmp_path: Path, process: AuditProcess
) -> None:
    x = np.ones((1, 3), np.float32)
    for scale in (2.0, 5.0):
        path = write_affine(tmp_path / f"new{scale}" / "net", scale=scale, batch_sizes=(1,))
        for file in path.iterdir():
            (tmp_path / "net").mkdir(exist_ok=True)
            file.replace(tmp_path / "net" / file.name)
        assert verify_bundle(
            tmp_path / "net", goldens=[Golden({"x": x}, {"y": x * scale + 1})], process=process
        ).passed()


def test_a_server_is_asked_once_for_each_sample_and_by_rows(bundle: Path, process: AuditProcess) -> None:
    asked: list[int] = []

    def ask(inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        rows = inputs["image"][:, 0]
        asked.append(len(rows))
        if rows[0] == 255:
            raise InvalidRequest("255 is no pixel")
        return sample(*rows).outputs

    goldens = [sample(1, 2), sample(3), sample(4, 5), sample(255)]
    report = verify_bundle(bundle, goldens=goldens, ask=ask, process=process)
    assert asked == [1, 1, 2, 2]
    assert (report.served, report.hooks) == (True, True)
    assert [(p.file, p.batch_key, sorted(p.samples)) for p in report.programs] == [
        ("server", 1, [1, 3]),
        ("server", 2, [0, 2]),
    ]
    assert "the server refused it: 255 is no pixel" in str(report.programs[0].samples[3])
    assert not report.passed()
    assert verify_bundle(bundle, goldens=goldens[:3], ask=ask, process=process).passed()


def test_a_server_that_is_gone_is_the_problem_of_what_it_was_asked(bundle: Path, process: AuditProcess) -> None:
    def ask(inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        raise BundleError("the server exited with 3")

    report = verify_bundle(bundle, sweep=lambda inputs: [sample(1)], ask=ask, process=process)
    assert [program.problem for program in report.programs] == ["the server exited with 3"] * 2
    assert not report.passed()
