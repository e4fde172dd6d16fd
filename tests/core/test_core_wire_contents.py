"""Typed contents: every datatype, range checks and counts, and agreement with protobuf's own view of the elements."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.core.dtypes import DType
from rsrv.core.errors import InvalidRequest
from rsrv.core.wire import parse_request
from rsrv.core.wire.contents import from_contents
from rsrv.protos import inference

TYPED = [dtype for dtype in DType if dtype.typed_field]


def decode(datatype, shape, contents, suffix=b""):
    """The array of an input whose serialized ``InferTensorContents`` is `contents` followed by `suffix`."""
    request = inference.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    tensor.contents.MergeFromString(inference.InferTensorContents(**contents).SerializeToString() + suffix)
    (tensor,) = parse_request(request.SerializeToString()).tensors(None)
    return tensor.data


def elements(dtype):
    if dtype is DType.BOOL:
        return st.booleans()
    if dtype in (DType.F32, DType.F64):
        return st.floats(width=8 * dtype.itemsize)
    limits = np.iinfo(dtype.numpy)
    return st.integers(int(limits.min), int(limits.max))


@pytest.mark.parametrize("dtype", TYPED)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_elements_arrive_as_they_were_sent(dtype, data):
    values = data.draw(st.lists(elements(dtype), max_size=50))
    array = decode(dtype.wire, [len(values)], {dtype.typed_field: values})
    assert array.dtype == dtype.numpy
    np.testing.assert_array_equal(array, np.array(values, dtype.numpy))
    assert not array.flags.writeable


@pytest.mark.parametrize("shape", [[], [1], [2, 3], [0, 4]])
def test_elements_are_in_row_major_order_and_their_count_is_that_of_the_shape(shape):
    n = int(np.prod(shape))
    array = decode("INT16", shape, {"int_contents": range(n)})
    assert array.shape == tuple(shape)
    assert array.ravel().tolist() == list(range(n))


@pytest.mark.parametrize("dtype", TYPED)
def test_large_contents_arrive_whole(dtype):
    values = np.random.default_rng(3).integers(0, 100, 150_528).astype(dtype.numpy)
    array = decode(dtype.wire, [3, 224, 224], {dtype.typed_field: values.tolist()})
    np.testing.assert_array_equal(array, values.reshape(3, 224, 224))


@pytest.mark.parametrize(
    ("datatype", "field", "good", "bad"),
    [
        ("INT8", "int_contents", [-128, 127], [128, -129, 2**31 - 1, -(2**31)]),
        ("INT16", "int_contents", [-32768, 32767], [32768, -32769]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1], []),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1], []),
        ("UINT8", "uint_contents", [0, 255], [256, 2**32 - 1]),
        ("UINT16", "uint_contents", [0, 65535], [65536]),
        ("UINT32", "uint_contents", [0, 2**32 - 1], []),
        ("UINT64", "uint64_contents", [0, 2**64 - 1], []),
    ],
)
def test_narrow_integers_are_range_checked(datatype, field, good, bad):
    assert decode(datatype, [len(good)], {field: good}).tolist() == good
    for value in bad:
        with pytest.raises(InvalidRequest, match=f"input 'x': typed contents of {datatype} hold {value}, outside"):
            decode(datatype, [3], {field: [1, value, 2]})


@pytest.mark.parametrize(("n", "shape"), [(5, [2, 3]), (7, [2, 3]), (0, [1]), (1, [0]), (2, [])])
def test_a_count_other_than_that_of_the_shape_is_refused(n, shape):
    wanted = int(np.prod(shape))
    with pytest.raises(InvalidRequest, match=f"takes {wanted} elements, got {n}"):
        decode("FP32", shape, {"fp32_contents": [1.0] * n})


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_16_bit_floats_have_no_typed_form_and_the_error_says_what_to_use(datatype):
    with pytest.raises(InvalidRequest, match=f"input 'x': {datatype} has no typed contents") as caught:
        decode(datatype, [1], {"fp32_contents": [1.0]})
    assert "raw contents" in caught.value.hint


def test_bytes_are_refused():
    with pytest.raises(InvalidRequest, match="'BYTES' is not supported"):
        decode("BYTES", [1], {"bytes_contents": [b"x"]})


def test_elements_in_the_field_of_another_datatype_are_refused_by_name():
    with pytest.raises(InvalidRequest, match="typed contents of FP64 go into fp64_contents only, got fp32_contents"):
        decode("FP64", [1], {"fp32_contents": [1.0]})
    with pytest.raises(InvalidRequest, match="int_contents, int64_contents"):
        decode("INT32", [1], {"int_contents": [1], "int64_contents": [1]})


@pytest.mark.parametrize("shape", [[-1], [2**62, 4], [2**63 - 1]])
def test_hostile_shapes_are_refused(shape):
    with pytest.raises(InvalidRequest, match=r"negative extent|overflows"):
        decode("FP64", shape, {"fp64_contents": [1.0]})


@pytest.mark.parametrize(
    ("datatype", "encoded"),
    [
        ("INT32", b"\x10\x01\x10\x02\x12\x01\x03"),  # two single elements, then a packed run
        ("UINT8", b"\x22\x02\x01\x02\x20\x03"),
        ("BOOL", b"\x08\x01\x0a\x02\x01\x01"),
        ("INT64", b"\x1a\x02\x01\x02\x1a\x01\x03"),  # two packed runs
    ],
)
def test_packed_and_single_elements_mix(datatype, encoded):
    unknown = b"\x7a\x03abc"
    expected = [True] * 3 if datatype == "BOOL" else [1, 2, 3]
    assert decode(datatype, [3], {}, encoded).tolist() == expected
    assert decode(datatype, [3], {}, unknown + encoded + unknown).tolist() == expected


def test_bool_elements_that_travel_as_other_numbers_are_true():
    assert decode("BOOL", [3], {}, b"\x0a\x04\x02\xff\x01\x00").view(np.uint8).tolist() == [1, 1, 0]


def test_an_int32_that_travels_with_more_bits_is_cut_as_protobuf_cuts_it():
    encoded = b"\x10\x81\x80\x80\x80\x10"  # 2^32 + 1
    assert inference.InferTensorContents.FromString(encoded).int_contents == [1]
    assert decode("INT32", [1], {}, encoded).tolist() == [1]


@settings(deadline=None, max_examples=300)
@given(contents=st.binary(max_size=60), dtype=st.sampled_from(TYPED))
def test_whatever_protobuf_accepts_is_read_as_protobuf_reads_it(contents, dtype):
    try:
        message = inference.InferTensorContents.FromString(contents)
    except Exception:
        return
    expected = list(getattr(message, dtype.typed_field))
    try:
        array = from_contents(message, dtype)
    except InvalidRequest:
        others = [field.name for field, _ in message.ListFields() if field.name != dtype.typed_field]
        assert others or any(value != np.array(value).astype(dtype.numpy) for value in expected)
        return
    np.testing.assert_array_equal(array, np.array(expected, dtype.numpy))
