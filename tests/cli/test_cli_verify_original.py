"""``rsrv bundle verify`` by the way of a request: hooks, a real server, what the original returns, repositories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import N, write_affine

from rsrv.cli.main import main

PROGRAM = """
import jax.numpy as jnp
import numpy as np

PIXEL = {pixel}

def make():
    return lambda params, x: {{"y": x * params["scale"] + 1}}, {{"scale": np.full(3, 2, np.float32)}}, {{
        "x": np.zeros((1, 3), np.float32)
    }}

def whole():
    def fn(params, image):
        y = image.astype(jnp.float32) / PIXEL * params["scale"] + 1
        return y.sum(-1), y.argmax(-1).astype(jnp.int32)
    params = {{"scale": np.full(3, 2, np.float32)}}
    return {{"fn": fn, "params": params, "inputs": {{"image": np.zeros((1, 3), np.uint8)}}}}
"""
HOOKS = """
import numpy as np

def preprocess(inputs):
    return {"x": inputs["image"].astype(np.float32) / 255}

def postprocess(outputs):
    return {"total": outputs["y"].sum(-1), "best": outputs["y"].argmax(-1).astype(np.int32)}
"""
CLIENT: dict[str, Any] = {
    "client_inputs": {"image": ((N, 3), np.uint8)},
    "client_outputs": {"total": ((N,), np.float32), "best": ((N,), np.int32)},
}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of a bundle with hooks and one without, and originals that fit and that do not."""
    room = tmp_path_factory.mktemp("room")
    (room / "models").mkdir()
    write_affine(room / "models" / "hooked", batch_sizes=(1, 4), hooks=HOOKS, **CLIENT)
    write_affine(room / "models" / "plain", batch_sizes=(1, 2))
    (room / "model.py").write_text(PROGRAM.format(pixel="255"))
    (room / "wrong.py").write_text(PROGRAM.format(pixel="250"))
    (room / "images").mkdir()
    for index in range(3):
        np.save(room / "images" / f"{index}.npy", np.array([index, 200, 7], np.uint8))
    return room


def verify(room: Path, name: str, *options: str) -> int:
    return main(["bundle", "verify", str(room / "models" / name), *options])


