"""Messages between a compile pool and its processes: a length-prefixed JSON object, then raw bytes. No pickle."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

_PREFIX = struct.Struct(">4sIQ")
_MAGIC = b"RSC1"
_MAX_MESSAGE = 64 << 20
_READ_BYTES = 1 << 20

Frame = tuple[dict[str, Any], bytes]


class FrameError(Exception):
    """The bytes on the pipe are not frames."""


def encode(message: Mapping[str, Any], body: bytes = b"") -> list[bytes]:
    """The buffers of one frame, in order; the body is not copied."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return [_PREFIX.pack(_MAGIC, len(text), len(body)) + text, body]


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> None:
        self._pending += data

    def next(self) -> Frame | None:
        """The next complete frame, or None. Raises FrameError."""
        if len(self._pending) < _PREFIX.size:
            return None
        magic, text_length, body_length = _PREFIX.unpack_from(self._pending)
        if magic != _MAGIC or text_length > _MAX_MESSAGE:
            raise FrameError(f"a frame starts with {magic!r} and a message of {text_length} bytes")
        body_start = _PREFIX.size + text_length
        end = body_start + body_length
        if len(self._pending) < end:
            return None
        try:
            message = json.loads(self._pending[_PREFIX.size : body_start])
        except ValueError as error:
            raise FrameError(f"a message is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise FrameError(f"a message is a JSON {type(message).__name__}, wanted an object")
        body = bytes(memoryview(self._pending)[body_start:end])
        del self._pending[:end]
        return message, body


def read_frame(fd: int, reader: FrameReader) -> Frame | None:
    """Block until a frame has arrived; None at the end of the stream."""
    while (frame := reader.next()) is None:
        data = os.read(fd, _READ_BYTES)
        if not data:
            return None
        reader.feed(data)
    return frame


def write_frame(fd: int, message: Mapping[str, Any], body: bytes = b"") -> None:
    """Block until a frame is written."""
    for buffer in encode(message, body):
        view = memoryview(buffer)
        while view:
            view = view[os.write(fd, view) :]
