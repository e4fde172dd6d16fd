"""A run of ``rsrv infer``: what is sent to the model of a handle, and what the user is shown of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rsrv.cli import output
from rsrv.cli.infer.images import ImageOptions
from rsrv.cli.infer.report import COLUMNS, Tally, Timing
from rsrv.cli.infer.sending import Dataset, declares_outputs, send_once
from rsrv.cli.infer.sinks import Destination, Sink
from rsrv.cli.infer.sources import Inputs, batched_names, read_inputs
from rsrv.client.budget import Budget
from rsrv.client.shared import INLINE, LEAST_SHARED_BYTES
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel
    from rsrv.client.server import ModelMetadata


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for. With `dataset` the rows are sent in many requests."""

    specs: Sequence[str]
    dataset: bool
    rows: int | None
    only: Sequence[str]
    repeat: int
    images: ImageOptions
    destination: Destination


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: outputs in brief, their files, and the arrays where they are at hand."""

    dataset: bool
    sink: Sink
    files: Mapping[str, Path]
    tally: Tally
    timing: Timing
    transport: str
    why_inline: str | None


@contextmanager
def answer(handle: KServeModel, request: Request) -> Iterator[Answer]:
    """Send what `request` says; for the time of the block arrays in files can be read.

    Raises UsageError for inputs and options that do not suit the model, before anything is sent.
    """
    model = handle.metadata()
    _require_outputs(model, request.only)
    if names := request.only or [tensor.name for tensor in model.outputs]:  # else the first answer will tell
        request.destination.require_places(names)
    inputs = read_inputs(
        request.specs,
        model,
        rows=request.rows,
        default_rows=lambda: handle.batch_limit(Budget(handle.deadline)) if request.dataset else 1,
        images=request.images,
    )
    send = _send_dataset if request.dataset else _send_single
    with send(handle, model, inputs, request) as found:
        yield found


def show(found: Answer, *, model: str, url: str) -> None:
    """Print what came back."""
    timing = found.timing.facts()
    if output.is_json():
        arrays = {} if found.files else found.sink.arrays()
        outputs = {
            name: {**facts, **({"file": found.files[name]} if found.files else {"data": arrays[name]})}
            for name, facts in found.tally.describe().items()
        }
        head = {"model": model, "url": url, "transport": found.transport}
        reason = {"why_inline": found.why_inline} if found.why_inline else {}
        output.json({**head, **reason, "outputs": outputs, **timing})
        return
    output.table(None, COLUMNS, found.tally.table())
    for path in dict.fromkeys(found.files.values()):
        output.note(f"wrote {path}")
    if found.why_inline:
        output.note(f"without shared memory: {found.why_inline}")
    names = ("median", "p99", "min", "max") if found.dataset else ("median", "min", "max")
    milliseconds = ", ".join(f"{name} {timing[f'{name}_ms']:.2f}" for name in names)
    if found.dataset:
        rate = output.size(int(timing["bytes_per_second"]))
        output.note(
            f"{timing['rows']} rows, at most {found.timing.largest} a request, in {timing['seconds']:.3g} s: "
            f"{timing['rows_per_second']:.6g} rows/s, {rate}/s"
        )
    output.note(f"{timing['requests']} × {found.transport}; milliseconds each: {milliseconds}")


@contextmanager
def _send_single(handle: KServeModel, model: ModelMetadata, inputs: Inputs, request: Request) -> Iterator[Answer]:
    timing, tally = Timing(), Tally(numbers=not output.is_json())
    outputs: dict[str, np.ndarray] = {}
    start = time.perf_counter()
    for _ in range(request.repeat):
        outputs = send_once(handle, inputs, request.only, timing)
    timing.elapsed = time.perf_counter() - start
    count = inputs.request_rows()
    batched = frozenset(
        name for name in batched_names(model, model.outputs) if name in outputs and outputs[name].shape[:1] == (count,)
    )
    transport = handle.transport or INLINE
    with request.destination.sink(count, batched) as sink:
        sink.write(range(count), outputs)
        tally.add(range(count), outputs)
        why = _why_inline(handle) if transport == INLINE else None
        yield Answer(False, sink, sink.finish(), tally, timing, transport, why)


@contextmanager
def _send_dataset(handle: KServeModel, model: ModelMetadata, inputs: Inputs, request: Request) -> Iterator[Answer]:
    from rsrv.client.dataset.driver import infer_async

    timing, tally = Timing(), Tally(numbers=not output.is_json())
    count = inputs.count()
    batched = batched_names(model, model.outputs)
    transports: set[str] = set()
    with request.destination.sink(count, batched) as sink:

        def keep(rows: range, outputs: Mapping[str, np.ndarray]) -> None:
            sink.write(rows, outputs)
            tally.add(rows, outputs)

        start = time.perf_counter()
        with output.bar(count * request.repeat, "rows") as advance:
            for turn in range(request.repeat):
                dataset = Dataset(
                    inputs,
                    model,
                    only=request.only,
                    declare=declares_outputs(handle, model),
                    timing=timing,
                    take=keep if turn == request.repeat - 1 else _drop,
                    transports=transports,
                )
                infer_async(handle, dataset, progress=_after(turn * count, advance), copy_outputs=False)
        timing.elapsed = time.perf_counter() - start
        transport = " and ".join(sorted(transports, reverse=True))
        why = _why_inline(handle) if INLINE in transports else None
        yield Answer(True, sink, sink.finish(), tally, timing, transport, why)


def _after(done_before: int, advance: Callable[[int], None]) -> Callable[[int, int], None]:
    return lambda done, _: advance(done_before + done)


def _drop(rows: range, outputs: Mapping[str, np.ndarray]) -> None:
    """The outputs of all passes but the last."""


def _why_inline(handle: KServeModel) -> str | None:
    """Why shared memory was not used, where the user left the choice to us."""
    if handle.mode != "auto":
        return None
    small = f"less than {output.size(LEAST_SHARED_BYTES)} are faster inline"
    return handle.endpoint.why_inline or small


def _require_outputs(model: ModelMetadata, only: Sequence[str]) -> None:
    names = [tensor.name for tensor in model.outputs]
    unknown = [name for name in only if names and name not in names]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: model {model.name!r} has the outputs {', '.join(names)}")
