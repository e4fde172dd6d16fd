"""A request through shared memory: whether a server can see ours, and what lies where in a call's window."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import numpy as np

from rsrv.client.budget import Budget
from rsrv.client.connection import Connection
from rsrv.client.server import TensorMeta, ask, model_metadata
from rsrv.client.windows import OutOfSharedMemory, Window, aligned, create_region
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest, InvalidResponse, Unimplemented, UsageError
from rsrv.core.shm.owned import OwnedRegion
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire.encode import ShmInput
from rsrv.core.wire.headers import RequestedOutput
from rsrv.core.wire.response import ResponseMessage

log = logging.getLogger(__name__)

Mode = Literal["auto", "on", "off"]
Spot = tuple[int, int]
"""Where a tensor lies in a window: offset from its start, bytes."""

Entry: TypeAlias = ShmInput | tuple[str, np.ndarray]
"""An input of a request: in a region, or with its bytes."""

MODES: tuple[Mode, ...] = ("auto", "on", "off")

_SETUP_SECONDS = 10.0
_UNREGISTER_SECONDS = 5.0
_NONCE_BYTES = 16


class Registration:
    """Registers regions with one server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def register(self, region: OwnedRegion, timeout: float | None) -> None:
        # A region's name is random: there cannot be an older registration of it to remove first.
        ask(
            self._connection,
            "SystemSharedMemoryRegister",
            timeout,
            name=region.name,
            key=region.key,
            offset=0,
            byte_size=region.byte_size,
        )

    def unregister(self, region: OwnedRegion, *, wait: bool) -> None:
        from rsrv.protos import inference

        body = inference.SystemSharedMemoryUnregisterRequest(name=region.name).SerializeToString()
        self._connection.tell("SystemSharedMemoryUnregister", body, _UNREGISTER_SECONDS, wait=wait)


def use_shared_memory(connection: Connection, mode: Mode, budget: Budget) -> bool:
    """Whether `mode` means shared memory with this server, which is asked; raises when ``on`` cannot work.

    Errors other than UNIMPLEMENTED are raised: a server that does not answer must not be taken for one without
    shared memory.
    """
    if mode == "off":
        return False
    nonce = os.urandom(_NONCE_BYTES)
    try:
        probe = create_region("probe", _NONCE_BYTES)
    except OutOfSharedMemory as error:
        if mode == "on":
            raise
        log.warning("event=shm_unavailable using=inline %s", error)
        return False
    try:
        probe.view[:_NONCE_BYTES] = nonce
        timeout = budget.at_most(_SETUP_SECONDS)
        same = bool(ask(connection, "IsSameIPCNamespace", timeout, name=probe.name, nonce=nonce).same)
    except Unimplemented:
        return mode == "on"  # stock servers: the caller vouches for the shared namespace
    finally:
        probe.close()
    if mode == "on" and not same:
        raise UsageError(
            f"{connection.target} runs in another IPC namespace (another machine or container): "
            "shared memory cannot work",
            hint='use shared_memory="auto" (rsrv infer: leave out --shm)',
        )
    return same


class OutputSizes:
    """How many bytes each output of a model takes, learned from the server once and again after `forget`."""

    def __init__(self, connection: Connection, model_name: str) -> None:
        self._connection = connection
        self._model_name = model_name
        self._lock = threading.Lock()
        self._known: tuple[tuple[TensorMeta, ...], bool] | None = None

    def of(
        self, requested: Sequence[str] | None, inputs: Sequence[tuple[str, np.ndarray]], budget: Budget
    ) -> dict[str, int | None]:
        """Bytes by name, in the order in which outputs are asked for; None where only the server knows."""
        with self._lock:
            if self._known is None:
                self._known = self._learn(budget)
            outputs, rows_first = self._known
        rows = inputs[0][1].shape[0] if rows_first and inputs and inputs[0][1].ndim else None
        sizes = {output.name: _n_bytes(output, rows) for output in outputs}
        return sizes if requested is None else {name: sizes.get(name) for name in requested}

    def forget(self) -> None:
        """After a refusal: the model may have been replaced by one with other outputs."""
        with self._lock:
            self._known = None

    def _learn(self, budget: Budget) -> tuple[tuple[TensorMeta, ...], bool]:
        try:
            outputs = model_metadata(self._connection, self._model_name, budget.at_most(_SETUP_SECONDS)).outputs
            if all(min(output.shape, default=0) >= 0 for output in outputs):
                return outputs, False
            timeout = budget.at_most(_SETUP_SECONDS)
            config = ask(self._connection, "ModelConfig", timeout, name=self._model_name).config
        except Unimplemented:
            return (), False
        # A positive max_batch_size promises that axis 0 of every tensor is the batch; metadata cannot tell a batch
        # axis from one whose extent depends on the data.
        return outputs, config.max_batch_size > 0


