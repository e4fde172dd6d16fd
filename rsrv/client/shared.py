"""A request through shared memory: what lies where in a call's window.

How much room outputs need is `rsrv.client.facts`'s to know, whether a server sees our shared memory
`rsrv.client.transport`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from rsrv.client.windows import Window
from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest, InvalidResponse
from rsrv.core.memory import aligned
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire.encode import ShmInput
from rsrv.core.wire.headers import OutputHeader, RequestedOutput
from rsrv.core.wire.response import ResponseMessage

Mode = Literal["auto", "on", "off"]
Spot = tuple[int, int]
"""Where a tensor lies in a window: offset from its start, bytes."""

Entry: TypeAlias = ShmInput | tuple[str, np.ndarray]
"""An input of a request: in a region, or with its bytes."""

MODES: tuple[Mode, ...] = ("auto", "on", "off")
SHARED: Final = "shared memory"
INLINE: Final = "inline"
"""How the tensors of a request may travel, in words for people."""


LEAST_SHARED_BYTES = 128 << 10
"""What a call brings and fetches in shared memory, at least, when the choice is ours: less is faster inline.

Measured with 1 and 8 callers: at 4 KB inline takes 0.6 to 0.8 of the time, at 64 KB 0.7 to 1, at 256 KB 1.
"""


def worthwhile(inputs: Sequence[tuple[str, np.ndarray]], outputs: Mapping[str, int | None]) -> bool:
    """Whether these tensors, outputs by their bytes, are enough to be faster through shared memory than inline."""
    n_bytes = sum([array.nbytes for _, array in inputs])
    return n_bytes >= LEAST_SHARED_BYTES or n_bytes + sum(filter(None, outputs.values())) >= LEAST_SHARED_BYTES


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
            offered = self._target(window, self.outputs.get(output.name))
            dtype = written_dtype(output, offered)
            source = np.frombuffer(window.region.view, dtype, prod(output.shape), output.target.offset)
            array = source.reshape(output.shape).copy()
            array.flags.writeable = False
            arrays[output.name] = array
        return arrays

    @staticmethod
    def _target(window: Window, spot: Spot | None) -> OutputTarget | None:
        return OutputTarget(window.region.name, window.offset + spot[0], spot[1]) if spot else None


def written_dtype(output: OutputHeader, offered: OutputTarget | None, whose: str = "") -> np.dtype[Any]:
    """The dtype of an `output` that the server says it wrote to shared memory, at the start of the place `offered`.

    Raises InvalidResponse when it names another place or more bytes than there are, or bytes that are not its shape's;
    `whose` says in the message to which part of a dataset it belongs.
    """
    try:
        dtype = DType.from_wire(output.datatype).numpy
    except InvalidRequest as error:
        raise InvalidResponse(f"output {output.name!r}{whose}: {error.message}") from None
    claimed = output.target
    if (
        claimed is None
        or offered is None
        or (claimed.region, claimed.offset) != (offered.region, offered.offset)
        or claimed.byte_size != prod(output.shape) * dtype.itemsize
        or not 0 <= claimed.byte_size <= offered.byte_size
    ):
        raise InvalidResponse(
            f"the server says that output {output.name!r} {output.datatype}{list(output.shape)}{whose} is at "
            f"{claimed}, where {offered} was offered"
        )
    return dtype
