"""Reads the answer to a chunk: outputs out of the chunk's slot or the message, checked against what was declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from rsrv.client.dataset.io import OutputSpec
from rsrv.client.shared import written_dtype
from rsrv.client.tensors import InferResponse
from rsrv.core.errors import InvalidResponse
from rsrv.core.shm.slot import PoolSlot
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire.encode import wire_name
from rsrv.core.wire.headers import OutputHeader, RequestedOutput
from rsrv.core.wire.response import ResponseMessage

Windows = Mapping[str, PoolSlot]
"""Where the server may write an output: a part of the chunk's slot, by the output's name."""

LEAST_WINDOW_BYTES = 32 << 10
"""An output of a request that is smaller comes in the message: cheaper for both sides than a place in shared memory."""


def items_text(rows: range) -> str:
    """``item 7`` or ``items 32 to 63``, for messages."""
    return f"item {rows.start}" if len(rows) == 1 else f"items {rows.start} to {rows.stop - 1}"


def require_rows(name: str, array: np.ndarray, rows: range, hint: str) -> None:
    """Raise InvalidResponse, with `hint`, unless the output `array` has a row for each of the items `rows`."""
    if array.shape[:1] != (len(rows),):
        raise InvalidResponse(
            f"output {name!r} of {items_text(rows)} has the shape {list(array.shape)}; wanted {len(rows)} rows",
            hint=hint,
        )


def carve_windows(specs: Sequence[OutputSpec], n_rows: int, slot: PoolSlot) -> dict[str, PoolSlot]:
    """Room for the declared outputs of `n_rows` items behind the inputs in `slot`; none for small ones."""
    sizes = {spec.name: spec.item_bytes * n_rows for spec in specs}
    return {name: slot.subslot(size) for name, size in sizes.items() if size >= max(LEAST_WINDOW_BYTES, 1)}


def requested_outputs(specs: Sequence[OutputSpec], windows: Windows) -> list[RequestedOutput]:
    """What a request asks for; nothing, which means everything, when nothing is declared."""
    return [RequestedOutput(spec.name, target_of(windows.get(spec.name))) for spec in specs]


def target_of(window: PoolSlot | None) -> OutputTarget | None:
    return None if window is None else OutputTarget(window.pool.region_name, window.offset, window.capacity)


def read_answer(
    message: ResponseMessage, specs: Sequence[OutputSpec], rows: range, windows: Windows, *, copy: bool = True
) -> InferResponse:
    """The response for the items `rows`. Outputs in shared memory are copied, or, without `copy`, are views that live
    as long as the slot does.

    Raises InvalidResponse, naming the items, when a declared output is missing or has another dtype or size, and when
    the server claims to have written to a place that was not offered.
    """
    shared = {
        output.name: _in_slot(output, windows.get(output.name), rows, copy=copy)
        for output in message.outputs
        if output.target is not None
    }
    present = {output.name: output for output in message.outputs}
    for spec in specs:
        _check_declared(spec, present, rows)
    return InferResponse(message, shared)


def _in_slot(output: OutputHeader, window: PoolSlot | None, rows: range, *, copy: bool) -> np.ndarray:
    dtype = written_dtype(output, target_of(window), f" of {items_text(rows)}")
    assert window is not None  # or there was no place to offer
    view = window.view(dtype, output.shape)
    array = view.copy() if copy else view
    array.flags.writeable = False
    return array


def _check_declared(spec: OutputSpec, present: Mapping[str, OutputHeader], rows: range) -> None:
    output = present.get(spec.name)
    if output is None:
        names = ", ".join(present) or "no outputs"
        raise InvalidResponse(
            f"the response for {items_text(rows)} has no output {spec.name!r}, which was asked for; it has: {names}"
        )
    wanted = (len(rows), *spec.per_item_dims)
    datatype = wire_name(spec.name, spec.dtype)
    if output.datatype != datatype or prod(output.shape) != prod(wanted):
        raise InvalidResponse(
            f"output {spec.name!r} of {items_text(rows)} is {output.datatype}{list(output.shape)}; output_specs "
            f"declares {datatype}{list(wanted)}",
            hint="declare what the model returns (rsrv.client.model_io_spec), without the row axis, or declare nothing",
        )
