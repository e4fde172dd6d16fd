"""examples/dataset as its README says: export, serve, and all pictures through each face of the client."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server import ServerProcess

from rsrv.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "dataset"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    repo = tmp_path_factory.mktemp("dataset")
    path = list(sys.path)
    source, out = f"{EXAMPLE / 'model.py'}:make", str(repo / "colours")
    exported = main(["--quiet", "export", "jax", source, "--out", out, "--batch-sizes", "64", "--no-diff"])
    sys.path[:] = path
    assert exported == 0
    with ServerProcess(repo) as server:
        server.wait_ready()
        yield server.url


def run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLE / "colours.py"), "--url", url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--face", "io", "--shm", "on"),
        ("--face", "io", "--shm", "off"),
        ("--face", "map"),
        ("--face", "array"),
        ("--face", "asyncio"),
    ],
    ids=" ".join,
)
def test_every_face_of_the_client_gives_the_shares_that_were_drawn(url: str, arguments: tuple[str, ...]) -> None:
    result = run(url, "--items", "300", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"300 pictures in [\d.]+ s, \d+ a second; 300 as drawn\n", result.stdout)


def test_what_cannot_be_done_is_said_in_one_line(url: str) -> None:
    unknown = run(url, "--items", "3", "--model", "shapes")
    assert unknown.returncode == 1
    assert re.fullmatch(r"shapes at \S+: .*\n", unknown.stderr)
    assert run(url, "--items", "0").stderr == "--items: at least 1\n"


def test_the_commands_of_the_readme_are_those_that_run() -> None:
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    for file in EXAMPLE.glob("*.py"):
        assert f"[{file.name}]({file.name})" in readme
    model = (EXAMPLE / "model.py").read_text(encoding="utf-8")
    export = next(line.removeprefix("$ ") for line in readme.splitlines() if line.startswith("$ rsrv export"))
    assert export in model
    assert all(f"--face {face}" in readme for face in ("io", "map", "array", "asyncio"))
    assert os.access(EXAMPLE / "colours.py", os.R_OK)
