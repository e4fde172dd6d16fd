"""What a message says about its tensors: name, datatype, shape, and where the bytes are."""

from __future__ import annotations

from typing import Any, NamedTuple

from rsrv.core.errors import InvalidRequest
from rsrv.core.tensors import OutputTarget

MAX_RANK = 32
"""As in the oldest numpy that we run on."""

REGION_PARAM = "shared_memory_region"
OFFSET_PARAM = "shared_memory_offset"
BYTE_SIZE_PARAM = "shared_memory_byte_size"


class InputHeader(NamedTuple):
    """An input as the request describes it. `contents` is the typed contents message, if there is one."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    region: OutputTarget | None = None
    contents: Any = None


class OutputHeader(NamedTuple):
    """An output as the response describes it; `target` is where the server wrote it, None when it came inline."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    target: OutputTarget | None = None
    contents: Any = None


class RequestedOutput(NamedTuple):
    """An output that the client asks for, and the place in shared memory where it wants it, if any."""

    name: str
    target: OutputTarget | None = None


def read_input(message: Any) -> InputHeader:
    """From an ``InferInputTensor``. Raises InvalidRequest."""
    return InputHeader(*_read_tensor("input", message))


def read_output(message: Any) -> OutputHeader:
    """From an ``InferOutputTensor``. Raises InvalidRequest."""
    return OutputHeader(*_read_tensor("output", message))


def read_requested(message: Any) -> RequestedOutput:
    """From an ``InferRequestedOutputTensor``. Raises InvalidRequest."""
    name = message.name
    parameters = message.parameters
    if "classification" in parameters and parameters["classification"].int64_param:
        raise InvalidRequest(
            f"output {name!r}: classification is not supported", hint="request the tensor and rank it in the client"
        )
    return RequestedOutput(name, _read_target("output", name, parameters))


def _read_tensor(what: str, message: Any) -> tuple[str, str, tuple[int, ...], OutputTarget | None, Any]:
    name = message.name
    shape = message.shape
    if len(shape) > MAX_RANK:
        raise InvalidRequest(f"{what} {name!r} has {len(shape)} axes, at most {MAX_RANK} are supported")
    contents = message.contents if message.HasField("contents") else None
    return name, message.datatype, tuple(shape), _read_target(what, name, message.parameters), contents


def _read_target(what: str, name: str, parameters: Any) -> OutputTarget | None:
    """The shared-memory parameters of a tensor; a parameter of the wrong kind counts as absent."""
    if REGION_PARAM not in parameters:
        return None
    region = parameters[REGION_PARAM]
    if region.WhichOneof("parameter_choice") != "string_param":
        return None
    byte_size = _int64(parameters, BYTE_SIZE_PARAM)
    if byte_size is None:
        raise InvalidRequest(
            f"{what} {name!r} is in shared memory region {region.string_param!r}, but its parameter {BYTE_SIZE_PARAM} "
            f"(int64) is missing"
        )
    return OutputTarget(region.string_param, _int64(parameters, OFFSET_PARAM) or 0, byte_size)


def _int64(parameters: Any, name: str) -> int | None:
    # Not parameters[name] first: looking up an absent key of a message map inserts it.
    if name not in parameters or parameters[name].WhichOneof("parameter_choice") != "int64_param":
        return None
    return int(parameters[name].int64_param)
