"""The zero-copy reader against protobuf: both accept the same bodies, read the same from them, and refuse the rest."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rsrv.core.errors import InvalidRequest, InvalidResponse
from rsrv.core.wire import decode_response, encode_request, join, parse_request
from rsrv.core.wire import request as request_module
from rsrv.core.wire import response as response_module
from rsrv.core.wire.scan import scan
from rsrv.protos import inference

# --- serialized records, well formed and not ----------------------------------------------------------------------


def varint(value: int, pad: int = 0) -> bytes:
    """`value`, with `pad` bytes more than it needs."""
    out = bytearray()
    while value > 0x7F or pad:
        if value <= 0x7F:
            pad -= 1
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def mostly(usual, *rare):
    """`usual` nine times out of ten, so that most bodies get past their first records."""
    return st.integers(0, 9).flatmap(lambda draw: st.sampled_from(rare) if draw == 9 else st.just(usual))


pads = mostly(0, 1, 2, 3, 4, 8, 9, 10)
field_numbers = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 100, 2**29 - 1]) | mostly(7, 0, 2**29)
texts = mostly("mü\0".encode(), b"", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80")
# Lengths that lie: past the end, past what protobuf allows, negative as an int32.
lies = mostly(0, 1, -1, 2**31, 2**31 - 1, 2**32, 2**63)


@st.composite
def delimited(draw, number, payload):
    length = max(0, len(payload) + draw(lies))
    return varint(number << 3 | 2, draw(pads)) + varint(length, draw(pads)) + payload


@st.composite
def tensor(draw):
    """An input (or output) tensor with fields of right and wrong types, repeated and unpacked."""
    parts = draw(
        st.lists(
            st.one_of(
                texts.flatmap(lambda text: delimited(1, text)),
                st.sampled_from([b"FP32", b"INT8", b"BYTES", b"BOOL"]).flatmap(lambda name: delimited(2, name)),
                st.lists(st.integers(0, 2**64 - 1), max_size=3).flatmap(
                    lambda dims: delimited(3, b"".join(map(varint, dims)))
                ),
                st.integers(0, 2**64 - 1).map(lambda dim: b"\x18" + varint(dim)),
                parameter(4),
                st.sampled_from([b"\x2a\x00", b"\x2a\x04\x10\x01\x10\x02", b"\x2a\x06\x32\x04\0\0\x80\x3f"]),
                mostly(b"", b"\x4b\x4c", b"\x4b", b"\x4c", b"\x7f", b"\x00", b"\x32\x09"),
            ),
            max_size=5,
        )
    )
    return b"".join(parts)


@st.composite
def parameter(draw, number):
    key = draw(st.sampled_from([b"timeout", b"shared_memory_region", b"shared_memory_byte_size"]) | texts)
    value = draw(st.sampled_from([b"", b"\x10\x05", b"\x08\x01", b"\x1a\x01r", b"\x10\x05\x1a\x01r", b"\x28\x07"]))
    entry = b"\x0a" + varint(len(key)) + key + b"\x12" + varint(len(value)) + value
    return draw(delimited(number, draw(mostly(entry, entry[:-1], b"", entry + entry))))


@st.composite
def junk(draw):
    """A record of any field number and wire type, groups included, often malformed."""
    number, wire_type = draw(field_numbers), draw(st.sampled_from([0, 1, 2, 3, 5]) | mostly(0, 4, 6, 7))
    tag = varint(number << 3 | wire_type, draw(pads))
    if wire_type == 0:
        return tag + varint(draw(st.sampled_from([0, 1, 2**63, 2**64 - 1])), draw(mostly(0, 1, 9)))
    if wire_type == 2:
        return draw(delimited(number, draw(st.binary(max_size=4))))
    if wire_type == 3:
        inner = draw(st.sampled_from([b"", b"\x08\x01", b"\x3a\x01x", b"\x4b\x4c"]))
        end = draw(mostly(number, number + 1))
        return tag + inner + varint(end << 3 | 4)
    return tag + draw(mostly(bytes(8 if wire_type == 1 else 4), b"", bytes(3), bytes(9)))


records = st.one_of(
    texts.flatmap(lambda text: delimited(1, text)),
    texts.flatmap(lambda text: delimited(2, text)),
    texts.flatmap(lambda text: delimited(3, text)),
    parameter(4),
    tensor().flatmap(lambda payload: delimited(5, payload)),
    tensor().flatmap(lambda payload: delimited(6, payload)),
    st.binary(max_size=300).flatmap(lambda payload: delimited(7, payload)),
    junk(),
)
bodies = st.lists(records, max_size=7).map(b"".join)


@st.composite
def mutated(draw):
    body = bytearray(draw(bodies))
    for _ in range(draw(mostly(0, 1, 2, 3))):
        if body:
            body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(body)))] if draw(mostly(False, True)) else body)


# --- the comparison -----------------------------------------------------------------------------------------------


def comparable(message):
    """Everything that was read, with contents messages as their bytes."""
    if message is None:
        return None
    tensors = message.inputs if hasattr(message, "inputs") else message.outputs
    headers = [(*h[:4], h[4] and h[4].SerializeToString(deterministic=True)) for h in tensors]
    requested = message.outputs if hasattr(message, "inputs") else None
    extras = {name: repr(value) for name, value in message.parameters.items()}
    return (
        message.model_name,
        message.model_version,
        message.id,
        extras,
        headers,
        requested,
        [bytes(entry) for entry in message.raw],
        getattr(message, "budget_ns", None),
    )


def outcome(read, body):
    """What `read` makes of `body`, or None when it refuses it."""
    try:
        return comparable(read(body))
    except (DecodeError, InvalidRequest, InvalidResponse):
        return None


def check_request(body):
    expected = outcome(request_module._from_protobuf, body)
    assert outcome(parse_request, body) == expected
    assert outcome(parse_request, memoryview(bytearray(body))) == expected
    return expected


def check_response(body):
    expected = outcome(response_module._from_protobuf, body)
    assert outcome(decode_response, body) == expected
    return expected


@settings(deadline=None, max_examples=600)
@given(mutated())
@example(b"")
@example(b"\x0a")
@example(b"\x0a\x80")
@example(b"\x3a\xff\xff\xff\xff\x07")
@example(b"\x3a\xff\xff\xff\xff\x0f")
@example(b"\x3a\x80\x80\x80\x80\x80\x00")
@example(b"\xba\x00\x01x")
@example(b"\x02\x00")
@example(b"\x0f")
@example(b"\x0c")
@example(b"\x38\x05")
@example(b"\x3b\x3c")
@example(b"\x0a\x01\xff\x0a\x01m")
@example(b"\x0a\x01a\x0a\x01b")
def test_requests_are_read_alike(body):
    check_request(body)


@settings(deadline=None, max_examples=300)
@given(mutated())
def test_responses_are_read_alike(body):
    check_response(body)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=100))
def test_random_bytes_are_read_alike(body):
    check_request(body)
    check_response(body)


@pytest.mark.parametrize("nesting", [97, 98, 99, 100, 101])
@pytest.mark.parametrize("field", [4, 5, 6, 7, 9])
def test_the_nesting_limit_counts_from_the_same_level(field, nesting):
    groups = b"\x4b" * nesting + b"\x4c" * nesting
    check_request(varint(field << 3 | 2) + varint(len(groups)) + groups)
    check_request(groups)


@pytest.mark.parametrize("end", range(240))
def test_a_request_cut_anywhere_is_read_alike(end):
    body = join(
        encode_request(
            "model",
            [("a", np.arange(16, dtype=np.float32)), ("b", np.ones((2, 3), np.int8))],
            outputs=["y"],
            id="id",
            parameters={"timeout": 5},
        )
    )
    check_request(body[: end * len(body) // 239])


@pytest.mark.parametrize("position", range(1, 12))
@pytest.mark.parametrize("last", [0x00, 0x01, 0x02, 0x7F])
@pytest.mark.parametrize("start", [b"\x40", b"\x3a", b"\x2a\x0a\x18", b"\x0a", b"\xba", b"\x08"])
def test_long_varints_are_read_alike(start, position, last):
    encoded = b"\x80" * (position - 1) + bytes([last])
    for body in (start + encoded, start + encoded + b"\x00" * 40, start + b"\xff" * (position - 1) + bytes([last])):
        check_request(body)


@pytest.mark.parametrize("wire_type", range(8))
@pytest.mark.parametrize("field", range(9))
def test_every_field_of_every_wire_type_is_read_alike(field, wire_type):
    tag = bytes([field << 3 | wire_type])
    end = bytes([field << 3 | 4])
    rest = b"\x0a\x01m\x3a\x01x"
    for payload in (b"", b"\x00", b"\x01a", b"\x05" + rest[:5], bytes(4), bytes(8), end, rest + end):
        check_request(tag + payload + rest)
        check_response(tag + payload + rest)


def test_raw_entries_may_be_spread_over_the_message():
    parts = [b"\x3a\x02ab", b"\x0a\x01m", b"\x3a\x00", b"\x2a\x03\x0a\x01x", b"\x7a\x01?", b"\x3a\x01c"]
    read = check_request(b"".join(parts))
    assert read[6] == [b"ab", b"", b"c"]
    assert read[0] == "m"


def test_the_last_of_a_repeated_scalar_wins_and_every_one_is_checked():
    assert check_request(b"\x0a\x01a\x12\x011\x0a\x01b\x1a\x01i\x1a\x01j")[:3] == ("b", "1", "j")
    assert check_request(b"\x0a\x01\xff\x0a\x01b") is None


def test_ordinary_bodies_take_the_zero_copy_path_and_the_others_do_not():
    """So that the tests above do compare two readers."""
    plain = inference.ModelInferRequest(model_name="m", id="1", raw_input_contents=[bytes(500)])
    plain.inputs.add(name="x", datatype="UINT8", shape=[500]).parameters["k"].int64_param = 1
    plain.outputs.add(name="y")
    plain.parameters["timeout"].int64_param = 5
    body = plain.SerializeToString()
    assert scan(body, 7) is not None
    assert check_request(body) is not None
    assert scan(body + b"\x40\x01", 7) is None
    assert check_request(body + b"\x40\x01") == check_request(body)
