"""Decoding of ModelInferRequest: where the bytes come from, what is checked before memory is spent, deadlines."""

import re
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from rsrv.core.dtypes import DType
from rsrv.core.errors import Code, InvalidRequest, UnknownModel, UnregisteredRegion
from rsrv.core.shm import OwnedRegion, RegionRegistry
from rsrv.core.tensors import OutputTarget
from rsrv.core.wire import (
    TIMEOUT_NS_PARAM,
    RequestedOutput,
    ShmInput,
    deadline_params,
    decode_request,
    encode_request,
    join,
    parse_request,
)
from rsrv.core.wire.scan import MAX_RECORDS
from rsrv.protos import inference

WIRE_TYPES = [dtype for dtype in DType if dtype.wire is not None]
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def message(*, datatype="FP32", shape=(2, 3), raw=None, region=None, contents=None, **fields):
    """A request with one input "x"."""
    request = inference.ModelInferRequest(**{"model_name": "m", **fields})
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    if contents is not None:
        tensor.contents.CopyFrom(inference.InferTensorContents(**contents))
    for name, value in (region or {}).items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(tensor.parameters[f"shared_memory_{name}"], kind, value)
    return request


def decode(request, regions=None):
    """The array of the only input."""
    (tensor,) = parse_request(request.SerializeToString()).tensors(regions)
    assert tensor.name == "x"
    return tensor.data


def refused(request, match, regions=None, error=InvalidRequest):
    with pytest.raises(error, match=match) as caught:
        decode(request, regions)
    return caught.value


@pytest.fixture
def shared():
    """A registry with the region "r" of 64 bytes, and the owner's view of it."""
    registry = RegionRegistry()
    with OwnedRegion.create("test", 64) as region:
        registry.register("r", region.key, 0, 64)
        yield registry, np.frombuffer(region.view, np.uint8)
        registry.close()


# --- the message --------------------------------------------------------------------------------------------------


def test_a_request_is_parsed_into_its_fields():
    request = message(raw=X.tobytes(), id="42", model_version="1")
    for name, value in (("b", True), ("i", -5), ("s", "text"), ("d", 0.5)):
        kind = {bool: "bool", int: "int64", str: "string", float: "double"}[type(value)]
        setattr(request.parameters[name], f"{kind}_param", value)
    request.parameters["u"].uint64_param = 2**64 - 1
    request.parameters["none"].SetInParent()
    request.outputs.add(name="y")
    parsed = parse_request(request.SerializeToString())
    assert (parsed.model_name, parsed.model_version, parsed.id) == ("m", "1", "42")
    assert parsed.parameters == {"b": True, "i": -5, "s": "text", "d": 0.5, "u": 2**64 - 1}
    assert parsed.parameters["b"] is True
    assert parsed.inputs == [("x", "FP32", (2, 3), None, None)]
    assert parsed.outputs == [RequestedOutput("y")]
    assert [bytes(entry) for entry in parsed.raw] == [X.tobytes()]


def test_an_empty_body_is_a_request_without_a_model():
    assert parse_request(b"").model_name == ""
    with pytest.raises(InvalidRequest, match="names no model"):
        decode_request(b"")


@pytest.mark.parametrize("version", ["", "1"])
def test_models_have_no_version_or_version_1(version):
    assert decode_request(message(raw=X.tobytes(), model_version=version).SerializeToString()).id == ""


@pytest.mark.parametrize("version", ["2", "01", "latest"])
def test_any_other_version_is_not_found(version):
    body = message(raw=X.tobytes(), model_version=version).SerializeToString()
    with pytest.raises(UnknownModel, match=f"'m' has no version '{version}'") as caught:
        decode_request(body)
    assert caught.value.code is Code.NOT_FOUND


def test_decode_request_does_it_all_at_once(shared):
    registry, memory = shared
    memory[:24] = np.frombuffer(X.tobytes(), np.uint8)
    target = OutputTarget("r", 32, 8)
    body = join(
        encode_request(
            "m",
            [ShmInput("a", DType.F32, (2, 3), "r", 0, 24), ("b", X + 1)],
            outputs=[RequestedOutput("p", target), "q"],
            id="7",
            parameters=deadline_params(500),
        )
    )
    decoded = decode_request(body, regions=registry, now_ns=1000)
    assert decoded.id == "7"
    assert decoded.output_targets == {"p": target}
    assert decoded.request.model_name == "m"
    assert decoded.request.deadline_ns == 1500
    assert decoded.request.requested_outputs == ["p", "q"]
    assert [tensor.name for tensor in decoded.request.inputs] == ["a", "b"]
    np.testing.assert_array_equal(decoded.request.inputs[0].data, X)
    np.testing.assert_array_equal(decoded.request.inputs[1].data, X + 1)


