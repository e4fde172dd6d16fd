import os
import threading

import pytest

from rsrv.runtime.frames import FrameError, FrameReader, encode, read_frame, write_frame


def test_frames_are_found_however_the_bytes_arrive():
    stream = b"".join(encode({"job": "inspect"}, b"\x00" * 10) + encode({"event": "ready"}))
    for step in (1, 3, len(stream)):
        reader, frames = FrameReader(), []
        for start in range(0, len(stream), step):
            reader.feed(stream[start : start + step])
            while (frame := reader.next()) is not None:
                frames.append(frame)
        assert frames == [({"job": "inspect"}, b"\x00" * 10), ({"event": "ready"}, b"")]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"Traceback (most recent call last)", "starts with b'Trac'"),
        (b"RSC1\xff\xff\xff\xff" + bytes(8), "message of 4294967295 bytes"),
        (b"RSC1" + (2).to_bytes(4, "big") + bytes(8) + b"{,", "not JSON"),
        (b"RSC1" + (2).to_bytes(4, "big") + bytes(8) + b"[]", "a JSON list, wanted an object"),
    ],
)
def test_other_bytes_are_refused(data, words):
    reader = FrameReader()
    reader.feed(data)
    with pytest.raises(FrameError, match=words):
        reader.next()


def test_a_body_larger_than_the_pipe_goes_through_and_the_end_is_seen():
    receive, send = os.pipe()
    body = os.urandom(1 << 20)

    def write():
        write_frame(send, {"n": 1}, body)
        os.close(send)

    writer = threading.Thread(target=write)
    writer.start()
    reader = FrameReader()
    assert read_frame(receive, reader) == ({"n": 1}, body)
    assert read_frame(receive, reader) is None
    writer.join()
    os.close(receive)
