"""How inputs are sent: in one request, or as a dataset of many requests; with the time that each of them took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from rsrv.cli.infer.report import Timing
from rsrv.cli.infer.sources import Inputs
from rsrv.client.dataset.form import row_specs
from rsrv.client.dataset.io import InferenceIO, OutputSpec, PoolInferInput, pool_view, scratch
from rsrv.client.shared import INLINE, SHARED

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel
    from rsrv.client.server import ModelMetadata
    from rsrv.client.tensors import InferResponse
    from rsrv.core.shm.slot import PoolSlot

Take = Callable[[range, Mapping[str, np.ndarray]], None]
"""What is called with the outputs of a range of items."""


def send_once(handle: KServeModel, inputs: Inputs, only: Sequence[str], timing: Timing) -> dict[str, np.ndarray]:
    """All rows in one request; returns the outputs."""
    arrays = {name: rows[:] if rows.shape else np.asarray(rows) for name, rows in inputs.rows.items()}
    start = time.perf_counter()
    outputs = handle.infer(arrays, only or None)
    seconds = time.perf_counter() - start
    n_bytes = sum(array.nbytes for side in (arrays, outputs) for array in side.values())
    timing.add(seconds, inputs.request_rows(), n_bytes)
    return outputs


class Dataset(InferenceIO):
    """The items of `inputs` as the driver of `rsrv.client` takes them: it has no array of all of them.

    The ways on which answers came are added to `transports`. `take` gets views that are gone when it has returned.
    """

    def __init__(
        self,
        inputs: Inputs,
        model: ModelMetadata,
        *,
        only: Sequence[str],
        declare: bool,
        timing: Timing,
        take: Take,
        transports: set[str],
    ) -> None:
        self._inputs = inputs
        self._count = inputs.count()
        self._only = only
        outputs = [tensor for tensor in model.outputs if not only or tensor.name in only]
        self._specs = row_specs(model, outputs) if declare else []
        self._timing = timing
        self._take = take
        self._sent: dict[int, tuple[float, int, str]] = {}
        self._transports = transports

    def __len__(self) -> int:
        return self._count

    def item_input_bytes(self) -> int:
        """Inputs without rows travel with each request, so that the smallest request holds all of them."""
        return sum(
            prod(rows.shape[1:] if name in self._inputs.batched else rows.shape) * rows.dtype.itemsize
            for name, rows in self._inputs.rows.items()
        )

    def output_specs(self) -> Sequence[OutputSpec]:
        return self._specs

    def encode_chunk(self, rows: range, slot: PoolSlot) -> list[PoolInferInput]:
        written = []
        n_bytes = 0
        for name, source in self._inputs.rows.items():
            whole = name not in self._inputs.batched
            shape = source.shape if whole else (len(rows), *source.shape[1:])
            target = scratch(slot, name, shape, source.dtype)
            values = np.asarray(source) if not shape else source[:] if whole else source[rows.start : rows.stop]
            np.copyto(pool_view(target), values)
            written.append(target)
            n_bytes += target.nbytes
        transport = SHARED if slot.pool.region_name else INLINE
        self._sent[rows.start] = time.perf_counter(), n_bytes, transport  # again, for a request that goes another way
        return written

    def decode_chunk(self, rows: range, response: InferResponse) -> None:
        now = time.perf_counter()
        start, n_bytes, transport = self._sent.pop(rows.start)
        self._transports.add(transport)
        outputs = response.arrays()
        if self._only:
            outputs = {name: outputs[name] for name in self._only}
        self._timing.add(now - start, len(rows), n_bytes + sum(array.nbytes for array in outputs.values()))
        self._take(rows, outputs)


def declares_outputs(handle: KServeModel, model: ModelMetadata) -> bool:
    """Whether outputs of an open axis 0 surely have a row for each item, so that there can be room for them.

    Where the server does not say so, whoever insists on shared memory vouches for it.
    """
    return model.tells_rows or handle.mode == "on"
