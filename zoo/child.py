"""One model in a process of its own: made, exported, checked, served, compared."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.models import ZooModel, find
from zoo.phases import Clock, export_clock
from zoo.results import FAILED, SERVED, Result, append

if TYPE_CHECKING:
    from rsrv.runtime.compile_pool import CompilePool

SEED = 1
XLA = "XLA compile"

LEAST_SPREAD = 1e-4
"""Ten times the tolerance: where the rows of an answer differ less than that, agreement proves little."""


@dataclass(frozen=True)
class Order:
    """What to do: the result's name, the model, other batch sizes than its own, and whether the export is all."""

    name: str
    model: str
    batch_sizes: tuple[int, ...] = ()
    export_only: bool = False


def work(order: Order, cache: str, log: str, folder: str, memory_gb: float) -> None:
    """Measure one model in this process, which is a fresh one, and append the result to `cache`.

    The process becomes a session of its own, so that one signal reaches all that it starts, and writes to `log`. All
    temporary files are in `folder`.
    """
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    limit = int(memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    model = find(order.model)
    measurement = Measurement(model, order.batch_sizes or model.batch_sizes, export_only=order.export_only)
    append(Path(cache), measurement.run(order.name))


class Measurement:
    """The steps, and what was found until one of them failed."""

    def __init__(self, model: ZooModel, batch_sizes: Sequence[int], *, export_only: bool = False) -> None:
        self.model = model
        self.batch_sizes = tuple(batch_sizes)
        self.export_only = export_only
        self.clock = Clock()
        self.found: dict[str, Any] = {}
        self.stage = "make"

    def run(self, name: str) -> Result:
        status, error = SERVED, ""
        try:
            with ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rsrv-zoo-"))
                self._steps(Path(folder) / self.model.name, stack)
        except Exception as caught:
            status, error = FAILED, _said(caught)
            sys.stderr.write("".join(traceback.format_exception(caught)))
        return Result(
            name=name,
            status=status,
            stage="" if status == SERVED else self.stage,
            error=error,
            batch_sizes=self.batch_sizes,
            cpu={step: round(seconds, 3) for step, seconds in self.clock.cpu.items()},
            wall={step: round(seconds, 3) for step, seconds in self.clock.wall.items()},
            facts=_facts(),
            **self.found,
        )

    def _steps(self, bundle: Path, stack: ExitStack) -> None:
        import torch

        from rsrv.audit.programs import parse_pool
        from rsrv.export import export_bundle

        # Eager PyTorch is only compared with. On one thread it does not wait for another process to leave a core.
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what packages of other years warn about is not ours to mend
            module, inputs = self.model.make()
        self.stage = "export"
        # One process reads the programs for the export and for the check, unless the export alone is to be timed.
        pool = None if self.export_only else stack.enter_context(parse_pool())
        with export_clock(self.clock):
            export_bundle(
                "torch",
                module,
                inputs,
                dir=bundle,
                batch_sizes=self.batch_sizes,
                collect_git=False,
                golden=1,
                pool=pool,
                **self.model.options,
            )
        self._describe(bundle)
        if self.export_only:
            return
        self._compile(bundle)
        self.stage = "check"
        self._check(bundle, pool)
        self._serve(bundle, module, inputs)

    def _describe(self, bundle: Path) -> None:
        from rsrv.bundle.directory import open_bundle

        opened = open_bundle(bundle)
        assert opened.weights_path is not None
        self.found["parameters_mb"] = round(opened.weights_path.stat().st_size / 1e6, 3)
        self.found["programs_kb"] = round(sum(file.stat().st_size for file in bundle.glob("*.mlir")) / 1e3, 1)
        self.found["batch_export"] = str(opened.manifest.provenance.get("batch_export", ""))

    def _compile(self, bundle: Path) -> None:
        from rsrv.runtime import PjrtDevice

        device = PjrtDevice("cpu")
        try:
            for file in sorted(bundle.glob("*.mlir")):
                data = file.read_bytes()
                with self.clock.step(XLA):
                    device.compile(data)
        finally:
            device.close()

    def _check(self, bundle: Path, pool: CompilePool | None) -> None:
        """``rsrv bundle check --run --strict``: nothing wrong, nothing unproven, nothing left out."""
        from rsrv.audit.check import check_bundle

        report = check_bundle(bundle, run=True, pool=pool)
        if not report.passed(strict=True):
            raise Unproven(
                "; ".join([*(found.message for found in report.findings), *(part.reason for part in report.skipped)])
            )

    def _serve(self, bundle: Path, module: Any, inputs: Mapping[str, Any]) -> None:
        from rsrv.audit.parity import merge
        from rsrv.export.torch.sources import model_of
        from zoo.serving import serve_and_compare

        self.stage = "serve"
        model = model_of(module, inputs, None)
        reports = serve_and_compare(bundle, model, self.batch_sizes)
        self.stage = "numbers"
        report = merge(reports)
        self.found["max_abs"] = max(row.max_abs for row in report.rows)
        self.found["rel"] = report.worst_rel
        self.found["spread"] = min(map(_spread, model.run(model.call.tensors).values()))
        if not report.ok or report.unproven:
            raise Unproven(str(report))
        if self.found["spread"] < LEAST_SPREAD:
            raise Unproven(f"the rows of the answers differ by {self.found['spread']:.2g} only")


class Unproven(Exception):
    """The numbers are wrong, or prove nothing."""


def _spread(output: Any) -> float:
    rows = output.double()
    largest = float(rows.abs().max())
    return float((rows - rows[:1]).abs().max()) / largest if largest else 0.0


def _said(error: Exception) -> str:
    from rsrv.core.errors import RsrvError

    if isinstance(error, RsrvError):
        return error.message + (f" (hint: {error.hint})" if error.hint else "")
    return f"{type(error).__name__}: {error}".strip()


def _facts() -> dict[str, Any]:
    from importlib.metadata import version

    from benchmarks.report import machine

    packages = ("torch", "torchax", "torchvision", "timm", "transformers", "facenet-pytorch", "torchcrepe")
    found = machine()
    for package in packages:
        try:
            found["packages"][package] = version(package)
        except ImportError:
            continue
    return found
