"""A model directory of a Triton repository: what ``config.pbtxt`` says, and whether it can be converted as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.protos import FILES

CONFIG = "config.pbtxt"
MAX_CONFIG_BYTES = 1 << 20
MODEL_FILES = ("model.pt", "model.pt2")
"""TorchScript first: it is what Triton itself loads."""

_PROTO = "inference/model_config.proto"
_INDEXED = re.compile(r".+__([0-9]{1,9})")
_HANDLER = "a handler can convert it"
_DTYPES = {f"TYPE_{dtype.wire}": dtype for dtype in DType if dtype.wire is not None and dtype is not DType.BF16}
"""Of X-43, which leaves BF16 and strings to handlers."""


@dataclass(frozen=True)
class TritonTensor:
    """An input or output. `dims` is row-major, without the batch axis when the model is batched; -1 = any size."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    peculiarity: str | None = None
    """What Triton does to this tensor on its way to the model, if anything."""

    @property
    def dtype(self) -> DType | None:
        """None for a type that the generic conversion does not take (TYPE_STRING, TYPE_BF16)."""
        return _DTYPES.get(self.data_type)


@dataclass(frozen=True)
class TritonModel:
    """What a ``config.pbtxt`` says.

    Attributes:
        max_batch_size: 1 when the file does not say (X-43); 0: nothing is batched and the dims are complete.
        framework: ``backend``, or else ``platform``, as written; empty when the file has neither.
        model_file: ``default_model_filename``; empty when the file does not say.
        text: the file itself.
    """

    inputs: tuple[TritonTensor, ...]
    outputs: tuple[TritonTensor, ...]
    max_batch_size: int
    framework: str
    model_file: str
    gathers: bool
    text: str

    @property
    def ladder(self) -> tuple[int, ...]:
        """Batch sizes to compile, ascending; empty when nothing is batched."""
        return batch_ladder(self.max_batch_size)


def batch_ladder(largest: int) -> tuple[int, ...]:
    """`largest` halved down to 1, ascending: 12 → 1, 3, 6, 12 (X-44). Empty for 0."""
    sizes = []
    while largest > 0:
        sizes.append(largest)
        largest //= 2
    return tuple(reversed(sizes))


def parse_max_batch_size(text: str) -> int:
    """``max_batch_size`` of the text of a ``config.pbtxt``; 1 when it is not there. Raises ExportError."""
    return parse_triton_model(text).max_batch_size


