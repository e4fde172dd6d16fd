"""Reads a ModelInferResponse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
from google.protobuf.message import DecodeError

from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest, InvalidResponse
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire.headers import OutputHeader, RequestedOutput, read_output
from rsrv.core.wire.parameters import ParameterValue, read_parameters
from rsrv.core.wire.payload import from_bytes, from_typed
from rsrv.core.wire.scan import Records, scan
from rsrv.protos import inference

_RAW_FIELD = 6
_MEMO_BYTES = 512
_MEMO_ENTRIES = 4096


@dataclass(slots=True, eq=False)
class ResponseMessage:
    """A parsed ModelInferResponse. Its `raw` entries are views of the body that was parsed."""

    model_name: str
    model_version: str
    id: str
    parameters: dict[str, ParameterValue]
    outputs: list[OutputHeader]
    raw: list[memoryview]

    def arrays(self) -> dict[str, np.ndarray | None]:
        """Every output as a read-only array, by name; None for those that the server wrote to shared memory.

        Raises InvalidResponse when bytes and headers do not fit together.
        """
        return {
            output.name: _array(output, data) for output, data in zip(self.outputs, self._raw_by_output(), strict=True)
        }

    def array(self, name: str) -> np.ndarray | None:
        """One output, as `arrays` has it. Raises KeyError for a name that the response does not have."""
        for output, data in zip(self.outputs, self._raw_by_output(), strict=True):
            if output.name == name:
                return _array(output, data)
        raise KeyError(name)

    def with_places(self, requested: Iterable[str | RequestedOutput]) -> ResponseMessage:
        """This response, where outputs that come without bytes are at the place that was `requested` for them.

        Triton writes to that place and does not repeat it in its answer, as our servers do.
        """
        if (self.raw and all(self.raw)) or len(self.raw) not in (0, len(self.outputs)):
            return self
        offered = {output.name: output.target for output in requested if not isinstance(output, str)}
        raw: Sequence[memoryview | None] = self.raw or [None] * len(self.outputs)
        outputs = [
            output if data else _at(output, offered.get(output.name))
            for output, data in zip(self.outputs, raw, strict=True)
        ]
        return replace(self, outputs=outputs)

    def _raw_by_output(self) -> Sequence[memoryview | None]:
        """The raw entry of each output: one per output, or (older servers) one per output that came inline."""
        outputs, raw = self.outputs, self.raw
        if not raw:
            return [None] * len(outputs)
        if len(raw) == len(outputs):
            return raw
        inline = sum(output.target is None for output in outputs)
        if len(raw) != inline:
            raise InvalidResponse(
                f"the response of model {self.model_name!r} has {len(raw)} raw_output_contents for {len(outputs)} "
                f"outputs, {inline} of them not in shared memory"
            )
        entries = iter(raw)
        return [next(entries) if output.target is None else None for output in outputs]


def decode_response(body: bytes | memoryview) -> ResponseMessage:
    """Parse a serialized ModelInferResponse; tensor bytes are not copied. Raises InvalidResponse when malformed."""
    try:
        records = scan(body, _RAW_FIELD)
        return _from_protobuf(body) if records is None else _from_records(records)
    except DecodeError:
        raise InvalidResponse("malformed ModelInferResponse: the bytes are not that protobuf message") from None
    except InvalidRequest as error:
        raise InvalidResponse(error.message) from None


def _from_records(records: Records) -> ResponseMessage:
    parameters: dict[str, ParameterValue] = {}
    if records.parameters:
        message = inference.ModelInferResponse.FromString(b"".join(records.parameters))
        parameters, _ = read_parameters(message.parameters)
    return ResponseMessage(
        records.model_name,
        records.model_version,
        records.id,
        parameters,
        [_output(record) if len(record) <= _MEMO_BYTES else _parse_output(record) for record in records.tensors],
        records.raw,
    )


def _from_protobuf(body: bytes | memoryview) -> ResponseMessage:
    message = inference.ModelInferResponse.FromString(bytes(body))
    parameters, _ = read_parameters(message.parameters)
    return ResponseMessage(
        message.model_name,
        message.model_version,
        message.id,
        parameters,
        [read_output(output) for output in message.outputs],
        [memoryview(entry) for entry in message.raw_output_contents],
    )


def _parse_output(record: bytes) -> OutputHeader:
    return read_output(inference.ModelInferResponse.FromString(record).outputs[0])


def _at(output: OutputHeader, offered: OutputTarget | None) -> OutputHeader:
    """`output`, which has no raw bytes, at the place `offered`, unless it says itself where its bytes are."""
    if offered is None or output.target is not None or output.contents is not None:
        return output
    try:
        n_bytes = prod(output.shape) * DType.from_wire(output.datatype).itemsize
    except InvalidRequest:  # for whoever reads it
        return output
    return output._replace(target=OutputTarget(offered.region, offered.offset, n_bytes)) if n_bytes else output


_output = lru_cache(_MEMO_ENTRIES)(_parse_output)


def _array(output: OutputHeader, data: memoryview | None) -> np.ndarray | None:
    try:
        if output.target is not None:
            return None
        if data is not None:
            return from_bytes(data, output.datatype, output.shape)
        if output.contents is not None:
            return from_typed(output.contents, output.datatype, output.shape)
    except InvalidRequest as error:
        raise InvalidResponse(f"output {output.name!r}: {error.message}") from None
    raise InvalidResponse(f"output {output.name!r} carries no data")
