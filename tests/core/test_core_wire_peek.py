"""The proxy's look into a serialized request: what it finds, what it refuses, and that it reads what protobuf reads."""

import tracemalloc

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rsrv.core.errors import InvalidRequest
from rsrv.core.wire import encode_request, join
from rsrv.core.wire.headers import REGION_PARAM
from rsrv.core.wire.parameters import read_parameters
from rsrv.core.wire.peek import batch_extent, peek, timeout_parameter_ns, writes_shared_memory
from rsrv.core.wire.scan import MAX_RECORDS
from rsrv.protos import inference

Message = inference.ModelInferRequest


def request(*shapes, model="m", contents=False, **fields):
    """A body whose inputs are (name, shape), in that order."""
    message = Message(model_name=model, **fields)
    for name, shape in shapes:
        tensor = message.inputs.add(name=name, datatype="FP32", shape=shape)
        if contents:
            tensor.contents.fp32_contents.extend([1.5] * 40)
    if not contents:
        message.raw_input_contents.extend([b"\0" * 64] * len(shapes))
    return message.SerializeToString()


# --- what names a request -----------------------------------------------------------------------------------------


def test_model_and_id_are_found():
    assert peek(request(("x", (1, 4)), model="modèle", id="42")) == ("modèle", "42")


def test_absent_fields_and_an_empty_body_are_empty_strings():
    assert peek(b"") == ("", "")
    assert peek(request(("x", (1,)), model="")) == ("", "")


def test_fields_are_found_in_any_order_and_the_last_occurrence_counts():
    raw = b"\x3a\x03abc"
    assert peek(raw + b"\x1a\x01i" + raw + b"\x0a\x01a" + raw + b"\x0a\x02bc" + b"\x1a\x00") == ("bc", "")


def test_fields_that_nobody_knows_are_stepped_over():
    unknown = b"\x98\x06\x07" + b"\xa1\x06" + b"12345678" + b"\xad\x06" + b"1234" + b"\xb2\x06\x02ab"
    assert peek(unknown + b"\x0a\x01m" + unknown) == ("m", "")


def test_a_tag_or_a_length_with_more_bytes_than_it_needs_is_read():
    assert peek(b"\x8a\x80\x00" + b"\x81\x80\x00" + b"m") == ("m", "")


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"\x0a\x80",
        b"\x0a\x80\x80\x80\x80\x80\x00",
        b"\x0a\xff\xff\xff\xff\x0f" + b"m",
        b"\x0b",
        b"\x0c\x00",
        b"\x0e\x00",
        b"\x0f\x00",
        b"\x02\x00",
        b"\x00\x00",
        b"\xff\xff\xff\xff\xff\x01",
        b"\xff\xff\xff\xff\x7f\x00",
        b"\x08" + b"\xff" * 10 + b"\x01",
        b"\x09123",
        b"\x0d123",
        b"\x0a\x01\xff",
        b"\x1a\x03\xed\xa0\x80",
    ],
)
def test_a_malformed_body_is_refused(body):
    with pytest.raises(InvalidRequest, match="malformed message"):
        peek(body)


def test_more_fields_than_any_request_has_are_refused():
    assert peek(b"\x3a\x00" * (MAX_RECORDS - 1) + b"\x0a\x01m").model == "m"
    with pytest.raises(InvalidRequest, match=f"more than {MAX_RECORDS} fields"):
        peek(b"\x3a\x00" * (MAX_RECORDS + 1))


# --- the extent of the batch --------------------------------------------------------------------------------------

KEYED = [("query", (37,)), ("keys", (12, 37)), ("key_lens", (12,))]


def test_the_last_axis_of_a_shape_is_read():
    assert batch_extent(request(("x", (1024, 768, 3, 2))), "x", 3) == 2


def test_the_extent_comes_from_the_input_of_that_name_wherever_it_is():
    assert batch_extent(request(*KEYED), "keys", 0) == 12
    assert batch_extent(request(*KEYED[::-1]), "keys", 0) == 12
    assert batch_extent(request(*KEYED), "query", 0) == 37


def test_inline_contents_change_nothing():
    assert batch_extent(request(*KEYED, contents=True), "keys", 0) == 12


def test_what_is_not_there_has_no_extent():
    body = request(*KEYED)
    assert batch_extent(body, "other", 0) == 0
    assert batch_extent(body, "keys", 2) == 0
    assert batch_extent(body, "keys", -1) == 0
    assert batch_extent(body, "keys", 10**9) == 0
    assert batch_extent(body, "", 0) == 0
    assert batch_extent(request(("", (5,))), "", 0) == 0
    assert batch_extent(b"", "keys", 0) == 0


