"""Reads a ModelInferRequest: one parse into headers and views, then arrays, deadline and output targets from it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from rsrv.core.errors import InvalidRequest, UnknownModel
from rsrv.core.shm.tensor import RegionTensor, Tensor
from rsrv.core.tensors import InferRequest, NamedTensor, OutputTarget
from rsrv.core.wire.headers import InputHeader, RequestedOutput, read_input, read_requested
from rsrv.core.wire.parameters import ParameterValue, absolute_deadline_ns, read_parameters
from rsrv.core.wire.payload import from_bytes, from_typed, sized_layout
from rsrv.core.wire.scan import Records, scan
from rsrv.protos import inference

if TYPE_CHECKING:
    from rsrv.core.shm import RegionRegistry

_RAW_FIELD = 7
# The record of a tensor without typed contents (name, datatype, shape, region) is small and repeats from call to call.
# Few are kept: each region and each window in it makes new ones (1.3 KB for an input and an output), so that clients
# which come and go fill the memo with what nobody sends again.
_MEMO_BYTES = 512
_MEMO_ENTRIES = 1024


@dataclass(slots=True, eq=False)
class RequestMessage:
    """A parsed ModelInferRequest. Its `raw` entries are views of the body that was parsed.

    `parameters` are those of the request; a tensor's own are in its header. `budget_ns` is the least time that they
    leave for the call, 0 = unlimited.
    """

    model_name: str
    model_version: str
    id: str
    parameters: dict[str, ParameterValue]
    inputs: list[InputHeader]
    outputs: list[RequestedOutput]
    raw: list[memoryview]
    budget_ns: int = 0

    def check_version(self) -> None:
        """Raise UnknownModel unless the version is "" or "1": models have no versions here."""
        if self.model_version not in ("", "1"):
            raise UnknownModel(
                f"model {self.model_name!r} has no version {self.model_version!r}", hint='leave it out, or ask for "1"'
            )

    def deadline_ns(self, now_ns: int) -> int:
        """The deadline that the parameters set, absolute on the clock of `now_ns`; 0 = none.

        Raises InvalidRequest for the parameters of sequence models, which must not be served as if they were stateless.
        """
        for name in self.parameters:
            if name.startswith("sequence_"):
                raise InvalidRequest(f"request parameter {name!r} is not supported: models here keep no state")
        return absolute_deadline_ns(self.budget_ns, now_ns)

    @property
    def output_targets(self) -> dict[str, OutputTarget]:
        """Where the requested outputs go that the client wants in shared memory, by name."""
        return {name: target for name, target in self.outputs if target is not None}

    def tensors(self, regions: RegionRegistry | None) -> list[NamedTensor]:
        """The inputs as read-only arrays: views for raw entries, copies from shared memory and typed contents.

        Raises InvalidRequest, UnregisteredRegion or RegionLimit; `regions` is None where shared memory is switched off.
        """
        tensors = []
        for name, tensor in self.unread_tensors(regions):
            try:
                tensors.append(NamedTensor(name, tensor.read() if isinstance(tensor, RegionTensor) else tensor))
            except InvalidRequest as error:
                raise _about(name, error) from None
        return tensors

    def unread_tensors(self, regions: RegionRegistry | None) -> list[tuple[str, Tensor]]:
        """The inputs with their names, those in shared memory checked but not yet read. Raises as `tensors`."""
        tensors = []
        for header, data in zip(self.inputs, self._raw_by_input(), strict=True):
            try:
                tensors.append((header.name, _tensor(header, data, regions)))
            except InvalidRequest as error:
                raise _about(header.name, error) from None
        return tensors

    def _raw_by_input(self) -> list[memoryview | None]:
        """The raw entry of each input: one per input, or one per input that is not in shared memory."""
        inputs, raw = self.inputs, self.raw
        if not raw:
            return [None] * len(inputs)
        if len(raw) == len(inputs):
            return [*raw]
        inline = sum(header.region is None for header in inputs)
        if len(raw) != inline:
            raise InvalidRequest(
                f"the request has {len(raw)} raw_input_contents for {len(inputs)} inputs, {inline} of them not in "
                f"shared memory; wanted one for each input, or for each that is not in shared memory"
            )
        entries = iter(raw)
        return [next(entries) if header.region is None else None for header in inputs]


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRequest:
    """A request with all of its inputs; `output_targets` has the outputs that go to shared memory."""

    request: InferRequest
    id: str
    output_targets: dict[str, OutputTarget] = field(default_factory=dict)


def parse_request(body: bytes | memoryview) -> RequestMessage:
    """Parse a serialized ModelInferRequest; tensor bytes are not copied. Raises InvalidRequest when it is malformed."""
    records = scan(body, _RAW_FIELD)
    try:
        if records is None:
            return _from_protobuf(body)
        return _from_records(records)
    except DecodeError:
        raise InvalidRequest("malformed ModelInferRequest: the bytes are not that protobuf message") from None


def decode_request(
    body: bytes | memoryview, *, regions: RegionRegistry | None = None, now_ns: int | None = None
) -> DecodedRequest:
    """Parse and decode a whole request at once. Raises InvalidRequest, UnknownModel or UnregisteredRegion.

    `now_ns` is the time on ``time.monotonic_ns()`` from which the caller's budget runs; the default is now.
    """
    message = parse_request(body)
    if not message.model_name:
        raise InvalidRequest("the request names no model")
    message.check_version()
    request = InferRequest(
        model_name=message.model_name,
        inputs=message.tensors(regions),
        requested_outputs=[output.name for output in message.outputs],
        deadline_ns=message.deadline_ns(time.monotonic_ns() if now_ns is None else now_ns),
    )
    return DecodedRequest(request, message.id, message.output_targets)


def _from_records(records: Records) -> RequestMessage:
    parameters: dict[str, ParameterValue] = {}
    budget_ns = 0
    if records.parameters:
        message = inference.ModelInferRequest.FromString(b"".join(records.parameters))
        parameters, budget_ns = read_parameters(message.parameters)
    return RequestMessage(
        records.model_name,
        records.model_version,
        records.id,
        parameters,
        [_input(record) if len(record) <= _MEMO_BYTES else _parse_input(record) for record in records.tensors],
        [_output(record) if len(record) <= _MEMO_BYTES else _parse_output(record) for record in records.outputs],
        records.raw,
        budget_ns,
    )


def _from_protobuf(body: bytes | memoryview) -> RequestMessage:
    message = inference.ModelInferRequest.FromString(bytes(body))
    parameters, budget_ns = read_parameters(message.parameters)
    return RequestMessage(
        message.model_name,
        message.model_version,
        message.id,
        parameters,
        [read_input(tensor) for tensor in message.inputs],
        [read_requested(output) for output in message.outputs],
        [memoryview(entry) for entry in message.raw_input_contents],
        budget_ns,
    )


def _parse_input(record: bytes) -> InputHeader:
    # Parsed as part of a request, not by itself, so that protobuf's nesting limit counts from the same level.
    return read_input(inference.ModelInferRequest.FromString(record).inputs[0])


def _parse_output(record: bytes) -> RequestedOutput:
    return read_requested(inference.ModelInferRequest.FromString(record).outputs[0])


_input = lru_cache(_MEMO_ENTRIES)(_parse_input)
_output = lru_cache(_MEMO_ENTRIES)(_parse_output)


def _about(name: str, error: InvalidRequest) -> InvalidRequest:
    return InvalidRequest(f"input {name!r}: {error.message}", hint=error.hint)


def _tensor(header: InputHeader, data: memoryview | None, regions: RegionRegistry | None) -> Tensor:
    """Shared memory goes before raw contents, raw before typed ones."""
    target = header.region
    if target is not None:
        if regions is None:
            raise InvalidRequest("shared memory is switched off on this server")
        plan = sized_layout(header.datatype, header.shape, target.byte_size)
        regions.check(target.region, target.offset, target.byte_size)
        return RegionTensor(regions, target.region, target.offset, target.byte_size, plan.numpy, header.shape)
    if data is not None:
        if header.contents is not None and header.contents.ListFields():
            raise InvalidRequest("has both raw and typed contents; a request uses one kind")
        return from_bytes(data, header.datatype, header.shape)
    if header.contents is not None:
        return from_typed(header.contents, header.datatype, header.shape)
    raise InvalidRequest("carries no data: no shared memory region, no raw_input_contents, no contents")