@pytest.mark.parametrize("n_bytes", [100, 1_000_000])
def test_a_truncated_body_is_malformed_wherever_it_ends(n_bytes):
    body = message(shape=[n_bytes // 4], raw=bytes(n_bytes)).SerializeToString()
    assert decode(inference.ModelInferRequest.FromString(body)).size == n_bytes // 4
    for end in (*range(1, 40), len(body) - n_bytes, len(body) - 1):
        try:
            inference.ModelInferRequest.FromString(body[:end])
        except Exception:
            with pytest.raises(InvalidRequest, match="malformed ModelInferRequest"):
                parse_request(body[:end])
        else:
            parse_request(body[:end])


def test_a_body_of_millions_of_tiny_records_is_refused_before_it_becomes_objects():
    for record in (b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\xfa\x01\x00", b"\x40\x01", b"\x43\x44"):
        assert parse_request(record * (MAX_RECORDS // 2)) is not None
        body = record * 1_000_000
        tracemalloc.start()
        try:
            with pytest.raises(InvalidRequest, match=f"more than {MAX_RECORDS} fields"):
                parse_request(body)
            assert tracemalloc.get_traced_memory()[1] < len(body) + 2_000_000
        finally:
            tracemalloc.stop()


def test_as_many_records_as_allowed_are_parsed_and_one_more_is_not():
    assert len(parse_request(b"\x3a\x00" * MAX_RECORDS).raw) == MAX_RECORDS
    with pytest.raises(InvalidRequest, match="more than"):
        parse_request(b"\x3a\x00" * (MAX_RECORDS + 1))
    assert parse_request(b"\x40\x00" * MAX_RECORDS).raw == []
    with pytest.raises(InvalidRequest, match="more than"):
        parse_request(b"\x40\x00" * (MAX_RECORDS + 1))


@pytest.mark.parametrize("wrap", [bytes, memoryview, lambda body: memoryview(bytearray(body))])
@pytest.mark.parametrize("suffix", [b"", b"\x40\x01"], ids=["plain", "with an unknown field"])
def test_a_body_may_be_bytes_or_a_view(wrap, suffix):
    body = message(raw=X.tobytes(), id="ü").SerializeToString() + suffix
    parsed = parse_request(wrap(body))
    assert parsed.id == "ü"
    (tensor,) = parsed.tensors(None)
    np.testing.assert_array_equal(tensor.data, X)
    assert not tensor.data.flags.writeable


# --- raw contents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WIRE_TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 5)])
def test_raw_bytes_of_every_datatype_become_the_array_that_was_sent(dtype, shape):
    values = np.random.default_rng(1).integers(0, 2, size=shape).astype(dtype.numpy)
    array = decode(message(datatype=dtype.wire, shape=shape, raw=np.asarray(values).tobytes()))
    assert (array.dtype, array.shape) == (dtype.numpy, shape)
    assert isinstance(array, np.ndarray)
    np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize("n", [50, 600_000])
def test_raw_arrays_are_read_only_views_of_the_body(n):
    body = message(datatype="UINT8", shape=[n], raw=bytes(n)).SerializeToString()
    whole = np.frombuffer(body, np.uint8)
    (tensor,) = parse_request(body).tensors(None)
    assert np.shares_memory(tensor.data, whole)
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0] = 1


def test_bf16_keeps_its_values():
    values = np.array([1.5, -2.0, 65280.0], ml_dtypes.bfloat16)
    array = decode(message(datatype="BF16", shape=[3], raw=values.tobytes()))
    assert array.astype(np.float32).tolist() == [1.5, -2.0, 65280.0]


@pytest.mark.parametrize("n", [4, 100_000])
def test_bool_bytes_other_than_0_and_1_are_normalised(n):
    raw = np.zeros(n, np.uint8)
    raw[1:4] = [1, 2, 255]
    array = decode(message(datatype="BOOL", shape=[n], raw=raw.tobytes()))
    assert array.dtype == np.bool_
    assert array.view(np.uint8)[:4].tolist() == [0, 1, 1, 1]
    assert array.sum() == 3
    assert not array.flags.writeable


@pytest.mark.parametrize(
    ("datatype", "shape", "n_bytes", "text"),
    [
        ("FP32", [2, 3], 23, "23 bytes are no multiple of the 4 bytes of a FP32 element"),
        ("FP32", [2, 3], 20, "FP32[2, 3] takes 24 bytes, got 20"),
        ("FP32", [2, 3], 28, "FP32[2, 3] takes 24 bytes, got 28"),
        ("FP32", [2, 3], 0, "takes 24 bytes, got 0"),
        ("FP64", [], 0, "FP64[] takes 8 bytes, got 0"),
        ("INT8", [0], 1, "INT8[0] takes 0 bytes, got 1"),
        ("FP32", [-1, 3], 12, "shape [-1, 3] has a negative extent"),
        ("FP32", [-2, -3], 24, "negative extent"),
        ("FP32", [-(2**63)], 0, "negative extent"),
        ("FP32", [2**61], 0, "shape [2305843009213693952] of FP32 overflows 64 bits"),
        ("FP32", [2**62, 4], 16, "overflows"),
        ("UINT8", [2**32, 2**32], 0, "overflows"),
        ("INT8", [2**63 - 1, 2], 2**4, "overflows"),
        ("FP32", [2**62, 2**62, 0], 0, "overflows"),
        ("FP32", [0, 2**62, 2**62], 0, "overflows"),
        ("BYTES", [1], 4, "datatype 'BYTES' is not supported"),
        ("FP8", [1], 1, "datatype 'FP8' is not supported"),
        ("f32", [1], 4, "datatype 'f32' is not supported"),
        ("", [1], 4, "datatype '' is not supported"),
    ],
)
def test_bytes_and_shapes_that_do_not_fit_are_refused_by_input(datatype, shape, n_bytes, text):
    error = refused(message(datatype=datatype, shape=shape, raw=bytes(n_bytes)), re.escape(text))
    assert error.code is Code.INVALID_ARGUMENT
    assert error.message.startswith("input 'x': ")


def test_the_supported_datatypes_are_listed_and_the_8_bit_floats_are_not_among_them():
    error = refused(message(datatype="BYTES", raw=b""), "supported: FP16, FP32")
    assert "8" not in error.message.replace("INT8", "").replace("UINT8", "")


def test_more_axes_than_numpy_has_are_refused():
    assert decode(message(shape=[1] * 32, raw=bytes(4))).ndim == 32
    refused(message(shape=[1] * 33, raw=bytes(4)), "input 'x' has 33 axes, at most 32")
    refused(message(shape=[2**40] * 100_000, raw=bytes(4)), "100000 axes")


@pytest.mark.parametrize("source", ["raw", "shm", "typed"])
def test_no_memory_is_spent_on_a_claimed_shape(source, shared):
    claims = {
        "raw": message(shape=[2**40], raw=bytes(8)),
        "shm": message(shape=[2**40], region={"region": "r", "byte_size": 2**42}),
        "typed": message(shape=[2**40], contents={"fp32_contents": [1.0]}),
    }
    body = claims[source].SerializeToString()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            parse_request(body).tensors(shared[0])
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


# --- where the bytes come from ------------------------------------------------------------------------------------


def test_an_input_without_data_is_refused():
    refused(message(), "input 'x': carries no data")


def test_shared_memory_goes_before_raw_and_raw_before_typed(shared):
    registry, memory = shared
    memory[:24] = np.frombuffer((X + 10).tobytes(), np.uint8)
    region = {"region": "r", "byte_size": 24}
    request = message(region=region, raw=X.tobytes(), contents={"fp32_contents": [0.0] * 6})
    np.testing.assert_array_equal(decode(request, registry), X + 10)
    np.testing.assert_array_equal(decode(message(raw=X.tobytes(), contents={})), X)


def test_raw_and_typed_contents_of_one_input_are_refused():
    refused(
        message(raw=X.tobytes(), contents={"fp32_contents": [0.0] * 6}), "input 'x': has both raw and typed contents"
    )


def test_raw_and_typed_inputs_cannot_be_mixed_in_one_request():
    request = message(contents={"fp32_contents": [0.0] * 6})
    request.inputs.add(name="y", datatype="FP32", shape=[1])
    request.raw_input_contents.append(bytes(4))
    with pytest.raises(InvalidRequest, match="1 raw_input_contents for 2 inputs"):
        parse_request(request.SerializeToString()).tensors(None)
    request.raw_input_contents.append(bytes(24))
    with pytest.raises(InvalidRequest, match="both raw and typed"):
        parse_request(request.SerializeToString()).tensors(None)


def mixed(raw):
    """Inputs a (raw), b (shared memory), c (raw) of one UINT8 each."""
    request = inference.ModelInferRequest(model_name="m", raw_input_contents=raw)
    for name in "abc":
        tensor = request.inputs.add(name=name, datatype="UINT8", shape=[1])
        if name == "b":
            tensor.parameters["shared_memory_region"].string_param = "r"
            tensor.parameters["shared_memory_offset"].int64_param = 5
            tensor.parameters["shared_memory_byte_size"].int64_param = 1
    return parse_request(request.SerializeToString())


@pytest.mark.parametrize("raw", [[b"\x01", b"", b"\x03"], [b"\x01", b"\x03"]], ids=["full", "compressed"])
def test_raw_entries_may_leave_out_or_pad_the_inputs_in_shared_memory(raw, shared):
    registry, memory = shared
    memory[5] = 2
    assert [tensor.data.tolist() for tensor in mixed(raw).tensors(registry)] == [[1], [2], [3]]


@pytest.mark.parametrize("n", [1, 4])
def test_any_other_number_of_raw_entries_is_refused(n, shared):
    with pytest.raises(
        InvalidRequest, match=f"has {n} raw_input_contents for 3 inputs, 2 of them not in shared memory"
    ):
        mixed([b"\x01"] * n).tensors(shared[0])


def test_raw_entries_without_inputs_are_refused():
    request = inference.ModelInferRequest(model_name="m", raw_input_contents=[b"abc"])
    with pytest.raises(InvalidRequest, match="1 raw_input_contents for 0 inputs"):
        parse_request(request.SerializeToString()).tensors(None)


# --- shared memory ------------------------------------------------------------------------------------------------


def test_an_input_is_copied_out_of_its_region(shared):
    registry, memory = shared
    memory[8:32] = np.frombuffer(X.tobytes(), np.uint8)
    request = message(region={"region": "r", "offset": 8, "byte_size": 24})
    assert parse_request(request.SerializeToString()).inputs[0].region == OutputTarget("r", 8, 24)
    array = decode(request, registry)
    memory[:] = 0
    np.testing.assert_array_equal(array, X)
    assert not array.flags.writeable  # as inputs that came inline: a hook must not depend on the transport
    assert array.ctypes.data % 64 == 0


def test_a_bool_input_in_shared_memory_is_normalised_too(shared):
    registry, memory = shared
    memory[:3] = [0, 7, 1]
    array = decode(message(datatype="BOOL", shape=[3], region={"region": "r", "byte_size": 3}), registry)
    assert array.view(np.uint8).tolist() == [0, 1, 1]


def test_a_zero_size_input_in_shared_memory_is_empty(shared):
    array = decode(message(shape=[0, 3], region={"region": "r", "offset": 64, "byte_size": 0}), shared[0])
    assert array.shape == (0, 3)


@pytest.mark.parametrize(
    ("region", "text"),
    [
        ({"byte_size": 20}, "FP32[2, 3] takes 24 bytes, got 20"),
        ({"byte_size": 23}, "no multiple"),
        ({"byte_size": -24}, "takes 24 bytes, got -24"),
        ({"byte_size": 24, "offset": 41}, "24 bytes at offset 41 are outside shared memory region 'r' of 64 bytes"),
        ({"byte_size": 24, "offset": -1}, "outside shared memory region 'r'"),
        ({"byte_size": 24, "offset": 2**62}, "outside shared memory region 'r'"),
        ({"byte_size": 24, "offset": 2**63 - 1}, "outside shared memory region 'r'"),
        ({"byte_size": 2**63 - 1}, "no multiple"),
    ],
)
def test_a_window_that_does_not_fit_is_refused_by_input(region, text, shared):
    refused(message(region={"region": "r", **region}), re.escape(text), shared[0])


def test_a_tensor_in_shared_memory_needs_its_byte_size():
    error = refused(message(region={"region": "r", "offset": 0}), "input 'x' is in shared memory region 'r'")
    assert "shared_memory_byte_size" in error.message
    request = message(region={"region": "r", "byte_size": "24"})  # a string: counts as absent
    refused(request, "shared_memory_byte_size")


def test_a_region_parameter_of_the_wrong_kind_counts_as_absent():
    request = message(region={"region": 5, "byte_size": 24}, raw=X.tobytes())
    np.testing.assert_array_equal(decode(request), X)


def test_an_unregistered_region_keeps_its_own_error(shared):
    error = refused(message(region={"region": "gone", "byte_size": 24}), "'gone'", shared[0], UnregisteredRegion)
    assert error.code is Code.FAILED_PRECONDITION


def test_a_server_without_shared_memory_says_so():
    refused(message(region={"region": "r", "byte_size": 24}), "input 'x': shared memory is switched off")


# --- requested outputs --------------------------------------------------------------------------------------------


def test_requested_outputs_keep_their_order_and_targets():
    request = message(raw=X.tobytes())
    for name, parameters in (("a", {}), ("b", {"region": "r", "byte_size": 8}), ("c", {"region": "s", "byte_size": 4})):
        output = request.outputs.add(name=name)
        for key, value in parameters.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(output.parameters[f"shared_memory_{key}"], kind, value)
    request.outputs[2].parameters["shared_memory_offset"].int64_param = 12
    parsed = parse_request(request.SerializeToString())
    assert [output.name for output in parsed.outputs] == ["a", "b", "c"]
    assert parsed.output_targets == {"b": OutputTarget("r", 0, 8), "c": OutputTarget("s", 12, 4)}


def test_an_output_target_needs_its_byte_size():
    request = message(raw=X.tobytes())
    request.outputs.add(name="y").parameters["shared_memory_region"].string_param = "r"
    refused(request, "output 'y' is in shared memory region 'r', but its parameter shared_memory_byte_size")


def test_classification_is_refused_instead_of_answered_with_scores():
    request = message(raw=X.tobytes())
    request.outputs.add(name="y").parameters["classification"].int64_param = 3
    refused(request, "output 'y': classification is not supported")


# --- deadlines and parameters -------------------------------------------------------------------------------------


def deadline(**parameters):
    request = message(raw=X.tobytes())
    for name, (kind, value) in parameters.items():
        setattr(request.parameters[name], kind, value)
    return parse_request(request.SerializeToString()).deadline_ns(1_000)


@pytest.mark.parametrize("name", ["reactant_timeout_ns", "rsrv_timeout_ns"])
def test_the_remaining_nanoseconds_become_an_absolute_deadline(name):
    assert deadline(**{name: ("int64_param", 250)}) == 1_250


def test_tritons_timeout_is_in_microseconds():
    assert deadline(timeout=("int64_param", 3)) == 4_000


def test_the_earliest_budget_counts():
    assert deadline(timeout=("int64_param", 3), reactant_timeout_ns=("int64_param", 2_000)) == 3_000
    assert deadline(timeout=("int64_param", 1), rsrv_timeout_ns=("int64_param", 2_000)) == 2_000


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int64_param", 0),
        ("int64_param", -1),
        ("uint64_param", 5),
        ("double_param", 5.0),
        ("string_param", "5"),
        ("bool_param", True),
    ],
)
@pytest.mark.parametrize("name", ["reactant_timeout_ns", "rsrv_timeout_ns", "timeout"])
def test_a_budget_of_another_kind_or_not_positive_is_none(name, kind, value):
    assert deadline(**{name: (kind, value)}) == 0
    other = "timeout" if name != "timeout" else "rsrv_timeout_ns"
    assert deadline(**{name: (kind, value), other: ("int64_param", 1)}) == (2_000 if other == "timeout" else 1_001)


def test_deadlines_saturate():
    assert deadline(reactant_timeout_ns=("int64_param", 2**63 - 1)) == 2**63 - 1
    assert deadline(timeout=("int64_param", 2**62)) == 2**63 - 1
    assert deadline() == 0


@pytest.mark.parametrize("name", ["sequence_id", "sequence_start", "sequence_end", "sequence_anything"])
def test_sequence_parameters_are_refused(name):
    with pytest.raises(InvalidRequest, match=f"'{name}' is not supported"):
        deadline(**{name: ("int64_param", 0)})


@pytest.mark.parametrize("name", ["priority", "headers", "binary_data_output", "triton_enable_empty", "anything"])
def test_other_parameters_are_ignored(name):
    assert deadline(**{name: ("int64_param", 9)}) == 0


def test_the_helper_passes_a_budget_on():
    assert TIMEOUT_NS_PARAM == "reactant_timeout_ns"
    assert deadline_params(5) == {"reactant_timeout_ns": 5}
    assert deadline_params(2**70) == {"reactant_timeout_ns": 2**63 - 1}
    assert deadline_params(0) == deadline_params(-1) == {}


# --- imports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["rsrv.core.wire", "rsrv.core.shm", "rsrv.core"])
def test_the_module_imports_nothing_heavy_even_when_every_name_is_used(module):
    code = f"""
import importlib, sys
module = importlib.import_module({module!r})
for name in module.__all__:
    getattr(module, name)
print([name for name in ("grpc", "yaml", "pydantic", "jax", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