def _n_bytes(output: TensorMeta, rows: int | None) -> int | None:
    shape = output.shape
    if rows is not None and shape[:1] == (-1,):
        shape = (rows, *shape[1:])
    if min(shape, default=0) < 0:
        return None
    try:
        return prod(shape) * DType.from_wire(output.datatype).itemsize
    except InvalidRequest:  # a datatype that only other servers have
        return None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of one call lie in its window, relative to its start. Empty tensors travel inline."""

    inputs: tuple[Spot | None, ...]
    outputs: dict[str, Spot | None]
    byte_size: int

    @classmethod
    def of(cls, inputs: Sequence[tuple[str, np.ndarray]], outputs: Mapping[str, int | None]) -> Layout:
        end = 0

        def place(n_bytes: int | None) -> Spot | None:
            nonlocal end
            if not n_bytes:
                return None
            start, end = end, end + aligned(n_bytes)
            return start, n_bytes

        input_spots = tuple(place(array.nbytes) for _, array in inputs)
        output_spots = {name: place(n_bytes) for name, n_bytes in outputs.items()}
        return cls(input_spots, output_spots, end)

    def write(self, window: Window, inputs: Sequence[tuple[str, np.ndarray]]) -> list[Entry]:
        """Copy `inputs` into `window`; returns what the request says about each."""
        entries: list[Entry] = []
        for (name, array), spot in zip(inputs, self.inputs, strict=True):
            if spot is None:
                entries.append((name, array))
                continue
            start, n_bytes = spot
            offset = window.offset + start
            target = np.frombuffer(window.region.view, array.dtype, array.size, offset).reshape(array.shape)
            np.copyto(target, array)
            dtype = DType.from_numpy(array.dtype)
            entries.append(ShmInput(name, dtype, array.shape, window.region.name, offset, n_bytes))
        return entries

    def requested(self, window: Window) -> list[RequestedOutput]:
        """The outputs to ask for; none, which means all, when no output has a place in the window."""
        if not any(self.outputs.values()):
            return []
        return [RequestedOutput(name, self._target(window, spot)) for name, spot in self.outputs.items()]

    def read(self, window: Window, message: ResponseMessage) -> dict[str, np.ndarray]:
        """Copies of the outputs that the server wrote into `window`; raises for a place that was not offered."""
        arrays: dict[str, np.ndarray] = {}
        for output in message.outputs:
            if output.target is None:
                continue
            spot = self.outputs.get(output.name)
            offered = self._target(window, spot) if spot else None
            dtype = DType.from_wire(output.datatype).numpy
            count = prod(output.shape)
            if (
                offered is None
                or (output.target.region, output.target.offset) != (offered.region, offered.offset)
                or output.target.byte_size != count * dtype.itemsize
                or not 0 <= output.target.byte_size <= offered.byte_size
            ):
                raise InvalidResponse(
                    f"the server says that output {output.name!r} {output.datatype}{list(output.shape)} is at "
                    f"{output.target}, where {offered} was offered"
                )
            array = np.empty(output.shape, dtype)
            source = np.frombuffer(window.region.view, dtype, count, offered.offset)
            np.copyto(array, source.reshape(output.shape))
            array.flags.writeable = False
            arrays[output.name] = array
        return arrays

    @staticmethod
    def _target(window: Window, spot: Spot | None) -> OutputTarget | None:
        return OutputTarget(window.region.name, window.offset + spot[0], spot[1]) if spot else None
