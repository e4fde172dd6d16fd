"""Writes ModelInferRequest and ModelInferResponse as lists of buffers, so that large tensors are not copied.

The concatenation is exactly what protobuf would serialize. Records of tensors are memoised, since a model's repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire.headers import BYTE_SIZE_PARAM, OFFSET_PARAM, REGION_PARAM, RequestedOutput
from rsrv.core.wire.parameters import INT64_MAX, ParameterValue, write_parameters
from rsrv.protos import inference

if TYPE_CHECKING:
    from rsrv.core.shm import Region, RegionRegistry

Buffers = list[bytes | memoryview]

# Few, as in `request`: those of shared memory do not repeat once their region is gone.
_MEMO_ENTRIES = 1024
_REQUEST_RAW_TAG = b"\x3a"
_RESPONSE_RAW_TAG = b"\x32"
# Below this a copy into the neighbouring bytes is cheaper than one more buffer.
_COPY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ShmInput:
    """An input whose bytes are in a registered shared-memory region."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    region: str
    offset: int
    byte_size: int


def encode_request(
    model: str,
    inputs: Sequence[tuple[str, np.ndarray] | ShmInput],
    *,
    outputs: Sequence[str | RequestedOutput] = (),
    id: str = "",  # noqa: A002  the field's name
    parameters: Mapping[str, ParameterValue] = {},
) -> Buffers:
    """The buffers of a ModelInferRequest: arrays as raw contents, regions by reference (with no raw entry).

    Raises InvalidRequest for an array of a dtype that cannot travel.
    """
    head = [_name(model), _string(b"\x1a", id), _parameters(parameters)]
    arrays = []
    for entry in inputs:
        if isinstance(entry, ShmInput):
            target = OutputTarget(entry.region, entry.offset, entry.byte_size)
            head.append(tensor_record(entry.name, wire_name(entry.name, entry.dtype), tuple(entry.shape), target))
        else:
            name, array = entry
            head.append(_array_record(name, array.dtype, array.shape))
            arrays.append(array)
    for output in outputs:
        requested = RequestedOutput(output) if isinstance(output, str) else output
        head.append(_output_record(requested.name, requested.target))
    return _assemble(head, _REQUEST_RAW_TAG, arrays)


def encode_response(
    model_name: str,
    request_id: str,
    outputs: Sequence[tuple[str, np.ndarray]],
    *,
    targets: Mapping[str, OutputTarget] = {},
    regions: RegionRegistry | None = None,
    parameters: Mapping[str, ParameterValue] = {},
) -> Buffers:
    """The buffers of a ModelInferResponse, after writing the outputs that have a target into their regions.

    There is one raw entry for each output, empty for those in shared memory. All targets are checked, and their
    regions held, before the first byte is written.

    Raises:
        InvalidRequest: an output is larger than its target, a target is out of bounds, or a dtype cannot travel.
        UnregisteredRegion: a target's region is not registered (any more).
    """
    placed = {name: target for name, _ in outputs if (target := targets.get(name)) is not None} if targets else {}
    if placed:
        _write_outputs(outputs, placed, regions)
    head = [_name(model_name), _string(b"\x1a", request_id), _parameters(parameters)]
    arrays: list[np.ndarray | None] = []
    for name, array in outputs:
        target = placed.get(name)
        if target is not None:
            target = OutputTarget(target.region, target.offset, array.nbytes)
        head.append(tensor_record(name, wire_name(name, array.dtype), array.shape, target))
        arrays.append(array if target is None else None)
    return _assemble(head, _RESPONSE_RAW_TAG, arrays)


def join(buffers: Iterable[bytes | memoryview]) -> bytes:
    """One message out of its buffers."""
    return b"".join(buffers)


def wire_name(name: str, dtype: DType | np.dtype[np.generic]) -> str:
    """The KServe datatype of a tensor. Raises InvalidRequest for one without, the 8-bit floats for example."""
    try:
        known = dtype if isinstance(dtype, DType) else DType.from_numpy(dtype)
    except TypeError as error:
        raise InvalidRequest(f"tensor {name!r}: {error}") from None
    if known.wire is None:
        raise InvalidRequest(f"tensor {name!r} is {known.value}, which has no KServe datatype")
    return known.wire


