"""Encoding of requests and responses, reading of responses, metadata; checked against protobuf and tritonclient."""

import os
import secrets

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from rsrv.core.dtypes import DType
from rsrv.core.errors import Code, InvalidRequest, InvalidResponse, UnregisteredRegion
from rsrv.core.shm import OwnedRegion, RegionRegistry
from rsrv.core.tensors import BATCH, VARIABLE, Dim, DimKind, OutputTarget, TensorSpec
from rsrv.core.wire import (
    IndexRow,
    RequestedOutput,
    ShmInput,
    decode_response,
    encode_index,
    encode_metadata,
    encode_request,
    encode_response,
    join,
    parse_request,
)
from rsrv.protos import inference

WIRE_TYPES = [dtype for dtype in DType if dtype.wire is not None]
X = np.arange(6, dtype=np.float32).reshape(2, 3)
LARGE = np.arange(150_528, dtype=np.float32).reshape(3, 224, 224)


@pytest.fixture
def shared():
    """A registry with the region "r" of 64 bytes, and the owner's view of it."""
    registry = RegionRegistry()
    with OwnedRegion.create("test", 64) as region:
        registry.register("r", region.key, 0, 64)
        yield registry, np.frombuffer(region.view, np.uint8)
        registry.close()


def reference_parameters(target, mapping):
    for name, value in mapping.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(target[name], f"{kind}_param", value)


names = st.text(max_size=8)
arrays = st.builds(
    lambda dtype, shape: np.ones(shape, dtype.numpy),
    st.sampled_from(WIRE_TYPES),
    st.lists(st.integers(0, 5) | st.just(1200), max_size=2),
)
parameter_maps = st.dictionaries(
    names,
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    max_size=3,
)


# --- requests -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(names, names, st.lists(st.tuples(names, arrays), max_size=3), st.lists(names, max_size=3), parameter_maps)
def test_a_request_is_the_bytes_that_protobuf_would_write(model, request_id, inputs, outputs, parameters):
    reference = inference.ModelInferRequest(model_name=model, id=request_id)
    reference_parameters(reference.parameters, parameters)
    for name, array in inputs:
        datatype = DType.from_numpy(array.dtype).wire
        reference.inputs.add(name=name, datatype=datatype, shape=array.shape)
        reference.raw_input_contents.append(array.tobytes())
    for name in outputs:
        reference.outputs.add(name=name)
    body = join(encode_request(model, inputs, outputs=outputs, id=request_id, parameters=parameters))
    assert body == reference.SerializeToString(deterministic=True)


def test_inputs_in_shared_memory_have_parameters_and_no_raw_entry():
    target = OutputTarget("out", 128, 24)
    body = join(
        encode_request(
            "m",
            [("a", X), ShmInput("b", DType.BF16, (2, 2), "in", 64, 8), ("c", X)],
            outputs=["p", RequestedOutput("q", target), RequestedOutput("s")],
        )
    )
    message = service_pb2.ModelInferRequest.FromString(body)
    assert [(i.name, i.datatype, list(i.shape)) for i in message.inputs] == [
        ("a", "FP32", [2, 3]),
        ("b", "BF16", [2, 2]),
        ("c", "FP32", [2, 3]),
    ]
    assert len(message.raw_input_contents) == 2
    parameters = message.inputs[1].parameters
    assert parameters["shared_memory_region"].string_param == "in"
    assert parameters["shared_memory_offset"].int64_param == 64
    assert parameters["shared_memory_byte_size"].int64_param == 8
    parsed = parse_request(body)
    assert parsed.inputs[1].region == OutputTarget("in", 64, 8)
    assert parsed.outputs == [("p", None), ("q", target), ("s", None)]


@pytest.mark.parametrize("dtype", WIRE_TYPES)
def test_every_datatype_survives_the_way_to_the_server_and_back(dtype):
    values = np.random.default_rng(5).integers(0, 2, (3, 50, 60)).astype(dtype.numpy)
    for array in (values, values[:, ::2], values.T, values[0, 0, 0].reshape(())):
        (tensor,) = parse_request(join(encode_request("m", [("x", array)]))).tensors(None)
        assert (tensor.data.dtype, tensor.data.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(tensor.data, array)
        answer = decode_response(join(encode_response("m", "", [("y", array)]))).arrays()["y"]
        assert (answer.dtype, answer.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(answer, array)


@pytest.mark.parametrize(
    "encode", [lambda a: encode_request("m", [("t", a)]), lambda a: encode_response("m", "", [("t", a)])]
)
def test_large_arrays_are_not_copied_and_small_ones_join_the_head(encode):
    buffers = encode(LARGE)
    assert any(isinstance(b, memoryview) and np.shares_memory(np.frombuffer(b, np.uint8), LARGE) for b in buffers)
    assert len(buffers) == 2
    assert len(encode(X)) == 1


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn, np.complex64, ">f4", "U3", object])
def test_arrays_without_a_kserve_datatype_are_refused_by_name(dtype):
    array = np.zeros(3, dtype)
    with pytest.raises(InvalidRequest, match="tensor 'x'"):
        encode_request("m", [("x", array)])
    with pytest.raises(InvalidRequest, match="tensor 'y'"):
        encode_response("m", "", [("y", array)])


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, b"bytes", None, [1]])
def test_a_parameter_that_no_kind_holds_is_refused(value):
    with pytest.raises(InvalidRequest, match="parameter 'k'"):
        encode_request("m", [], parameters={"k": value})


