"""Runs `convert.py` with the interpreter that the user named, and reads what it made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rsrv.core.errors import ExportError, UsageError

CONVERT_SECONDS = 900.0
"""How long one conversion may take. Most take seconds, nearly all of them imports, but those of a busy machine."""

_SCRIPT = Path(__file__).with_name("convert.py")
_TAIL_BYTES = 4096
_PACKAGES = "torch==2.9.1 torch_xla==2.9.0"
_RECIPE = (
    f"make an environment for it: python3.11 -m venv DIR, DIR/bin/pip install {_PACKAGES}, and name DIR/bin/python"
)
_OTHER = "the default, --lowering torchax, knows more operators"
_NO_VARIABLES = ("PYTHON", "XLA_", "PT_XLA_", "PJRT_", "LIBTPU_", "TPU_")


@dataclass(frozen=True, eq=False)
class Conversion:
    """A program in torch-xla's own order of arguments.

    Attributes:
        arguments: what each argument is: the name of a parameter or buffer, the number of an input, or a constant.
        versions: of Python, torch and torch_xla in the other environment.
    """

    code: bytes
    arguments: tuple[str | int | np.ndarray, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Converter:
    """torch-xla in the environment of the interpreter `python`; `precision` is that of matrix products."""

    python: Path
    precision: str = "default"
    seconds: float = CONVERT_SECONDS

    def convert(self, program: torch.export.ExportedProgram) -> Conversion:
        """Raises UsageError when there is no interpreter, ExportError when torch-xla cannot convert `program`."""
        with tempfile.TemporaryDirectory(prefix="rsrv-torch-xla-") as name:
            directory = Path(name)
            saved = directory / "program.pt2"
            torch.export.save(program, saved)
            ending = self._run(saved, directory)
            report = _read_report(directory)
            if isinstance(error := report.get("error"), dict):
                raise self._refused(str(error.get("kind")), str(error.get("message")))
            if ending is not None or not report:
                words = _last_words(directory / "output")
                raise ExportError(
                    f"torch-xla ({self.python}) ended with {ending or 'no result'}{f': {words}' if words else ''}",
                    hint=_OTHER,
                )
            try:
                return _read(directory, report)
            except (KeyError, TypeError, ValueError, OSError) as error:
                raise ExportError(
                    f"torch-xla ({self.python}) wrote a report that cannot be read: {type(error).__name__}: {error}"
                ) from error

    def _run(self, saved: Path, directory: Path) -> str | None:
        """How the process ended; None for success."""
        # Isolated: neither our PYTHONPATH nor the directory of the script is on its path.
        command = [str(self.python), "-I", str(_SCRIPT), str(saved), str(directory), self.precision]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_NO_VARIABLES)}
        with (directory / "output").open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=directory,
                    env={**kept, "PJRT_DEVICE": "CPU"},
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(
                    f"--torch-xla-python {self.python} cannot be run: {error.strerror or error}", hint=_RECIPE
                ) from None
            try:
                status = process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                raise ExportError(
                    f"torch-xla ({self.python}) did not finish within {self.seconds:g} s", hint=_OTHER
                ) from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status < 0:
            return f"signal {-status} ({signal.strsignal(-status)})"
        return f"exit status {status}" if status else None

    def _refused(self, kind: str, message: str) -> ExportError:
        match kind:
            case "missing":
                return ExportError(f"{self.python} has no {message}, which --lowering torch-xla needs", hint=_RECIPE)
            case "version":
                return ExportError(f"{self.python} has {message}; wanted {_PACKAGES}", hint=_RECIPE)
            case "import":
                return ExportError(f"{self.python} cannot import torch-xla: {message}", hint=_RECIPE)
            case "read":
                return ExportError(
                    f"{self.python} cannot read a program that torch {torch.__version__} saved: {message}",
                    hint=f"the format of torch.export may have changed; {_OTHER}",
                )
        _, found, operators = message.partition("not capturable by Pytorch/XLA:")
        what = (
            f"has no lowering for {', '.join(operators.split())}" if found else f"cannot convert the model: {message}"
        )
        return ExportError(f"torch-xla {what}", hint=_OTHER)


def _read_report(directory: Path) -> dict[str, Any]:
    """Empty when there is none that can be read."""
    try:
        report = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _read(directory: Path, report: Mapping[str, Any]) -> Conversion:
    constants = [
        np.frombuffer((directory / f"constant_{number}").read_bytes(), one["dtype"]).reshape(one["shape"])
        for number, one in enumerate(report["constants"])
    ]
    arguments = tuple(_argument(kind, which, constants) for kind, which in report["arguments"])
    return Conversion((directory / "program.mlir").read_bytes(), arguments, dict(report["versions"]))


def _argument(kind: str, which: Any, constants: Sequence[np.ndarray]) -> str | int | np.ndarray:
    if kind == "weight" and isinstance(which, str):
        return which
    if kind == "input" and isinstance(which, int) and which >= 0:
        return which
    if kind == "constant" and isinstance(which, int) and 0 <= which < len(constants):
        return constants[which]
    raise ValueError(f"{[kind, which]!r} is no argument")


def _last_words(output: Path) -> str:
    with suppress(OSError):
        lines = output.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