@lru_cache(_MEMO_ENTRIES)
def tensor_record(name: str, datatype: str, shape: tuple[int, ...], target: OutputTarget | None) -> bytes:
    """The record of a tensor, which is the same in a request (``inputs``) and in a response (``outputs``)."""
    message = inference.ModelInferRequest()
    tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
    if target is not None:
        write_parameters(_region_parameters(target), tensor.parameters)
    return message.SerializeToString(deterministic=True)


@lru_cache(_MEMO_ENTRIES)
def _array_record(name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    return tensor_record(name, wire_name(name, dtype), shape, None)


@lru_cache(_MEMO_ENTRIES)
def _output_record(name: str, target: OutputTarget | None) -> bytes:
    message = inference.ModelInferRequest()
    output = message.outputs.add(name=name)
    if target is not None:
        write_parameters(_region_parameters(target), output.parameters)
    return message.SerializeToString(deterministic=True)


def _region_parameters(target: OutputTarget) -> dict[str, ParameterValue]:
    return {REGION_PARAM: target.region, OFFSET_PARAM: target.offset, BYTE_SIZE_PARAM: target.byte_size}


def _write_outputs(
    outputs: Sequence[tuple[str, np.ndarray]], placed: Mapping[str, OutputTarget], regions: RegionRegistry | None
) -> None:
    if regions is None:
        raise InvalidRequest(f"output {next(iter(placed))!r}: shared memory is switched off on this server")
    with ExitStack() as leases:
        writes: list[tuple[Region, OutputTarget, np.ndarray]] = []
        for name, array in outputs:
            target = placed.get(name)
            if target is None:
                continue
            if array.nbytes > target.byte_size:
                raise InvalidRequest(
                    f"output {name!r} has {array.nbytes} bytes, more than the {target.byte_size} bytes offered in "
                    f"shared memory region {target.region!r}"
                )
            region = leases.enter_context(regions.lease(target.region))
            region.check(target.offset, target.byte_size)
            writes.append((region, target, array))
        for region, target, array in writes:
            region.write(target.offset, _view(array))


def _assemble(head: list[bytes], raw_tag: bytes, arrays: Iterable[np.ndarray | None]) -> Buffers:
    buffers: Buffers = []
    for array in arrays:
        if array is None:
            head += (raw_tag, b"\x00")
            continue
        n_bytes = array.nbytes
        head += (raw_tag, _varint(n_bytes))
        if n_bytes <= _COPY_BYTES:
            head.append(array.tobytes())
        else:
            buffers += (b"".join(head), _view(array))
            head = []
    if head:
        buffers.append(b"".join(head))
    return buffers


def _view(array: np.ndarray) -> memoryview:
    """The bytes of `array` in row-major order; a copy only when it is not laid out so."""
    # Through uint8, because the dtypes of ml_dtypes have no buffer format of their own.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _parameters(parameters: Mapping[str, ParameterValue]) -> bytes:
    if not parameters:
        return b""
    if len(parameters) == 1:  # a deadline, which every request has and which is never the same
        ((name, value),) = parameters.items()
        if name and type(value) is int and 0 <= value <= INT64_MAX:
            number = b"\x10" + _varint(value)
            entry = _name(name) + b"\x12" + _varint(len(number)) + number
            return b"\x22" + _varint(len(entry)) + entry
    message = inference.ModelInferRequest()
    write_parameters(parameters, message.parameters)
    return message.SerializeToString(deterministic=True)


@lru_cache(_MEMO_ENTRIES)
def _name(text: str) -> bytes:
    """Field 1: the model of a message, the key of a parameter."""
    return _string(b"\x0a", text)


def _string(tag: bytes, text: str) -> bytes:
    if not text:
        return b""
    data = text.encode()
    return tag + _varint(len(data)) + data


_ONE_BYTE = [bytes((value,)) for value in range(0x80)]


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