def test_a_parameter_beyond_int64_travels_unsigned():
    body = join(encode_request("m", [], parameters={"k": 2**63}))
    assert service_pb2.ModelInferRequest.FromString(body).parameters["k"].uint64_param == 2**63


def test_what_tritonclient_sends_is_what_we_read():
    tensors = [triton.InferInput("a", [2, 3], "FP32"), triton.InferInput("b", [2], "INT64")]
    tensors[0].set_data_from_numpy(X)
    tensors[1].set_shared_memory("r", 16, offset=8)
    outputs = [triton.InferRequestedOutput("y"), triton.InferRequestedOutput("z")]
    outputs[1].set_shared_memory("r", 24, offset=32)
    from tritonclient.grpc._utils import _get_inference_request

    request = _get_inference_request(
        model_name="m",
        inputs=tensors,
        model_version="",
        request_id="9",
        outputs=outputs,
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=7,
        parameters=None,
    )
    parsed = parse_request(request.SerializeToString())
    assert parsed.id == "9"
    assert parsed.deadline_ns(100) == 7_100
    assert [header.region for header in parsed.inputs] == [None, OutputTarget("r", 8, 16)]
    assert parsed.outputs == [("y", None), ("z", OutputTarget("r", 32, 24))]
    with OwnedRegion.create("test", 64) as region:
        registry = RegionRegistry()
        registry.register("r", region.key, 0, 64)
        np.frombuffer(region.view, np.int64, 2, 8)[:] = [5, -6]
        data = [tensor.data for tensor in parsed.tensors(registry)]
        registry.close()
    np.testing.assert_array_equal(data[0], X)
    assert data[1].tolist() == [5, -6]


# --- responses ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(names, names, st.lists(st.tuples(names, arrays), max_size=3), parameter_maps)
def test_a_response_is_the_bytes_that_protobuf_would_write(model, request_id, outputs, parameters):
    reference = inference.ModelInferResponse(model_name=model, id=request_id)
    reference_parameters(reference.parameters, parameters)
    for name, array in outputs:
        reference.outputs.add(name=name, datatype=DType.from_numpy(array.dtype).wire, shape=array.shape)
        reference.raw_output_contents.append(array.tobytes())
    body = join(encode_response(model, request_id, outputs, parameters=parameters))
    assert body == reference.SerializeToString(deterministic=True)
    read = decode_response(body)
    assert (read.model_name, read.model_version, read.id, read.parameters) == (model, "", request_id, parameters)
    assert [header[:3] for header in read.outputs] == [
        (name, DType.from_numpy(array.dtype).wire, array.shape) for name, array in outputs
    ]


def test_tritonclient_reads_inline_and_shared_memory_outputs_by_position(shared):
    registry, memory = shared
    outputs = [("a", X), ("b", X + 1), ("c", LARGE)]
    buffers = encode_response("m", "5", outputs, targets={"b": OutputTarget("r", 8, 40)}, regions=registry)
    message = service_pb2.ModelInferResponse.FromString(join(buffers))
    assert [len(entry) for entry in message.raw_output_contents] == [24, 0, LARGE.nbytes]
    result = triton.InferResult(message)
    np.testing.assert_array_equal(result.as_numpy("a"), X)
    np.testing.assert_array_equal(result.as_numpy("c"), LARGE)
    parameters = result.get_output("b").parameters
    assert parameters["shared_memory_region"].string_param == "r"
    assert parameters["shared_memory_offset"].int64_param == 8
    assert parameters["shared_memory_byte_size"].int64_param == 24  # what was written, not what was offered
    np.testing.assert_array_equal(memory[8:32].view(np.float32).reshape(2, 3), X + 1)
    assert memory[32:].sum() == memory[:8].sum() == 0


