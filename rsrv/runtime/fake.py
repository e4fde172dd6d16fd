"""A scripted device for scheduler, gateway and fault tests: a program is a Python function with a duration.

It is stricter than a real device: freed memory is poisoned, and an argument that is freed before its launch has run is
an error. Outputs never share memory with arguments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np

from rsrv.core.errors import DeviceError, DeviceOutOfMemory, RsrvError
from rsrv.runtime.device import (
    FREED,
    Buffer,
    CompileOptions,
    Executable,
    Launch,
    MemoryStats,
    refuse_arguments,
    require_c_order,
)
from rsrv.runtime.fake_memory import Block, FakeMemory
from rsrv.stablehlo.signature import ProgramSignature, TensorType, element_type, numpy_dtype, tensor_type

POISON = 0xDB
"""Every byte of a copied buffer after it is freed."""

ProgramFunction = Callable[..., "np.ndarray | Sequence[np.ndarray]"]


class FakeBuffer:
    __slots__ = ("aliased", "array", "block", "dtype", "nbytes", "shape", "type")

    def __init__(self, array: np.ndarray, kind: TensorType, aliased: bool, block: Block | None) -> None:
        self.array: np.ndarray | None = array
        self.type = kind
        self.shape = array.shape
        self.dtype = array.dtype
        self.nbytes = array.nbytes
        self.aliased = aliased
        self.block = block


class FakeExecutable:
    __slots__ = ("__weakref__", "code", "duration", "function", "name", "scratch_bytes", "signature")

    def __init__(
        self,
        name: str,
        function: ProgramFunction,
        signature: ProgramSignature,
        duration: float,
        code: bytes | None,
        scratch_bytes: int,
    ) -> None:
        self.name = name
        self.function = function
        self.signature = signature
        self.duration = duration
        self.scratch_bytes = scratch_bytes
        self.code = code


class FakeLaunch:
    download_ns = 0

    def __init__(self, device: FakeDevice, executable: FakeExecutable, buffers: list[FakeBuffer]) -> None:
        self._device = device
        self._executable = executable
        self._buffers = buffers
        self._outcome: list[np.ndarray] | RsrvError | None = None

    def result(self) -> list[np.ndarray]:
        if self._outcome is None:
            try:
                self._outcome = self._device._run(self._executable, self._buffers)
            except RsrvError as error:
                self._outcome = error
        if isinstance(self._outcome, RsrvError):
            raise self._outcome
        return self._outcome


class FakeDevice:
    """The scripted device.

    A real StableHLO program is not executed; its results follow a rule that depends on the first argument alone. With
    n = the extent of axis 0 of a result: when the first argument has extent n there, too, row i of the result is filled
    with the sum over row i of the argument, otherwise the whole result is filled with the sum over the argument (0 when
    the program takes none). So the rows of a batch do not depend on each other or on the batch size, batch axis first.
    It takes ``n * seconds_per_row`` seconds, n taken from the first result.

    Args:
        seconds_per_row: speed of real programs.
        memory_bytes: what is put and the scratch of a run beyond it raise DeviceOutOfMemory, and `memory` reports it;
            None = unlimited, uncounted.
        unified: whether the device says that its memory is the host's, and aliases. A card's memory fragments
            (`FakeMemory`).
        sleep: how time passes; a test with a fake clock gives its own.

    Attributes:
        launched: names of the programs that ran, in order.
        live_bytes, live_buffers: what was put and not freed.
        most_at_once: the largest number of executions that ever ran at the same time.
    """

    platform = "fake"
    kind = "fake"
    facts: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        *,
        seconds_per_row: float = 0.0,
        memory_bytes: int | None = None,
        unified: bool = True,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.unified = unified
        self.launched: list[str] = []
        self.live_bytes = 0
        self.live_buffers = 0
        self.most_at_once = 0
        self._seconds_per_row = seconds_per_row
        self._memory = None if memory_bytes is None else FakeMemory(memory_bytes, card=not unified)
        self._sleep = sleep
        self._lock = threading.Lock()
        self._running = 0
        self._closed = False

    def program(
        self,
        fn: ProgramFunction,
        signature: ProgramSignature,
        duration: float = 0.0,
        *,
        name: str = "program",
        scratch_bytes: int = 0,
    ) -> Executable:
        """Register `fn(*arguments)` as an executable that takes `duration` seconds and `scratch_bytes` of memory.

        `fn` returns one array or a sequence of them, with the dtypes and shapes of `signature.results`. An RsrvError
        that it raises is what `Launch.result` raises; any other exception becomes a DeviceError.
        """
        return FakeExecutable(name, fn, signature, duration, None, scratch_bytes)

    def compile(self, program: bytes, options: CompileOptions = CompileOptions()) -> Executable:  # noqa: B008
        """Parses in this process. A worker with a fake device uses `load` with the report of its compile pool."""
        from rsrv.stablehlo.program import prepare

        self._require_open()
        return self.load(program, prepare(program).report.signature)

    def load(
        self,
        blob: bytes,
        signature: ProgramSignature,
        *,
        scratch_bytes: int | None = None,
        custom_calls: Sequence[str] | None = None,
    ) -> Executable:
        """`blob` may be anything: what the program does follows from its signature (see the class)."""
        self._require_open()
        rows = signature.results[0].shape[0] if signature.results and signature.results[0].shape else 1
        return FakeExecutable(
            "program",
            lambda *arguments: _stand_in(signature, arguments),
            signature,
            rows * self._seconds_per_row,
            blob,
            scratch_bytes or 0,
        )

    def serialize(self, executable: Executable) -> bytes | None:
        return _own(executable).code

    def put(self, array: np.ndarray, *, alias: bool = False) -> Buffer:
        self._require_open()
        require_c_order(array)
        try:
            kind = tensor_type(element_type(array.dtype), array.shape)
        except TypeError as error:
            raise DeviceError(f"array of shape {array.shape} cannot be put on the device: {error}") from None
        aliased = alias and self.unified and array.ctypes.data % 64 == 0
        with self._lock:
            block = self._take(str(kind), array.nbytes)
            self.live_bytes += array.nbytes
            self.live_buffers += 1
        return FakeBuffer(array if aliased else array.copy(), kind, aliased, block)

    def launch(self, executable: Executable, buffers: Sequence[Buffer]) -> Launch:
        self._require_open()
        program = _own(executable)
        given = cast("Sequence[FakeBuffer]", buffers)
        types = [buffer.type for buffer in given]
        if types != list(program.signature.arguments):
            raise refuse_arguments(program.signature.arguments, types)
        return FakeLaunch(self, program, list(given))

    def free(self, buffers: Sequence[Buffer]) -> None:
        for buffer in cast("Sequence[FakeBuffer]", buffers):
            with self._lock:
                array, buffer.array = buffer.array, None
                buffer.type = FREED
                if array is None:
                    continue
                self.live_bytes -= buffer.nbytes
                self.live_buffers -= 1
                self._give(buffer.block)
            if not buffer.aliased:
                array.reshape(-1).view(np.uint8).fill(POISON)

    def memory(self) -> MemoryStats | None:
        memory = self._memory
        if memory is None:
            return None
        with self._lock:
            return MemoryStats(memory.in_use, memory.peak, memory.limit, memory.largest_free)

    def spike(self, nbytes: int) -> None:
        """Take that much memory and give it back, as a compiler that times kernels does: only the peak remembers it."""
        with self._lock:
            self._give(self._take("the spike", nbytes))

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise DeviceError("fake device is closed")

    def _take(self, what: str, nbytes: int) -> Block | None:
        if self._memory is None:
            return None
        block = self._memory.take(nbytes)
        if block is None:
            raise DeviceOutOfMemory(self._memory.refusal(what, nbytes))
        return block

    def _give(self, block: Block | None) -> None:
        if self._memory is not None and block is not None:
            self._memory.give(block)

    def _run(self, executable: FakeExecutable, buffers: list[FakeBuffer]) -> list[np.ndarray]:
        with self._lock:
            scratch = self._take(f"program {executable.name!r}", executable.scratch_bytes)
            self.launched.append(executable.name)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            if executable.duration:
                self._sleep(executable.duration)
            arguments: list[np.ndarray] = []
            for index, buffer in enumerate(buffers):
                if buffer.array is None:
                    raise DeviceError(f"argument {index} was freed while its launch was outstanding")
                argument = buffer.array.view()
                argument.flags.writeable = False
                arguments.append(argument)
            return _outputs(executable, arguments)
        finally:
            with self._lock:
                self._running -= 1
                self._give(scratch)


def _outputs(executable: FakeExecutable, arguments: list[np.ndarray]) -> list[np.ndarray]:
    try:
        returned = executable.function(*arguments)
    except RsrvError:
        raise
    except Exception as error:
        raise DeviceError(f"fake program {executable.name!r} raised {type(error).__name__}: {error}") from error
    arrays = [returned] if isinstance(returned, np.ndarray) else list(returned)
    outputs = [np.array(array, order="C") for array in arrays]  # copies: a real output shares no memory with arguments
    found = [TensorType(element_type(output.dtype), output.shape) for output in outputs]
    if found != list(executable.signature.results):
        wanted = ", ".join(map(str, executable.signature.results))
        raise DeviceError(f"fake program {executable.name!r} returned {', '.join(map(str, found))}, declared: {wanted}")
    for output in outputs:
        output.flags.writeable = False
    return outputs


def _stand_in(signature: ProgramSignature, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The rule of the class docstring."""
    first = _plain(arguments[0]) if arguments else np.zeros(())
    results = []
    for result in signature.results:
        dtype = numpy_dtype(result.dtype)
        by_row = first.ndim > 0 and len(result.shape) > 0 and first.shape[0] == result.shape[0]
        with np.errstate(all="ignore"):
            if by_row:
                totals = first.reshape(first.shape[0], -1).sum(axis=1) if first.size else np.zeros(first.shape[0])
                filled = np.broadcast_to(totals.reshape(-1, *[1] * (len(result.shape) - 1)), result.shape)
            else:
                filled = np.broadcast_to(first.sum(), result.shape)
            results.append(filled.astype(dtype))
    return results


def _plain(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "c":
        array = array.real
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


def _own(executable: Executable) -> FakeExecutable:
    if not isinstance(executable, FakeExecutable):
        raise DeviceError(f"executable of type {type(executable).__name__} belongs to another device")
    return executable
