"""Devices behind PJRT: the only module that touches how jaxlib compiles and executes. Tested with jaxlib 0.10 to 0.12.

The CUDA path is written after the notes and the sources of jax and has not been run on a GPU. The CPU client is private
(jax's own backends stay untouched) and synchronous: once a launch has its result, nothing reads the host memory of its
buffers any more.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from jaxlib import xla_client

from rsrv.core.errors import DeviceError, DeviceLost, DeviceOutOfMemory, ProgramError
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
from rsrv.stablehlo.mlir import summary
from rsrv.stablehlo.program import Prepared, foreign_dialect, prepare
from rsrv.stablehlo.signature import ProgramSignature, TensorType, element_type, numpy_dtype, tensor_type

Platform = Literal["cpu", "cuda"]

_jax: Any = import_module("jaxlib._jax")  # binary modules without stubs
_lapack: Any = import_module("jaxlib.cpu._lapack")

_COPY = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
_ALIAS = xla_client.HostBufferSemantics.ZERO_COPY
_MAX_LAYOUTS = 16384
# jaxlib 0.10 compares every result with the handler's type unless told not to; later versions never do.
_UNCHECKED = (True,) if "_skip_checks" in (_jax.array_result_handler.__doc__ or "") else ()


class PjrtCompiler:
    """A client that compiles and serialises; makes no arrays and imports no jax on CPU, so a compile process is small.

    Args:
        platform: ``cpu`` or ``cuda``.
        ordinal: which of the visible devices.
        mem_fraction, preallocate: the share of a card's memory that its allocator may take, and whether at once (CUDA).
    """

    def __init__(
        self, platform: Platform = "cpu", *, ordinal: int = 0, mem_fraction: float = 0.9, preallocate: bool = True
    ) -> None:
        self.platform = platform
        try:
            client = _cpu_client() if platform == "cpu" else _cuda_client(ordinal, mem_fraction, preallocate)
            devices = client.local_devices()
        except Exception as error:
            raise DeviceError(f"no {platform} client: {summary(str(error))}") from error
        index = ordinal if platform == "cpu" else 0  # the CUDA client sees the one card only
        if index >= len(devices):
            raise DeviceError(f"device ordinal {ordinal} does not exist, {platform} has {len(devices)} device(s)")
        self.client = client
        self.device = devices[index]
        self._devices = xla_client.DeviceList((self.device,))

    def compile(self, program: Prepared, options: CompileOptions) -> Any:
        """The loaded executable. Raises ProgramError."""
        try:
            return self.client.compile_and_load(program.code, self._devices, _xla_options(options))
        except Exception as error:  # UnicodeDecodeError, too: XLA quotes damaged names
            text = str(error)
            if unsupported := re.search(r"'(\w+)\.[\w.]+' op unsupported op for export to XLA", text):
                raise foreign_dialect(unsupported[1]) from error
            raise ProgramError(f"program cannot be compiled for {self.platform}: {summary(text)}") from error

    def serialize(self, loaded: Any) -> bytes | None:
        """None for an executable that XLA cannot serialise."""
        try:
            return bytes(self.client.serialize_executable(loaded))
        except Exception as error:
            if "UNIMPLEMENTED" in str(error):
                return None
            raise DeviceError(f"executable cannot be serialised: {summary(str(error))}") from error

    def facts(self) -> dict[str, str]:
        """What executables depend on besides platform and kind of the device."""
        if self.platform == "cpu":
            return {}
        capability = getattr(self.device, "compute_capability", "unknown")
        return {"libraries": str(self.client.platform_version), "compute capability": str(capability)}

    def load(self, blob: bytes) -> Any:
        try:
            return self.client.deserialize_executable(blob, self._devices, xla_client.CompileOptions())
        except Exception as error:
            raise DeviceError(f"executable of {len(blob)} bytes cannot be loaded: {summary(str(error))}") from error


class PjrtBuffer:
    __slots__ = ("aliased", "array", "dtype", "nbytes", "shape", "type")

    def __init__(self, array: Any, host: np.ndarray, kind: TensorType, aliased: bool) -> None:
        self.array = array
        self.type = kind
        self.shape = host.shape
        self.dtype = host.dtype
        self.nbytes = host.nbytes
        self.aliased = aliased


class PjrtExecutable:
    __slots__ = ("__weakref__", "arguments", "handlers", "loaded", "scratch_bytes", "signature", "to_host", "unified")

    def __init__(
        self,
        loaded: Any,
        signature: ProgramSignature,
        handlers: list[Any],
        to_host: list[Callable[[Any], np.ndarray]],
        scratch: int,
        unified: bool,
    ) -> None:
        self.loaded = loaded
        self.signature = signature
        self.handlers = handlers
        self.to_host = to_host
        # Interned types: comparing with those of the buffers is then one pointer comparison per argument.
        self.arguments = [tensor_type(tensor.dtype, tensor.shape) for tensor in signature.arguments]
        self.scratch_bytes = scratch
        self.unified = unified


class PjrtLaunch:
    __slots__ = ("_arrays", "_error", "_executable", "_outputs", "download_ns")

    def __init__(self, executable: PjrtExecutable, arrays: list[Any]) -> None:
        self._executable = executable
        self._arrays = arrays
        self._outputs: list[np.ndarray] | None = None
        self._error: DeviceError | None = None
        self.download_ns = 0

    def result(self) -> list[np.ndarray]:
        if self._outputs is None:
            if self._error is not None:
                raise self._error
            program = self._executable
            try:
                results = program.loaded.execute_sharded(self._arrays).consume_with_handlers(program.handlers)
                begin_ns = 0 if program.unified else _wait(results)
                # Zero-copy on CPU: each array keeps its device buffer alive.
                self._outputs = [convert(result) for convert, result in zip(program.to_host, results, strict=True)]
                if begin_ns:
                    self.download_ns = time.monotonic_ns() - begin_ns
            except Exception as error:
                self._error = self._explain(error)
                raise self._error from error
            finally:
                self._arrays = []
        return self._outputs

    def _explain(self, error: Exception) -> DeviceError:
        for index, array in enumerate(self._arrays):
            if array is None or array.is_deleted():
                return DeviceError(f"argument {index} was freed while its launch was outstanding")
        return _device_error("execution failed", error)


class _Layout(NamedTuple):
    """What `put` needs to know about one dtype and shape."""

    aval: Any
    type: TensorType
    wide: bool


class PjrtDevice:
    """One real device.

    Args:
        platform: ``cpu`` or ``cuda``.
        ordinal: which of the visible devices.
        mem_fraction, preallocate: the share of a card's memory that its allocator may take, and whether at once (CUDA).

    Raises DeviceError when there is no such device. On CPU the number of threads is that of the variable ``NPROC`` at
    this moment (`open_device` sets it).
    """

    def __init__(
        self, platform: Platform = "cpu", *, ordinal: int = 0, mem_fraction: float = 0.9, preallocate: bool = True
    ) -> None:
        # Here and not above, since a compile process needs no jax. Without it jaxlib would look for it at every array.
        from jax._src.config import enable_x64
        from jax.core import ShapedArray
        from jax.sharding import SingleDeviceSharding

        self._compiler = PjrtCompiler(platform, ordinal=ordinal, mem_fraction=mem_fraction, preallocate=preallocate)
        self.platform: str = platform
        self.kind = str(self._compiler.device.device_kind)
        self.facts = self._compiler.facts()
        self.unified = platform == "cpu"
        self._device = self._compiler.device
        self._placement = [self._device]
        self._sharding = SingleDeviceSharding(self._device)
        self._aval = ShapedArray
        self._enable_x64 = enable_x64
        self._layouts: dict[tuple[np.dtype[Any], tuple[int, ...]], _Layout] = {}
        self._closed = False

    def compile(self, program: bytes, options: CompileOptions = CompileOptions()) -> Executable:  # noqa: B008
        self._require_open()
        prepared = prepare(program)
        self._require_kernels(prepared.report.custom_calls)
        return self._executable(self._compiler.compile(prepared, options), prepared.report.signature)

    def load(
        self,
        blob: bytes,
        signature: ProgramSignature,
        *,
        scratch_bytes: int | None = None,
        custom_calls: Sequence[str] | None = None,
    ) -> Executable:
        self._require_open()
        self._require_kernels(custom_calls)
        return self._executable(self._compiler.load(blob), signature, scratch_bytes)

    def serialize(self, executable: Executable) -> bytes | None:
        return self._compiler.serialize(_own(executable).loaded)

    def put(self, array: np.ndarray, *, alias: bool = False) -> Buffer:
        self._require_open()
        layout = self._layouts.get((array.dtype, array.shape)) or self._learn(array.dtype, array.shape)
        require_c_order(array)
        # On a card the transfer always copies; with `alias` it may still read the host memory after this call.
        semantics = _ALIAS if alias else _COPY
        try:
            if layout.wide:
                # Without x64 jaxlib narrows 64-bit elements silently. Set for this thread and call only: the switch is
                # global to jax, and hooks and training code in this process have their own opinion about it.
                before = self._enable_x64.swap_local(True)
                try:
                    placed = _jax.batched_device_put(
                        layout.aval, self._sharding, [array], self._placement, True, False, semantics
                    )
                finally:
                    self._enable_x64.set_local(before)
            else:
                placed = _jax.batched_device_put(
                    layout.aval, self._sharding, [array], self._placement, True, False, semantics
                )
        except Exception as error:
            raise _device_error(f"{layout.type} could not be put on the device", error) from error
        return PjrtBuffer(placed, array, layout.type, alias)

    def launch(self, executable: Executable, buffers: Sequence[Buffer]) -> Launch:
        program = _own(executable)
        given = cast("Sequence[PjrtBuffer]", buffers)
        # XLA checks byte sizes only, and computes nonsense from a wrong dtype or shape.
        if [buffer.type for buffer in given] != program.arguments:
            raise refuse_arguments(program.arguments, [buffer.type for buffer in given])
        self._require_open()
        return PjrtLaunch(program, [buffer.array for buffer in given])

    def free(self, buffers: Sequence[Buffer]) -> None:
        aliased = False
        for buffer in cast("Sequence[PjrtBuffer]", buffers):
            buffer.type = FREED
            array, buffer.array = buffer.array, None
            if array is not None:
                array.delete()
                aliased = aliased or buffer.aliased
        if aliased:
            _jax.collect_garbage()  # until then jaxlib keeps the host arrays, and their mapping, referenced

    def memory(self) -> MemoryStats | None:
        stats = self._device.memory_stats()
        if stats is None:
            return None
        return MemoryStats(
            bytes_in_use=int(stats["bytes_in_use"]),
            peak_bytes_in_use=stats.get("peak_bytes_in_use"),
            bytes_limit=stats.get("bytes_limit"),
            largest_free_block_bytes=stats.get("largest_free_block_bytes"),
        )

    def close(self) -> None:
        """Refuse further work; the client goes when the last executable and output of it are gone."""
        self._closed = True
        self._layouts.clear()

    def _executable(self, loaded: Any, signature: ProgramSignature, scratch: int | None = None) -> PjrtExecutable:
        # Handlers that know the type of each result, and the buffer protocol as the way to numpy, make a launch of a
        # small program twice as fast as disassemble_into_single_device_arrays, which works them out every time.
        dtypes = [numpy_dtype(tensor.dtype) for tensor in signature.results]
        handlers = [
            _jax.array_result_handler(self._aval(tensor.shape, dtype), self._sharding, True, *_UNCHECKED)
            for tensor, dtype in zip(signature.results, dtypes, strict=True)
        ]
        to_host = [_view if self.unified and dtype.isbuiltin == 1 else _to_numpy for dtype in dtypes]
        if scratch is None:
            scratch = scratch_bytes(loaded)
        return PjrtExecutable(loaded, signature, handlers, to_host, scratch, self.unified)

    def _require_kernels(self, custom_calls: Sequence[str] | None) -> None:
        """LAPACK's kernels come from scipy, whose import takes a third of a second; a program that calls one before it
        has them segfaults. `custom_calls` is None when it is not known what the program calls."""
        if self.platform == "cpu" and (custom_calls is None or custom_calls):
            _lapack.initialize()

    def _require_open(self) -> None:
        if self._closed:
            raise DeviceError(f"{self.platform} device is closed")

    def _learn(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Layout:
        try:
            kind = tensor_type(element_type(dtype), shape)
        except TypeError as error:
            raise DeviceError(f"array of shape {shape} cannot be put on the device: {error}") from None
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        layout = _Layout(self._aval(shape, dtype), kind, dtype.name in ("int64", "uint64", "float64", "complex128"))
        self._layouts[dtype, shape] = layout
        return layout


def _wait(results: Sequence[Any]) -> int:
    """Until a card has computed `results`, which until then are promises; the time at which it had."""
    for result in results:
        result.block_until_ready()
    return time.monotonic_ns()


_view: Callable[[Any], np.ndarray] = np.asarray


def _to_numpy(result: Any) -> np.ndarray:
    array: np.ndarray = result._single_device_array_to_np_array_did_copy()[0]
    array.flags.writeable = False
    return array


def scratch_bytes(loaded: Any) -> int:
    """What one run of a loaded executable takes besides its arguments: temporaries and outputs."""
    stats = loaded.get_compiled_memory_stats()
    # Neither peak_memory nor generated_code is usable on CPU (notes/pjrt-runtime.md, 9).
    return int(stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes)


def _own(executable: Executable) -> PjrtExecutable:
    if not isinstance(executable, PjrtExecutable):
        raise DeviceError(f"executable of type {type(executable).__name__} belongs to another device")
    return executable


_STICKY = (
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_SYSTEM_NOT_READY",
)
"""After one of these every further call of the process fails (CUDA Driver API, `CUresult`: "the process must be
terminated and relaunched")."""


def _device_error(what: str, error: Exception) -> DeviceError:
    text = str(error)
    if any(name in text for name in _STICKY):
        return DeviceLost(f"{what}: {summary(text)}", hint="restart the server; see the log of the driver")
    if isinstance(error, MemoryError) or text.startswith("RESOURCE_EXHAUSTED"):
        return DeviceOutOfMemory(f"{what}: {summary(text)}")
    return DeviceError(f"{what}: {summary(text)}")


def _xla_options(options: CompileOptions) -> Any:
    built = xla_client.CompileOptions()
    if options.overrides:
        built.env_option_overrides = list(options.overrides)
    return built


def _cpu_client() -> Any:
    for name, target in _lapack.registrations().items():
        xla_client.register_custom_call_target(name, target, platform="cpu", api_version=int(name.endswith("_ffi")))
    return xla_client.make_cpu_client(asynchronous=False)


def _cuda_client(ordinal: int, mem_fraction: float, preallocate: bool) -> Any:
    """jax's own CUDA client: its plugin also loads the NVIDIA libraries and registers the solver and Triton handlers,
    which a private client would have to repeat. All settings are read when the client is made; without the first it
    would claim memory on every card of the machine."""
    import jax
    from jax.extend.backend import get_backend

    settings: Any = jax.config  # untyped
    settings.update("jax_cuda_visible_devices", str(ordinal))
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(mem_fraction)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if preallocate else "false"
    return get_backend("cuda")