def test_our_reader_leaves_outputs_in_shared_memory_to_the_caller(shared):
    registry, _ = shared
    body = join(
        encode_response("m", "", [("a", X), ("b", X)], targets={"a": OutputTarget("r", 0, 24)}, regions=registry)
    )
    read = decode_response(body)
    assert read.outputs[0].target == OutputTarget("r", 0, 24)
    assert read.arrays()["a"] is None
    assert read.array("a") is None
    np.testing.assert_array_equal(read.array("b"), X)
    with pytest.raises(KeyError):
        read.array("c")


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_output_of_any_layout_lands_row_major_in_shared_memory(shared, order):
    registry, memory = shared
    encode_response(
        "m", "", [("y", np.array(X, order=order))], targets={"y": OutputTarget("r", 0, 24)}, regions=registry
    )
    np.testing.assert_array_equal(memory[:24].view(np.float32).reshape(2, 3), X)


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        (OutputTarget("r", 32, 20), InvalidRequest, "output 'b' has 24 bytes, more than the 20 bytes offered"),
        (OutputTarget("r", 41, 24), InvalidRequest, "24 bytes at offset 41 are outside shared memory region 'r'"),
        (OutputTarget("r", 0, 65), InvalidRequest, "65 bytes at offset 0 are outside"),
        (OutputTarget("r", -8, 24), InvalidRequest, "offset -8 are outside"),
        (OutputTarget("r", 2**62, 24), InvalidRequest, "outside"),
        (OutputTarget("gone", 0, 24), UnregisteredRegion, "unregistered shared memory region 'gone'"),
    ],
)
def test_nothing_is_written_when_one_target_is_impossible(shared, target, error, text):
    registry, memory = shared
    memory[:] = 0xEE
    with pytest.raises(error, match=text):
        encode_response(
            "m", "", [("a", X), ("b", X)], targets={"a": OutputTarget("r", 0, 24), "b": target}, regions=registry
        )
    assert set(memory.tolist()) == {0xEE}


def test_nothing_is_written_when_one_region_was_truncated(shared):
    registry, memory = shared
    path = f"/dev/shm/rsrvtest-{secrets.token_hex(8)}"
    with open(path, "wb") as file:
        file.write(bytes(64))
    try:
        registry.register("short", os.path.basename(path), 0, 64)
        os.truncate(path, 10)
        targets = {"a": OutputTarget("r", 0, 24), "b": OutputTarget("short", 0, 24)}
        with pytest.raises(InvalidRequest, match="region 'short' was truncated"):
            encode_response("m", "", [("a", X), ("b", X)], targets=targets, regions=registry)
        assert memory.sum() == 0
        assert os.path.getsize(path) == 10
    finally:
        os.unlink(path)


def test_targets_without_shared_memory_on_the_server_are_refused():
    with pytest.raises(InvalidRequest, match="output 'a': shared memory is switched off") as caught:
        encode_response("m", "", [("a", X)], targets={"a": OutputTarget("r", 0, 24)})
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_targets_of_outputs_that_are_not_there_are_left_alone():
    body = join(encode_response("m", "", [("a", X)], targets={"z": OutputTarget("r", 0, 24)}))
    np.testing.assert_array_equal(decode_response(body).array("a"), X)


def test_a_zero_size_output_fits_into_an_empty_target(shared):
    body = join(
        encode_response(
            "m", "", [("y", np.zeros((0, 3), np.float32))], targets={"y": OutputTarget("r", 64, 0)}, regions=shared[0]
        )
    )
    assert decode_response(body).outputs[0].target == OutputTarget("r", 64, 0)


# --- reading responses of other servers ---------------------------------------------------------------------------


def response(raw=(), typed=None):
    """Outputs a (inline), b (shared memory), c (inline) of two INT32 each."""
    message = inference.ModelInferResponse(model_name="m", model_version="3", raw_output_contents=raw)
    for name in "abc":
        output = message.outputs.add(name=name, datatype="INT32", shape=[2])
        if name == "b":
            output.parameters["shared_memory_region"].string_param = "r"
            output.parameters["shared_memory_byte_size"].int64_param = 8
        elif typed:
            output.contents.int_contents.extend(typed)
    return message.SerializeToString()


ONE, TWO = np.int32([1, 2]).tobytes(), np.int32([-1, 7]).tobytes()


@pytest.mark.parametrize("raw", [[ONE, b"", TWO], [ONE, TWO]], ids=["full", "compressed"])
@pytest.mark.parametrize("suffix", [b"", b"\x40\x01"], ids=["plain", "with an unknown field"])
def test_both_layouts_of_raw_contents_are_read(raw, suffix):
    read = decode_response(response(raw) + suffix)
    assert read.model_version == "3"
    found = read.arrays()
    assert (found["a"].tolist(), found["b"], found["c"].tolist()) == ([1, 2], None, [-1, 7])


