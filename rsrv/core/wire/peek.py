"""The few facts that a proxy needs from a serialized request: model, id, batch extent, time budget, shared memory.

No protobuf: its runtime keeps what it does not know, and so copies the tensors. Fields that nobody asked for are
stepped over by their length, which makes the time independent of the size of tensors. What passes here need not be a
valid request; the worker judges that.
"""

from __future__ import annotations

from typing import NamedTuple

from rsrv.core.errors import InvalidRequest
from rsrv.core.wire.parameters import NS_PER_UNIT
from rsrv.core.wire.scan import MAX_RECORDS

_MAX_RANK = 64
"""Axes from here on count as out of range: numpy has no such tensors, and a hostile shape is not walked to its end."""
_MAX_STEPS = 16 * MAX_RECORDS
"""Most fields that one question looks at, those of nested messages included: some milliseconds at the worst."""
_TOO_MANY = f"more than {_MAX_STEPS} fields"

_TIMEOUTS = {name.encode(): unit for name, unit in NS_PER_UNIT.items()}
_REGION = b"shared_memory_region"
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5

_INT64_CHOICE = 0x10
_CHOICES = frozenset((0x08, _INT64_CHOICE, 0x1A, 0x21, 0x28))
"""Tags of an InferParameter, one of which holds its value; the last one that is there counts."""
_MALFORMED = (IndexError, ValueError)


class Peek(NamedTuple):
    """What names a request; both are "" when absent, and the last occurrence counts as in protobuf."""

    model: str
    id: str


def peek(body: bytes) -> Peek:
    """Model name and id of a ModelInferRequest.

    Raises InvalidRequest when the message is malformed or has more than `MAX_RECORDS` fields.
    """
    model = request_id = b""
    start, size, left = 0, len(body), MAX_RECORDS
    try:
        while start < size:
            if not left:
                raise InvalidRequest(f"malformed message: more than {MAX_RECORDS} fields")
            left -= 1
            tag = body[start]
            if tag & 0x87 == _DELIMITED and tag > 7:
                length = body[start + 1]
                begin = start + 2
                if length > 0x7F:
                    length, begin = _varint(body, start + 1, 5)
                start = begin + length
            else:
                tag, _, begin, start = _field(body, start)
            if tag == 0x0A:
                model = body[begin:start]
            elif tag == 0x1A:
                request_id = body[begin:start]
        if start > size:
            raise IndexError
        return Peek(model.decode(), request_id.decode())
    except _MALFORMED as error:
        raise _refusal(error) from None


def batch_extent(body: bytes, input_name: str, axis: int) -> int:
    """`shape[axis]` of the first input of that name in a ModelInferRequest; axes count from 0, in row-major order.

    0 when there is no such input or axis, the name is empty, or the extent is negative. Raises InvalidRequest when the
    message is malformed as far as it is read.
    """
    if not input_name or not 0 <= axis < _MAX_RANK:
        return 0
    wanted = input_name.encode()
    left = _MAX_STEPS
    try:
        for start, end in _Walk(body).spans(0, len(body), 0x2A):
            extents: list[int] = []
            name = b""
            while start < end:
                if not left:
                    raise ValueError(_TOO_MANY)
                left -= 1
                tag = body[start]
                if tag & 0x87 == _DELIMITED and tag > 7:
                    value, begin = body[start + 1], start + 2
                    if value > 0x7F:
                        value, begin = _varint(body, start + 1, 5)
                    start = begin + value
                else:
                    tag, value, begin, start = _field(body, start)
                if start > end:
                    raise IndexError
                if tag == 0x0A:
                    name = body[begin:start] if start - begin == len(wanted) else b""
                elif tag == 0x1A:
                    while begin < start and len(extents) <= axis:
                        value, begin = _varint(body, begin, 10)
                        extents.append(value)
                    if begin > start:
                        raise IndexError
                elif tag == 0x18:
                    extents.append(value)
            if name == wanted:
                return max(0, _signed(extents[axis])) if axis < len(extents) else 0
        return 0
    except _MALFORMED as error:
        raise _refusal(error) from None


