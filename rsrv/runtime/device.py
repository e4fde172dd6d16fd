"""The device protocol: what the scheduler knows of a device. Implementations: `pjrt` (real) and `fake` (scripted)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rsrv.core.errors import DeviceError
from rsrv.stablehlo.signature import ProgramSignature, TensorType

FREED = TensorType("freed", ())
"""The type of a buffer after `Device.free`; no argument has it, so the check before a launch finds it."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of one compilation; `overrides` are XLA flags without dashes: ``(("xla_gpu_autotune_level", 0),)``."""

    overrides: tuple[tuple[str, str | int | float | bool], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"overrides": [list(pair) for pair in self.overrides]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CompileOptions:
        return cls(tuple((str(name), setting) for name, setting in value["overrides"]))


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Allocator statistics in bytes; a field is None when the allocator does not report it."""

    bytes_in_use: int
    peak_bytes_in_use: int | None = None
    bytes_limit: int | None = None
    largest_free_block_bytes: int | None = None


class Buffer(Protocol):
    """A tensor on the device. `type` is `FREED` after `Device.free`."""

    @property
    def type(self) -> TensorType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...


class Executable(Protocol):
    """A compiled program. `scratch_bytes` is what one run takes besides its arguments: temporaries and outputs."""

    @property
    def signature(self) -> ProgramSignature: ...
    @property
    def scratch_bytes(self) -> int: ...


class Launch(Protocol):
    """One execution that was checked and can no longer be refused.

    `download_ns` is how long `result` took to bring outputs to the host; 0 where device memory is host memory.
    """

    @property
    def download_ns(self) -> int: ...

    def result(self) -> list[np.ndarray]:
        """Run to the end and return the outputs: read-only C-order arrays that stay valid for ever.

        Blocks with the GIL released; call it on the device thread. A second call returns the same arrays, or raises the
        same error. Raises DeviceOutOfMemory, or DeviceError.
        """
        ...


class Device(Protocol):
    """One device and its memory. All methods are thread safe; buffers and executables belong to the device that made
    them. Nothing is ever donated: a launch leaves its buffers as they were."""

    @property
    def platform(self) -> str:
        """``cpu``, ``cuda`` or ``fake``."""
        ...

    @property
    def kind(self) -> str:
        """The model of the device, for logs and cache keys."""
        ...

    @property
    def facts(self) -> Mapping[str, str]:
        """What executables depend on besides platform and kind, by name; for cache keys."""
        ...

    @property
    def unified(self) -> bool:
        """Device memory is host memory."""
        ...

    def compile(self, program: bytes, options: CompileOptions = ...) -> Executable:
        """Parse and compile in this process. Raises ProgramError. A hostile program can end the process: compile it in
        a `CompilePool` first."""
        ...

    def load(
        self,
        blob: bytes,
        signature: ProgramSignature,
        *,
        scratch_bytes: int | None = None,
        custom_calls: Sequence[str] | None = None,
    ) -> Executable:
        """Load what `serialize` or a `CompilePool` gave; `blob` is native code and must come from there.

        What is known of the program saves time: `scratch_bytes` need not be asked for, and libraries that none of its
        `custom_calls` needs are not loaded. Raises DeviceError."""
        ...

    def serialize(self, executable: Executable) -> bytes | None:
        """None when this executable cannot be serialised; on CPU one with a sort can, but not after its first run."""
        ...

    def put(self, array: np.ndarray, *, alias: bool = False) -> Buffer:
        """Copy a C-order array to the device. With `alias` a unified device uses the host memory itself when it starts
        on a 64-byte boundary; the caller leaves it unchanged until the buffer is freed. Raises DeviceError,
        DeviceOutOfMemory."""
        ...

    def launch(self, executable: Executable, buffers: Sequence[Buffer]) -> Launch:
        """Check the count, dtype and shape of the arguments and prepare the execution; `Launch.result` runs it. Raises
        DeviceError."""
        ...

    def free(self, buffers: Sequence[Buffer]) -> None:
        """Give the memory back now; freeing twice is allowed, using a freed buffer raises DeviceError."""
        ...

    def memory(self) -> MemoryStats | None:
        """None when the device does not count (CPU)."""
        ...

    def close(self) -> None: ...


def refuse_arguments(expected: Sequence[TensorType], found: Sequence[TensorType]) -> DeviceError:
    """Say what is wrong with the arguments of a launch; called only when the quick comparison failed."""
    if len(expected) != len(found):
        return DeviceError(f"program takes {len(expected)} arguments, got {len(found)}")
    for index, (wanted, given) in enumerate(zip(expected, found, strict=True)):
        if given is FREED:
            return DeviceError(f"argument {index} ({wanted}) was freed before the launch")
        if given != wanted:
            return DeviceError(f"argument {index} is {given}, wanted {wanted}")
    return DeviceError("arguments changed while they were checked")


def require_c_order(array: np.ndarray) -> None:
    if not array.flags.c_contiguous:
        raise DeviceError(
            f"array of shape {array.shape} and strides {array.strides} is not in C order; "
            "the device would read its elements in the wrong order"
        )


def execute(device: Device, executable: Executable, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run once, host to host: arrays in argument order in, outputs out. For audits, exports and tests.

    Raises DeviceError when an array does not have the dtype and shape of its argument; nothing is converted.
    """
    buffers: list[Buffer] = []
    try:
        for array in arrays:
            buffers.append(device.put(np.asarray(array, order="C"), alias=device.unified))
        return device.launch(executable, buffers).result()
    finally:
        device.free(buffers)