def test_an_original_that_takes_what_clients_send_is_compared_through_the_hooks(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, images = f"jax:{room}/model.py:whole", ("--samples", str(room / "images"))
    assert verify(room, "hooked", "--against", model) == 0
    assert "ok against jax" in (printed := capsys.readouterr()).err
    assert "(through the hooks, 2 of 2 samples passed, 2 programs)" in printed.err
    # The original calls its outputs otherwise: they are compared by position, under the names of the bundle.
    assert [line.split()[3] for line in printed.out.splitlines()[1:]] == ["total", "best"] * 2
    assert verify(room, "hooked", "--against", model, *images) == 0
    assert "6 of 6 samples passed" in capsys.readouterr().err
    assert verify(room, "hooked", "--against", f"jax:{room}/wrong.py:whole", *images) == 1
    assert "mismatch" in capsys.readouterr().out


def test_an_original_that_is_the_program_is_compared_with_the_program_or_between_the_hooks(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, images = f"jax:{room}/model.py:make", ("--samples", str(room / "images"))
    assert verify(room, "hooked", "--against", model) == 0
    assert "(2 of 2 samples passed" in capsys.readouterr().err
    assert verify(room, "hooked", "--against", model, "--hooks", "both", *images, "--json") == 0
    (bundle,) = json.loads(capsys.readouterr().out)["bundles"]
    assert (bundle["hooks"], bundle["sample_names"]) == (True, ["0.npy", "1.npy", "2.npy"])
    assert verify(room, "hooked", "--against", model, "--hooks", "bundle") == 1
    assert "the bundle has the input 'image'; those of" in capsys.readouterr().err


def test_a_real_server_answers_at_every_compiled_batch_size(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(room, "hooked", "--against", f"jax:{room}/model.py:whole", "--served", "--json") == 0
    (bundle,) = json.loads(capsys.readouterr().out)["bundles"]
    assert (bundle["served"], bundle["hooks"]) == (True, True)
    assert [(program["batch_size"], program["verdict"]) for program in bundle["programs"]] == [(1, "ok"), (4, "ok")]
    assert verify(room, "hooked", "--against", f"jax:{room}/wrong.py:make", "--served", "--hooks", "off") == 2
    capsys.readouterr()


def test_a_served_bundle_that_differs_ends_with_code_1(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_affine(tmp_path / "plain", scale=3.0, batch_sizes=(2,))
    files = ["--served", "--results", str(tmp_path / "r.tsv"), "--report", str(tmp_path / "r.md")]
    assert main(["bundle", "verify", str(tmp_path / "plain"), "--against", f"jax:{room}/model.py:make", *files]) == 1
    assert "failed against" in capsys.readouterr().err
    assert (tmp_path / "r.tsv").read_text().splitlines()[1].startswith("plain\t2\tfalse\t0.")
    assert "plain against jax" in (tmp_path / "r.md").read_text()
    assert ", served: 0 of 1 samples passed" in (tmp_path / "r.md").read_text()


def test_a_bundle_that_cannot_be_served_fails_with_the_servers_reason(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_affine(
        tmp_path / "net", batch_sizes=(1,), hooks="raise ValueError('no vocabulary')\n" + HOOKS, **CLIENT
    )
    assert main(["bundle", "verify", str(path), "--against", f"jax:{room}/model.py:whole", "--served"]) == 1
    printed = capsys.readouterr().err
    assert "bundle 'net' is not served: model 'net' failed" in printed
    assert "no vocabulary" in printed


def test_what_the_original_returns_is_shown_without_running_a_bundle(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--against", f"jax:{room}/model.py:whole", "--reference-only"]
    assert verify(room, "hooked", *model, "--samples", str(room / "images"), "--max", "1") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["bundle", "rows", "sample", "output", "dtype", "shape", "lowest", "highest", "not", "finite"]
    assert [line[:6] for line in lines[1:]] == [
        ["hooked", "1", "0.npy", "total", "f32", "1"],
        ["hooked", "1", "0.npy", "best", "i32", "1"],
    ]
    assert lines[1][6] == f"{2 * 207 / 255 + 3:.6g}"
    assert verify(room, "plain", "--against", f"jax:{room}/model.py:make", "--reference-only", "--batch", "2") == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:6] == ["plain", "2", "0", "y", "f32", "2x3"]


def test_a_repository_is_verified_without_what_is_excluded(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--against", f"jax:{room}/model.py:make"]
    assert main(["bundle", "verify", "--repo", str(room / "models"), *model, "--exclude", "hooked"]) == 0
    assert "hooked" not in capsys.readouterr().err
    assert main(["bundle", "verify", "--repo", str(room / "models"), *model]) == 0
    assert [line.partition(":")[0].rpartition("/")[2] for line in capsys.readouterr().err.splitlines()] == [
        "hooked",
        "plain",
    ]


def test_nothing_to_verify_is_wrong_usage(room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "verify"]) == 2
    assert "name bundles to verify" in capsys.readouterr().err
    assert main(["bundle", "verify", "--repo", str(tmp_path)]) == 2
    assert "holds no bundle" in capsys.readouterr().err
    missing = ["--against", f"jax:{room}/model.py:make", "--reference-only"]
    assert main(["bundle", "verify", str(tmp_path / "gone"), *missing]) == 2
    capsys.readouterr()


def test_a_device_that_is_not_there_is_named(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import jax

    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is one here")
    assert verify(room, "plain", "--against", f"jax:{room}/model.py:make", "--device", "cuda") == 2
    assert "--device cuda: JAX has no such device" in capsys.readouterr().err