def test_a_negative_extent_is_none():
    assert batch_extent(request(("x", (-3, 4))), "x", 0) == 0


def test_an_unpacked_shape_is_read_as_a_packed_one():
    tensor = b"\x0a\x01x" + b"\x18\x07" + b"\x18\x80\x02" + b"\x1a\x01\x05"
    body = b"\x2a" + bytes([len(tensor)]) + tensor
    assert [batch_extent(body, "x", axis) for axis in range(4)] == [7, 256, 5, 0]


def test_the_name_may_come_after_the_shape_and_its_last_occurrence_counts():
    tensor = b"\x1a\x01\x05" + b"\x0a\x01a" + b"\x0a\x01x"
    body = b"\x2a" + bytes([len(tensor)]) + tensor
    assert batch_extent(body, "x", 0) == 5
    assert batch_extent(body, "a", 0) == 0


def test_the_first_of_two_inputs_of_one_name_counts_and_shapes_are_not_merged():
    assert batch_extent(request(("x", (3,)), ("x", (8, 9))), "x", 0) == 3
    assert batch_extent(request(("x", (3,)), ("x", (8, 9))), "x", 1) == 0


@pytest.mark.parametrize("tensor", [b"\x0a\x02x", b"\x1a\x02\x05\x80", b"\x1a\x05\x05", b"\x18\x80", b"\x0b", b"\x0a"])
def test_a_malformed_input_is_refused(tensor):
    # What follows must not lend the tensor the bytes that it lacks.
    with pytest.raises(InvalidRequest, match="malformed message"):
        batch_extent(b"\x2a" + bytes([len(tensor)]) + tensor + b"\x3a\x04\0\0\0\0", "x", 1)


def test_a_shape_without_end_is_not_walked():
    tensor = b"\x0a\x01x" + b"\x18\x01" * 100_000
    body = b"\x2a\xc3\x9a\x0c" + tensor
    assert len(tensor) == 0x030D43
    with pytest.raises(InvalidRequest, match="more than 65536 fields"):
        batch_extent(body, "x", 0)


# --- parameters ---------------------------------------------------------------------------------------------------


def with_parameters(**values):
    message = Message(model_name="m")
    for name, value in values.items():
        kind = "int64_param" if isinstance(value, int) else "string_param"
        setattr(message.parameters[name], kind, value)
    return message.SerializeToString()


def test_the_least_budget_counts_in_nanoseconds():
    assert timeout_parameter_ns(with_parameters()) == 0
    assert timeout_parameter_ns(with_parameters(reactant_timeout_ns=7)) == 7
    assert timeout_parameter_ns(with_parameters(rsrv_timeout_ns=8, other=1)) == 8
    assert timeout_parameter_ns(with_parameters(reactant_timeout_ns=7000, rsrv_timeout_ns=6000, timeout=5)) == 5000


def test_a_budget_that_is_none_is_passed_over():
    assert timeout_parameter_ns(with_parameters(reactant_timeout_ns=-1, rsrv_timeout_ns=0)) == 0
    assert timeout_parameter_ns(with_parameters(reactant_timeout_ns="5", rsrv_timeout_ns=9)) == 9


def test_the_last_entry_of_a_parameter_counts():
    def entry(value):
        content = b"\x0a\x0frsrv_timeout_ns" + b"\x12" + bytes([len(value)]) + value
        return b"\x22" + bytes([len(content)]) + content

    assert timeout_parameter_ns(entry(b"\x10\x05") + entry(b"\x10\x07")) == 7
    assert timeout_parameter_ns(entry(b"\x10\x05") + entry(b"")) == 0
    assert timeout_parameter_ns(entry(b"\x10\x05\x1a\x01s")) == 0
    assert timeout_parameter_ns(entry(b"\x1a\x01s\x10\x05")) == 5


def test_an_output_in_shared_memory_is_seen():
    assert REGION_PARAM == "shared_memory_region"
    message = Message(model_name="m")
    message.outputs.add(name="y")
    message.inputs.add(name="x").parameters[REGION_PARAM].string_param = "in"
    assert not writes_shared_memory(message.SerializeToString())
    message.outputs.add(name="z").parameters[REGION_PARAM].string_param = "out"
    assert writes_shared_memory(message.SerializeToString())