def read_triton_model(directory: Path) -> TritonModel:
    """Read ``config.pbtxt``. Raises ExportError that names the file, line and column."""
    path = directory / CONFIG
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ExportError(f"{path}: not a file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        text = data.decode()
    except FileNotFoundError:
        raise ExportError(
            f"{path}: no such file", hint="Triton's own configuration says what the model takes"
        ) from None
    except OSError as error:
        raise ExportError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ExportError(f"{path}: not a text in UTF-8: {error}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ExportError(f"{path}: more than {MAX_CONFIG_BYTES} bytes, which no model configuration has")
    return parse_triton_model(text, where=str(path))


def parse_triton_model(text: str, *, where: str = CONFIG) -> TritonModel:
    """Parse the text of a ``config.pbtxt``; fields of newer versions of Triton are ignored. Raises ExportError."""
    message = _message_class()()
    try:
        text_format.Parse(text, message, allow_unknown_field=True, descriptor_pool=message.DESCRIPTOR.file.pool)
    except text_format.ParseError as error:
        raise ExportError(f"{where}: {' '.join(str(error).split())[:300]}") from None
    except (RecursionError, ValueError) as error:
        raise ExportError(f"{where}: not a model configuration: {str(error)[:200]}") from None
    largest = message.max_batch_size if message.HasField("max_batch_size") else 1
    if largest < 0:
        raise ExportError(f"{where}: max_batch_size is {largest}, want 0 or more")
    return TritonModel(
        inputs=tuple(_tensor(one) for one in message.input),
        outputs=tuple(_tensor(one) for one in message.output),
        max_batch_size=largest,
        framework=message.backend or message.platform,
        model_file=message.default_model_filename,
        gathers=bool(message.batch_input or message.batch_output),
        text=text,
    )


def obstacle(model: TritonModel) -> tuple[Literal["failed", "skipped"], str] | None:
    """Why the generic conversion does not even try, or None."""
    if model.framework not in ("", "pytorch", "pytorch_libtorch"):
        return "skipped", f"the model is for {model.framework!r}, not for PyTorch"
    for what, tensors in (("input", model.inputs), ("output", model.outputs)):
        if not tensors:
            return "failed", f"{CONFIG} declares no {what}"
        names = [tensor.name for tensor in tensors]
        for tensor in tensors:
            label = f"{what} {tensor.name!r}"
            if not tensor.name:
                return "failed", f"{CONFIG} has an {what} without a name"
            if names.count(tensor.name) > 1:
                return "failed", f"{CONFIG} has two {what}s named {tensor.name!r}"
            if tensor.dtype is None:
                return "failed", f"{label} is {tensor.data_type}, which is not supported; {_HANDLER}"
            if tensor.peculiarity is not None:
                return "failed", f"{label} {tensor.peculiarity}; {_HANDLER}"
    if model.gathers:
        return "failed", f"{CONFIG} has batch_input or batch_output, tensors that Triton makes itself; {_HANDLER}"
    for tensor in model.inputs:
        if any(size < 0 for size in tensor.dims):
            return "skipped", f"dynamic input shape: {tensor.name!r} has dims {list(tensor.dims)}; {_HANDLER}"
        if 0 in tensor.dims:
            return "failed", f"input {tensor.name!r} has dims {list(tensor.dims)}, which hold no value"
    return None


def find_model_file(directory: Path, model: TritonModel) -> Path:
    """The program of version 1. Raises ExportError."""
    names = (model.model_file,) if model.model_file else MODEL_FILES
    for name in names:
        path = directory / "1" / name
        if "/" not in name and path.is_file():
            return path
    wanted = " or ".join(f"1/{name}" for name in names)
    raise ExportError(f"{directory}: there is no {wanted}")


def forward_parameters(names: Sequence[str], parameters: Sequence[str]) -> dict[str, str]:
    """Parameter of forward → the input that it gets, by Triton's rules for PyTorch.

    Names that are all those of parameters mean these; ``INPUT__0``, ``INPUT__2`` mean parameters by number; else the
    order in the configuration is that of forward. A parameter that is not mentioned keeps its default. Raises
    ExportError for numbers that forward does not have, or has for another input, too.
    """
    if set(names) <= set(parameters):
        return {name: name for name in names}
    places = _numbers(names)
    if places is None:
        return dict(zip(parameters, names, strict=False))
    found: dict[str, str] = {}
    for name, place in zip(names, places, strict=True):
        if place >= len(parameters):
            raise ExportError(
                f"input {name!r} says that it is argument {place} of forward, counted from 0; there are "
                f"{len(parameters)}: {', '.join(parameters)}"
            )
        if (other := found.setdefault(parameters[place], name)) != name:
            raise ExportError(f"inputs {other!r} and {name!r} both say that they are argument {place} of forward")
    return found


def tensor_order(names: Sequence[str]) -> list[int]:
    """Positions in `names` in the order of what forward returns: by number (``OUTPUT__0``, ``OUTPUT__1``), else as is.

    Raises ExportError for numbers that are not those from 0 on, each once.
    """
    places = _numbers(names)
    if places is None:
        return list(range(len(names)))
    if sorted(places) != list(range(len(names))):
        raise ExportError(
            f"{', '.join(names)} have the numbers {', '.join(map(str, places))}, want those from 0 to {len(names) - 1}",
            hint=f"every output of forward has to be there; {_HANDLER}",
        )
    return sorted(range(len(names)), key=lambda i: places[i])


def _numbers(names: Sequence[str]) -> list[int] | None:
    """The numbers at the ends of the names; None when one has none."""
    found = [_INDEXED.fullmatch(name) for name in names]
    return [int(match[1]) for match in found if match is not None] if all(found) else None


def _tensor(message: Any) -> TritonTensor:
    types = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    peculiarity = None
    if message.HasField("reshape"):
        peculiarity = f"has a reshape to {list(message.reshape.shape)}"
    elif getattr(message, "allow_ragged_batch", False):
        peculiarity = "is ragged (allow_ragged_batch)"
    elif message.is_shape_tensor:
        peculiarity = "is a shape tensor"
    return TritonTensor(message.name, types[message.data_type].name, tuple(message.dims), peculiarity)


@cache
def _message_class() -> Any:
    """``ModelConfig`` in a pool of its own, read as proto2: where 0 differs from a field that is not there."""
    file = descriptor_pb2.FileDescriptorProto.FromString(FILES[_PROTO])
    file.syntax = "proto2"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.ModelConfig"))
