"""What is shipped for the CI of others, an action and a pre-commit hook, does what docs/ci.md says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from rsrv.bundle import IOSpec, write_bundle
from rsrv.bundle.golden import write_golden
from rsrv.stablehlo import serialize

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step.get("id") or step["name"]: step for step in ACTION["runs"]["steps"]}
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BIN = Path(sysconfig.get_path("scripts"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's repository: a sound bundle, one whose weights are a Git LFS pointer, and files in no bundle."""
    root = tmp_path_factory.mktemp("repository")
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    write_golden(root / "golden", [{"x": x}], [{"y": x}])
    text = "func.func public @main(%x: tensor<2x4xf32>, %w: tensor<16xf32>) -> tensor<2x4xf32> "
    for name in ("sound", "pointer"):
        write_bundle(
            root / "models" / name,
            name=name,
            executable_inputs=[IOSpec("x", "f32", (1, 4), batch_axis=0)],
            executable_outputs=[IOSpec("y", "f32", (1, 4), batch_axis=0)],
            modules={2: serialize(text + "{ return %x : tensor<2x4xf32> }")},
            weights=[("w", np.zeros(16, np.float32))],
            extra_files={"golden.safetensors": root / "golden"},
        )
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234\n"
    (root / "models" / "pointer" / "weights.safetensors").write_text(pointer)
    (root / "models" / "README.md").write_text("not a bundle\n")
    return root


class Runner:
    """Runs steps of the action as GitHub does: expressions are filled in, outputs are read from a file."""

    def __init__(self, directory: Path, workspace: Path, **inputs: str) -> None:
        self.inputs = {name: facts.get("default", "") for name, facts in ACTION["inputs"].items()} | inputs
        self.workspace = workspace
        self.directory = directory
        self.output = directory / "output"
        self.known = {
            "runner.temp": str(directory),
            "github.action_path": str(ROOT),
            "steps.python.outputs.python-path": sys.executable,
            **{f"inputs.{name}": value for name, value in self.inputs.items()},
        }

    def run(self, step: dict[str, Any], **env: str) -> subprocess.CompletedProcess[str]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "a value in a script is an injection"
        script = self.directory / "script.sh"
        script.write_text(step["run"])
        values = {name: self.filled(value) for name, value in step["env"].items()}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
            cwd=self.workspace,
            env={**os.environ, **values, "GITHUB_OUTPUT": str(self.output), **env},
            capture_output=True,
            text=True,
        )

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{\{ *(.+?) *\}\}", lambda match: self.known[match[1]], text)

    @property
    def outputs(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.output.read_text().splitlines())


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """Stands in for the environment that the step before makes."""
    (tmp_path / "rsrv-bundle-check").mkdir()
    (tmp_path / "rsrv-bundle-check" / "bin").symlink_to(BIN)
    return tmp_path


def test_the_action_checks_what_its_pattern_matches_and_leaves_a_report(repository: Path, installed: Path) -> None:
    runner = Runner(installed, repository, paths="models/s*/\n", junit="build/a report.xml")
    done = runner.run(STEPS["check"])
    assert done.returncode == 0, done.stderr
    assert "sound: ok" in done.stderr
    suites = ElementTree.parse(repository / runner.outputs["junit"]).getroot()
    assert [suite.get("name") for suite in suites] == ["sound"]