@pytest.mark.parametrize("question", [timeout_parameter_ns, writes_shared_memory])
def test_malformed_parameters_are_refused(question):
    for field in (b"\x22\x02\x0a\x05", b"\x32\x04\x12\x02\x0a\x05", b"\x22"):
        if question is timeout_parameter_ns and field[0] == 0x32:
            continue
        if question is writes_shared_memory and field == b"\x22\x02\x0a\x05":
            continue
        with pytest.raises(InvalidRequest, match="malformed message"):
            question(field)


# --- against protobuf ---------------------------------------------------------------------------------------------

NAMES = st.text(max_size=6) | st.sampled_from(["x", "keys"])
QUESTIONS = (
    peek,
    lambda body: batch_extent(body, "x", 1),
    timeout_parameter_ns,
    writes_shared_memory,
)


@st.composite
def messages(draw):
    message = Message(model_name=draw(NAMES), model_version=draw(st.sampled_from(["", "1"])), id=draw(NAMES))
    names = st.sampled_from(["timeout", "rsrv_timeout_ns", "reactant_timeout_ns", REGION_PARAM, "p"])
    for name in draw(st.lists(names, max_size=4)):
        kind, value = draw(
            st.tuples(st.just("int64_param"), st.integers(-(2**63), 2**63 - 1))
            | st.tuples(st.just("string_param"), st.text(max_size=3))
            | st.tuples(st.just("bool_param"), st.booleans())
            | st.tuples(st.just("double_param"), st.floats(allow_nan=False))
            | st.tuples(st.just("uint64_param"), st.integers(0, 2**64 - 1))
        )
        setattr(message.parameters[name], kind, value)
    for name in draw(st.lists(NAMES, max_size=3)):
        shape = draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
        tensor = message.inputs.add(name=name, datatype="FP32", shape=shape)
        tensor.contents.int_contents.extend(draw(st.lists(st.integers(0, 9), max_size=2)))
    for name in draw(st.lists(NAMES, max_size=2)):
        output = message.outputs.add(name=name)
        if draw(st.booleans()):
            output.parameters[REGION_PARAM].string_param = name
    message.raw_input_contents.extend(draw(st.lists(st.binary(max_size=200), max_size=2)))
    return message


def extent(message, name, axis):
    """What `batch_extent` has to find, by protobuf."""
    shape = next((tensor.shape for tensor in message.inputs if name and tensor.name == name), ())
    return max(0, shape[axis]) if axis < len(shape) else 0


def check(message, body):
    assert peek(body) == (message.model_name, message.id)
    for name in ["", "x", "keys", *(tensor.name for tensor in message.inputs)]:
        for axis in range(4):
            assert batch_extent(body, name, axis) == extent(message, name, axis)
    assert timeout_parameter_ns(body) == read_parameters(message.parameters)[1]
    assert writes_shared_memory(body) == any(REGION_PARAM in output.parameters for output in message.outputs)


@settings(max_examples=60, deadline=None)
@given(messages())
def test_everything_is_read_as_protobuf_reads_it(message):
    check(message, message.SerializeToString())


@settings(max_examples=60, deadline=None)
@given(messages(), st.data())
def test_a_damaged_body_is_read_as_protobuf_reads_it_or_refused(message, data):
    body = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) if data.draw(st.booleans()) else len(body) :]
    body = bytes(body)
    try:
        message = Message.FromString(body)
    except DecodeError:
        message = None
    try:
        if message is not None:
            check(message, body)
    except InvalidRequest:
        # Groups, which no message of the protocol has, are the one thing that only protobuf takes.
        assert any(byte & 7 in (3, 4) for byte in body)
    for question in QUESTIONS:
        answer_or_refusal(question, body)


@settings(deadline=None)
@given(st.binary(max_size=64))
@example(b"\x2a\x02\x1a\x7f")
@example(b"\x32\x03\x12\x80\x00")
def test_random_bytes_never_raise_anything_but_malformed(body):
    for question in QUESTIONS:
        answer_or_refusal(question, body)


def answer_or_refusal(question, body):
    try:
        question(body)
    except InvalidRequest as error:
        refusal = str(error)
    else:
        return
    assert refusal.startswith("malformed message: ")


def test_tensors_are_not_copied():
    """A body of 16 MiB is answered for with no more memory than a small one."""
    body = bytes(join(encode_request("m", [("x", np.zeros((4, 1 << 20), np.float32))], id="i")))
    tracemalloc.start()
    try:
        assert peek(body) == ("m", "i")
        assert batch_extent(body, "x", 0) == 4
        assert timeout_parameter_ns(body) == 0
        assert not writes_shared_memory(body)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
