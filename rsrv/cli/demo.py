"""``rsrv demo``: the newcomer's first minute. A model is exported, checked, served and called; every step is timed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsrv.cli import output

if TYPE_CHECKING:
    import numpy as np

    from rsrv.client.model import KServeModel
    from rsrv.client.server import Server

Arrays = dict[str, Any]

NAME = "digits"
BATCH_SIZES = (1, 8)
CALLERS = 16
CALLS = 128
_TOLERANCE = 1e-4


def demo(
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Leave the model's source and its bundle in this new directory.")
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Export a small model, check it, serve it, call it, and show what happened.

    Everything runs on the CPU of this machine, on free ports of the loopback interface, and is stopped and removed
    at the end. Answers are compared with those of the same model run by JAX alone.

    Example:
        rsrv demo
        rsrv demo --keep first-steps
    """
    from rsrv.cli.local_server import signals_unwind
    from rsrv.core.errors import UsageError

    if keep is not None and keep.exists():
        raise UsageError(f"{keep} exists already", hint="name a directory that --keep can create")
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process exports and compares, its child serves: neither needs more
    steps: list[Step] = []
    with signals_unwind(), tempfile.TemporaryDirectory(prefix="rsrv-demo-") as scratch:
        _run(Path(scratch), steps)
        if keep is not None:
            shutil.copytree(scratch, keep, ignore=shutil.ignore_patterns("*.log", "__pycache__"))
    if output.is_json():
        output.json([{"step": s.what, "result": s.result, "seconds": round(s.seconds, 4)} for s in steps])
        return
    lines = [(step.what, step.result, _duration(step.seconds)) for step in steps]
    output.table("rsrv demo: from Python source to served answers", ["step", "result", "time"], lines)
    if keep is None:
        output.note("Next: rsrv export jax FILE.py:FN --out models/NAME, then rsrv serve models")
    else:
        output.note(f"Next: rsrv serve {keep / 'models'}, and rsrv infer {NAME} --input image=random elsewhere")


@dataclass(slots=True)
class Step:
    """One thing that the demo did; `result` is set by the code that did it."""

    what: str
    result: str = ""
    seconds: float = 0.0


@contextlib.contextmanager
def _step(steps: list[Step], what: str) -> Iterator[Step]:
    """Announce a step, time the block and record it."""
    output.note(f"{what} …")
    step = Step(what)
    start = time.perf_counter()
    yield step
    step.seconds = time.perf_counter() - start
    steps.append(step)


def _run(scratch: Path, steps: list[Step]) -> None:
    from rsrv.cli.demo_model import SOURCE
    from rsrv.cli.local_server import LocalServer
    from rsrv.client.model import KServeModel
    from rsrv.client.server import Server
    from rsrv.export.factory import load_factory

    source = scratch / f"{NAME}.py"
    source.write_text(SOURCE)
    bundle = scratch / "models" / NAME
    bundle.parent.mkdir()
    with _step(steps, "export") as step:
        step.result = _export(source, bundle)
    with _step(steps, "check") as step:
        step.result = _check(bundle)
    images: Callable[..., Any] = load_factory(f"{source}:images")
    reference: Callable[..., Arrays] = load_factory(f"{source}:reference")
    with LocalServer(bundle.parent, scratch / "server.log") as server:
        with _step(steps, "serve") as step:
            step.result = server.wait_ready()
        with (
            Server(server.url) as counters,
            KServeModel(server.url, NAME, shared_memory="off") as inline,
            KServeModel(server.url, NAME, shared_memory="on") as shared,
        ):
            for rows in BATCH_SIZES:
                pixels, digits = images(rows, seed=10 + rows)
                expected = reference(pixels)
                for where, model in (("inline", inline), ("in shared memory", shared)):
                    with _step(steps, f"{rows} image{'s' if rows > 1 else ''} {where}") as step:
                        step.result = _ask(model, pixels, digits, expected)
            pixels, digits = images(CALLS, seed=99)
            expected = reference(pixels)
            with _step(steps, f"{CALLS} requests from {CALLERS} threads") as step:
                step.result = _ask_together(inline, counters, pixels, digits, expected)
        with _step(steps, "stop") as step:
            step.result = f"exit code {server.stop()}"


def _export(source: Path, bundle: Path) -> str:
    from rsrv.export.bundle import export_bundle
    from rsrv.export.factory import call_factory

    model = call_factory(f"{source}:make")
    options: Arrays = {"dir": bundle, "batch_sizes": BATCH_SIZES, "collect_git": False}
    export_bundle("jax", model.fn, model.params, model.inputs, **options)
    size = sum(file.stat().st_size for file in bundle.iterdir())
    return f"{len(list(bundle.glob('*.mlir')))} programs and their weights, {size / 1000:.0f} kB"


def _check(bundle: Path) -> str:
    from rsrv.audit.check import check_bundle
    from rsrv.core.errors import BundleError

    report = check_bundle(bundle)
    if not report.passed():
        raise BundleError("; ".join(finding.message for finding in report.errors))
    return f"{len(report.checks)} checks, {len(report.findings)} findings"


def _ask(model: KServeModel, pixels: np.ndarray, digits: np.ndarray, expected: Arrays) -> str:
    """One request, whose rows fill a compiled batch size: the answer has the very bits of JAX's."""
    from rsrv.core.errors import RsrvError

    answer = model.infer({"image": pixels})
    for name, array in expected.items():
        if answer[name].dtype != array.dtype or answer[name].tobytes() != array.tobytes():
            raise RsrvError(f"output {name!r} differs from JAX's: {answer[name]} instead of {array}")
    read = answer["digit"]
    return f"read {' '.join(map(str, read.tolist()))}: {_right(read, digits)}, bit-equal to JAX"


def _ask_together(
    model: KServeModel, counters: Server, pixels: np.ndarray, digits: np.ndarray, expected: Arrays
) -> str:
    """Many one-row requests at once: merged into batches of any size, so equal to JAX up to rounding."""
    import numpy as np

    from rsrv.core.errors import RsrvError

    before = counters.model_counts(NAME).executions
    with ThreadPoolExecutor(CALLERS) as callers:
        answers = list(callers.map(lambda row: model.infer({"image": pixels[row : row + 1]}), range(len(pixels))))
    executions = counters.model_counts(NAME).executions - before
    for name, array in expected.items():
        joined = np.concatenate([answer[name] for answer in answers])
        if joined.shape != array.shape or not np.allclose(joined, array, rtol=0, atol=_TOLERANCE):
            raise RsrvError(f"output {name!r} differs from JAX's by more than {_TOLERANCE}")
    read = np.concatenate([answer["digit"] for answer in answers])
    return f"{_right(read, digits)}; merged into {executions} executions"


def _right(read: np.ndarray, digits: np.ndarray) -> str:
    return f"{int((read == digits).sum())} of {len(digits)} right"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