def timeout_parameter_ns(body: bytes) -> int:
    """The least time budget among the parameters of a ModelInferRequest (`NS_PER_UNIT`), in ns; 0 = none.

    The rules are those of `parameters.read_parameters`: one that is no int64, or not positive, is no budget. Raises
    InvalidRequest when the message is malformed.
    """
    walk = _Walk(body)
    budgets: dict[bytes, int] = {}
    try:
        for start, end in walk.spans(0, len(body), 0x22):
            name = walk.key(start, end)
            if name in _TIMEOUTS:
                budgets[name] = walk.int64(walk.spans(start, end, 0x12)) * _TIMEOUTS[name]
    except _MALFORMED as error:
        raise _refusal(error) from None
    return min((budget for budget in budgets.values() if budget > 0), default=0)


def writes_shared_memory(body: bytes) -> bool:
    """Whether an output of a ModelInferRequest goes to shared memory: such a request may not run twice at once.

    Raises InvalidRequest when the message is malformed.
    """
    walk = _Walk(body)
    try:
        return any(
            walk.key(*entry) == _REGION
            for output in walk.spans(0, len(body), 0x32)
            for entry in walk.spans(*output, 0x12)
        )
    except _MALFORMED as error:
        raise _refusal(error) from None


class _Walk:
    """Steps over the fields of one body and of what is nested in it, `_MAX_STEPS` in all; raises `_MALFORMED`."""

    __slots__ = ("body", "left")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.left = _MAX_STEPS

    def spans(self, start: int, end: int, wanted: int) -> list[tuple[int, int]]:
        """Where the payloads of the fields with the tag `wanted` begin and end, among those from `start` to `end`."""
        body, left = self.body, self.left
        found: list[tuple[int, int]] = []
        while start < end:
            if not left:
                raise ValueError(_TOO_MANY)
            left -= 1
            tag = body[start]
            if tag & 0x87 == _DELIMITED and tag > 7:
                length = body[start + 1]
                begin = start + 2
                if length > 0x7F:
                    length, begin = _varint(body, start + 1, 5)
                start = begin + length
            else:
                tag, _, begin, start = _field(body, start)
            if tag == wanted:
                found.append((begin, start))
        if start > end:
            raise IndexError
        self.left = left
        return found

    def key(self, start: int, end: int) -> bytes:
        """The key of a map's entry; one that is too long for any that we look for is not copied."""
        spans = self.spans(start, end, 0x0A)
        begin, stop = spans[-1] if spans else (start, start)
        return self.body[begin : min(stop, begin + 64)]

    def int64(self, spans: list[tuple[int, int]]) -> int:
        """The int64 of an InferParameter, which protobuf merges from all of `spans`; 0 when it holds another kind."""
        found = 0
        for start, end in spans:
            while start < end:
                if not self.left:
                    raise ValueError(_TOO_MANY)
                self.left -= 1
                tag, value, _, start = _field(self.body, start)
                if start > end:
                    raise IndexError
                if tag in _CHOICES:
                    found = _signed(value) if tag == _INT64_CHOICE else 0
        return found


def _field(body: bytes, start: int) -> tuple[int, int, int, int]:
    """Any field: its tag, its value if that is a varint (else 0), where its payload begins, and where it ends."""
    tag, begin = _varint(body, start, 5)
    wire_type = tag & 7
    if not 7 < tag < 2**32:
        raise ValueError(f"field number {tag >> 3}")
    if wire_type == _VARINT:
        value, end = _varint(body, begin, 10)
        return tag, value, begin, end
    if wire_type == _DELIMITED:
        length, begin = _varint(body, begin, 5)
        return tag, 0, begin, begin + length
    if wire_type == _FIXED64:
        return tag, 0, begin, begin + 8
    if wire_type == _FIXED32:
        return tag, 0, begin, begin + 4
    raise ValueError(f"wire type {wire_type}")


def _varint(body: bytes, start: int, most: int) -> tuple[int, int]:
    """The value that starts at `start` and the position after it; raises `_MALFORMED` past `most` bytes or the end."""
    value = 0
    for shift in range(0, 7 * most, 7):
        byte = body[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
    raise ValueError(f"varint of more than {most} bytes")


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _refusal(error: Exception) -> InvalidRequest:
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequest("malformed message: a name is not UTF-8")
    return InvalidRequest(f"malformed message: {str(error) if type(error) is ValueError else 'it ends within a field'}")
