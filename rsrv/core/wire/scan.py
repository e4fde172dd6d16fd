"""Cuts a serialized ModelInferRequest or ModelInferResponse into its records without copying tensor bytes.

Only what every client writes is cut here; anything else (unknown fields, groups, odd encodings, malformed bytes) is
left to protobuf's own parser, so that the two can never disagree about what is well formed.
"""

from __future__ import annotations

from typing import NamedTuple

from rsrv.core.errors import InvalidRequest

MAX_RECORDS = 4096
"""Most top-level records of a message. A record may be two bytes long and become a message object of a hundred; no
request has more than a few tensors, so this keeps the memory that a hostile body can claim near the body's own size."""

_LENGTH_LIMIT = 2**31
_VARINT, _FIXED64, _DELIMITED, _START_GROUP, _END_GROUP, _FIXED32 = range(6)


class Records(NamedTuple):
    """The top-level records of a message in wire order, those of one field together.

    `model_name`, `model_version` and `id` are the field's last value. `parameters`, `tensors` (field 5) and `outputs`
    (field 6 of a request) are whole records, tag and length included, so that protobuf can parse each as a message of
    the outer type. `raw` are read-only views of the body.
    """

    model_name: str
    model_version: str
    id: str
    parameters: list[bytes]
    tensors: list[bytes]
    outputs: list[bytes]
    raw: list[memoryview]


def scan(body: bytes | memoryview, raw_field: int) -> Records | None:
    """Cut `body`, whose tensor bytes are in `raw_field`; None when protobuf has to parse it.

    Raises InvalidRequest for more than `MAX_RECORDS` records.
    """
    view = memoryview(body).toreadonly()
    size = len(body)
    model_name = model_version = request_id = ""
    parameters: list[bytes] = []
    tensors: list[bytes] = []
    outputs: list[bytes] = []
    raw: list[memoryview] = []
    raw_tag = raw_field << 3 | _DELIMITED
    start = 0
    try:
        for _ in range(MAX_RECORDS if size < _LENGTH_LIMIT else 0):
            if start == size:
                break
            tag = body[start]
            length = body[start + 1]
            begin = start + 2
            if length >= 0x80:
                length, begin = _varint(body, start + 1, 5)
            end = begin + length
            if end > size:
                break
            # The payload of a string, or the whole record of a message; bytes() and str() because `body` may be a view.
            if tag == 0x2A:
                tensors.append(bytes(body[start:end]))
            elif tag == raw_tag:
                raw.append(view[begin:end])
            elif tag == 0x32:
                outputs.append(bytes(body[start:end]))
            elif tag == 0x0A:
                model_name = str(body[begin:end], "utf-8")
            elif tag == 0x1A:
                request_id = str(body[begin:end], "utf-8")
            elif tag == 0x22:
                parameters.append(bytes(body[start:end]))
            elif tag == 0x12:
                model_version = str(body[begin:end], "utf-8")
            else:
                break
            start = end
    except (IndexError, UnicodeDecodeError):
        pass
    if start == size:
        return Records(model_name, model_version, request_id, parameters, tensors, outputs, raw)
    _limit_records(body)
    return None


def _limit_records(body: bytes | memoryview) -> None:
    """Raise InvalidRequest for more than `MAX_RECORDS` records; group brackets and what is in groups count too.

    Judges nothing else: bytes that make no sense end the count, and protobuf refuses them.
    """
    start, left = 0, MAX_RECORDS
    try:
        while start < len(body):
            if left == 0:
                raise InvalidRequest(f"malformed message: more than {MAX_RECORDS} fields")
            left -= 1
            tag, start = _varint(body, start, 5)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, start = _varint(body, start, 10)
            elif wire_type == _DELIMITED:
                length, start = _varint(body, start, 5)
                start += length
            elif wire_type in (_FIXED32, _FIXED64):
                start += 4 if wire_type == _FIXED32 else 8
            elif wire_type not in (_START_GROUP, _END_GROUP):
                return
    except IndexError:
        return


def _varint(body: bytes | memoryview, start: int, most: int) -> tuple[int, int]:
    """The value that starts at `start` and the position after it. Raises IndexError past `most` bytes or the end."""
    value = 0
    for shift in range(0, 7 * most, 7):
        byte = body[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
    raise IndexError