def test_the_action_fails_on_one_bad_bundle_and_still_names_its_report(repository: Path, installed: Path) -> None:
    runner = Runner(installed, repository, paths="models/*/", run="false", junit=str(installed / "report.xml"))
    done = runner.run(STEPS["check"])
    assert done.returncode == 1
    assert "pointer: failed" in done.stderr
    assert "this is a pointer of Git LFS, not the file itself (B-60) (git lfs pull)" in done.stdout
    suites = ElementTree.parse(runner.outputs["junit"]).getroot()
    assert {suite.get("name"): suite.get("failures") for suite in suites} == {"pointer": "1", "sound": "0"}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, ["--junit", "rsrv-bundle-check.xml", "--run"]),
        ({"run": "false", "strict": "true"}, ["--junit", "rsrv-bundle-check.xml", "--strict"]),
        ({"junit": "out put.xml"}, ["--junit", "out put.xml", "--run"]),
    ],
)
def test_the_inputs_of_the_action_become_options_and_each_line_an_argument(
    tmp_path: Path, inputs: dict[str, str], expected: list[str]
) -> None:
    (tmp_path / "rsrv-bundle-check" / "bin").mkdir(parents=True)
    command = tmp_path / "rsrv-bundle-check" / "bin" / "rsrv"
    command.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    command.chmod(0o755)
    for name in ("models/a", "models/b", "two words"):
        (tmp_path / name).mkdir(parents=True)
    paths = "models/*/\ntwo words\n$(touch injected)\nno*where\n--json"
    done = Runner(tmp_path, tmp_path, paths=paths, **inputs).run(STEPS["check"])
    words = ["--", "models/a/", "models/b/", "two words", "$(touch injected)", "no*where", "--json"]
    assert done.stdout.splitlines() == ["bundle", "check", *expected, *words]
    assert not (tmp_path / "injected").exists()


@pytest.mark.slow
def test_the_action_installs_the_code_of_its_own_ref(tmp_path: Path, repository: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "rsrv", source / "rsrv", ignore=shutil.ignore_patterns("__pycache__"))
    runner = Runner(tmp_path, repository, paths="models/sound")
    runner.known["github.action_path"] = str(source)
    # The requirements, those of the build among them, are those of this environment, which has them already.
    here = sysconfig.get_path("purelib")
    done = runner.run(STEPS["Install rsrv"], PIP_NO_DEPS="1", PIP_NO_BUILD_ISOLATION="0", PYTHONPATH=here)
    assert done.returncode == 0, done.stderr
    done = runner.run(STEPS["check"], PYTHONPATH=here)
    assert done.returncode == 0, done.stderr
    assert "sound: ok" in done.stderr


def test_a_version_is_installed_from_the_registry(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/"; else echo "$@"; fi\n'
    )
    python.chmod(0o755)
    runner = Runner(tmp_path, tmp_path, paths="models", version="0.1.0")
    runner.known["steps.python.outputs.python-path"] = str(python)
    done = runner.run(STEPS["Install rsrv"])
    assert done.stdout.split()[-1] == "rsrv[serve]==0.1.0"


def test_python_comes_first_and_stays_out_of_the_job() -> None:
    first = ACTION["runs"]["steps"][0]
    assert first["uses"].startswith("actions/setup-python@")
    assert first["with"]["update-environment"] is False
    assert ACTION["runs"]["using"] == "composite"
    assert ACTION["outputs"]["junit"]["value"] == "${{ steps.check.outputs.junit }}"


def test_the_hook_checks_bundles_of_the_files_that_it_is_given(repository: Path) -> None:
    entry = [BIN / "rsrv", *shlex.split(HOOK["entry"])[1:]]
    sound = subprocess.run(
        [*entry, "models/sound/manifest.yaml", "models/README.md"], cwd=repository, capture_output=True, text=True
    )
    assert (sound.returncode, "sound: ok" in sound.stderr) == (0, True), sound.stderr
    assert "pointer" not in sound.stderr
    both = ["models/sound/model.b2.mlir", "models/pointer/weights.safetensors"]
    assert subprocess.run([*entry, *both], cwd=repository, capture_output=True).returncode == 1


def test_the_hook_is_one_process_with_everything_that_the_check_needs() -> None:
    assert HOOK["language"] == "python"
    assert HOOK["require_serial"] is True
    assert HOOK["additional_dependencies"] == [".[serve]"]


def test_every_input_output_and_hook_is_documented() -> None:
    inputs, outputs = (
        re.findall(r"^\| `([\w-]+)` \|", PAGE.split(f"| {what} |", 1)[1].split("\n\n")[0], re.MULTILINE)
        for what in ("input", "output")
    )
    assert inputs == list(ACTION["inputs"])
    assert outputs == list(ACTION["outputs"])
    workflow, config = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    (uses,) = (step for step in workflow["jobs"]["bundles"]["steps"] if step.get("id") == "bundles")
    assert set(uses["with"]) <= set(ACTION["inputs"])
    assert config["repos"][0]["hooks"][0]["id"] == HOOK["id"]