def test_typed_contents_of_a_response_are_read():
    found = decode_response(response(typed=[5, -6])).arrays()
    assert (found["a"].tolist(), found["b"], found["c"].tolist()) == ([5, -6], None, [5, -6])


@pytest.mark.parametrize("wrap", [bytes, lambda body: memoryview(bytearray(body))])
def test_raw_outputs_are_read_only_views_of_the_body(wrap):
    body = wrap(join(encode_response("m", "", [("y", LARGE)])))
    array = decode_response(body).array("y")
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))
    assert not array.flags.writeable


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\x0a", "malformed ModelInferResponse"),
        (response([ONE]), "model 'm' has 1 raw_output_contents for 3 outputs, 2 of them not in shared memory"),
        (response([ONE, TWO, ONE, TWO]), "has 4 raw_output_contents"),
        (response(), "output 'a' carries no data"),
        (response([ONE[:4], TWO]), r"output 'a': INT32\[2\] takes 8 bytes, got 4"),
        (response(typed=[1, 2, 3]), "output 'a': .*takes 2 elements, got 3"),
        (b"\x32\x00" * 5000, "more than 4096 fields"),
    ],
)
def test_an_answer_that_makes_no_sense_is_the_servers_fault(body, text):
    with pytest.raises(InvalidResponse, match=text) as caught:
        decode_response(body).arrays()
    assert (caught.value.code, caught.value.reason) == (Code.INTERNAL, "bad_response")


def test_bytes_outputs_of_other_servers_are_refused_by_name():
    message = inference.ModelInferResponse(raw_output_contents=[b"\0\0\0\0"])
    message.outputs.add(name="y", datatype="BYTES", shape=[1])
    with pytest.raises(InvalidResponse, match="output 'y': datatype 'BYTES' is not supported"):
        decode_response(message.SerializeToString()).arrays()


# --- metadata -----------------------------------------------------------------------------------------------------


def test_metadata_has_wire_shapes_with_minus_one_for_batch_and_variable_axes():
    inputs = [TensorSpec("x", DType.F32, (BATCH, Dim(DimKind.FIXED, 3), VARIABLE), "nca", 0)]
    outputs = [TensorSpec("y", DType.BF16, (), "")]
    message = encode_metadata("m", "xla_stablehlo", inputs, outputs)
    theirs = service_pb2.ModelMetadataResponse.FromString(message.SerializeToString())
    assert (theirs.name, theirs.platform, list(theirs.versions)) == ("m", "xla_stablehlo", [])
    assert [(t.name, t.datatype, list(t.shape)) for t in theirs.inputs] == [("x", "FP32", [-1, 3, -1])]
    assert [(t.name, t.datatype, list(t.shape)) for t in theirs.outputs] == [("y", "BF16", [])]


def test_metadata_says_where_rows_are_and_which_numbers_of_them_are_compiled():
    inputs = [TensorSpec("x", DType.F32, (Dim(DimKind.FIXED, 3), BATCH), "cn", 1), TensorSpec("q", DType.F32, (), "")]
    message = encode_metadata("m", "xla_stablehlo", inputs, [TensorSpec("y", DType.F32, (BATCH,), "n", 0)], (1, 300))
    x, q = message.inputs
    assert (x.HasField("batch_axis"), x.batch_axis, q.HasField("batch_axis")) == (True, 1, False)
    assert (message.outputs[0].HasField("batch_axis"), message.outputs[0].batch_axis) == (True, 0)
    assert list(message.batch_sizes) == [1, 300]
    # Axis 0 is in the message although it is the default; so are the field numbers: 100 << 3 is the varint a0 06.
    assert b"\xa0\x06\x00" in message.SerializeToString()
    assert message.SerializeToString().endswith(b"\xa2\x06\x03\x01\xac\x02")
    # A client that knows nothing of it reads the rest.
    theirs = service_pb2.ModelMetadataResponse.FromString(message.SerializeToString())
    assert [list(t.shape) for t in theirs.inputs] == [[3, -1], []]


def test_metadata_of_an_8_bit_float_tensor_is_refused_by_name():
    spec = TensorSpec("x", DType.F8_E4M3, (BATCH,), "n", 0)
    with pytest.raises(InvalidRequest, match="tensor 'x' is f8_e4m3, which has no KServe datatype"):
        encode_metadata("m", "xla_stablehlo", [spec], [])


def test_the_index_has_the_rows_in_the_order_given():
    message = encode_index([IndexRow("b", "READY"), ("a", "UNAVAILABLE", "no weights")])
    assert [(m.name, m.version, m.state, m.reason) for m in message.models] == [
        ("b", "", "READY", ""),
        ("a", "", "UNAVAILABLE", "no weights"),
    ]
