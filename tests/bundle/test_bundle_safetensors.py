"""The weights file: hostile headers, the stock library in both directions, and the aligned layout."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.bundle.safetensors import MAX_HEADER_BYTES, MAX_TENSORS, ordered, read_header, write_weights
from rsrv.core.dtypes import DType
from rsrv.core.errors import Code, WeightsError


def raw(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(begin: object, end: object, dtype: object = "F32", shape: object = ...) -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is ... else shape, "data_offsets": [begin, end]}


def meta(*order: str, **more: str) -> dict[str, str]:
    return {"argument_order": json.dumps(order), **more}


GOOD = {"__metadata__": meta("b", "a"), "a": tensor(0, 8), "b": tensor(8, 16, shape=[2, 1])}


@pytest.fixture
def weights(tmp_path):
    def write(content: bytes):
        path = tmp_path / "weights.safetensors"
        path.write_bytes(content)
        return path

    return write


def refused(path, rule: str, *named: str) -> WeightsError:
    with pytest.raises(WeightsError) as raised:
        read_header(path)
    assert raised.value.rule == rule
    assert (raised.value.code, raised.value.reason) == (Code.FAILED_PRECONDITION, "weights")
    for word in (*named, "weights.safetensors"):
        assert word in raised.value.message
    return raised.value


def test_a_header_is_read_in_both_orders(weights):
    header = read_header(weights(raw(GOOD, bytes(16))))
    assert list(header.tensors) == ["a", "b"]
    assert [entry.name for entry in ordered(header)] == ["b", "a"]
    b = header.tensors["b"]
    assert (b.dtype, b.shape, b.begin, b.end, b.nbytes) == (DType.F32, (2, 1), 8, 16, 8)
    assert header.data_offset + header.data_bytes == os.path.getsize(weights(raw(GOOD, bytes(16))))
    assert header.tensor_digests == {}


def test_a_header_is_read_from_a_descriptor_whose_position_stays(weights):
    with open(weights(raw(GOOD, bytes(16))), "rb") as file:
        file.seek(3)
        assert read_header(file.fileno()) == read_header(file.name)
        assert file.tell() == 3


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "0 bytes hold no header length"),
        (b"\x01\x00\x00", "3 bytes hold no header length"),
        (raw({}, length=2**60), f"header length is {2**60}; at most"),
        (raw({}, length=2**64 - 1), "header length is 18446744073709551615"),
        (raw({}, length=MAX_HEADER_BYTES + 1), f"{MAX_HEADER_BYTES + 1}; at most"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "this is a pointer of Git LFS"),
        (raw({}, length=3), "header length is 3, but the file has 10 bytes"),
        (raw({}, length=MAX_HEADER_BYTES), "but the file has 10 bytes"),
        (raw(b""), "not JSON"),
        (raw(b"{"), "not JSON"),
        (raw(b"{}x"), "not JSON"),
        (raw(b"\xff\xfe"), "not UTF-8 at byte 0"),
        (raw([]), "must be a JSON object, got a list"),
        (raw(b"[" * 100_000), "nested too deeply"),
        (raw(b'{"a":' * 100_000), "nested too deeply"),
        (raw(b'{"a": NaN}'), "contains NaN"),
        (raw(b'{"a": Infinity}'), "contains Infinity"),
        (raw(b'{"a": {}, "a": {}}'), "key 'a' twice"),
        (raw(b'{"__metadata__": {}, "__metadata__": {}}'), "'__metadata__' twice"),
        (raw(b'{"a": {"dtype": "F32", "dtype": "F32"}}'), "key 'dtype' twice"),
        (raw(b'{"a": {"shape": [' + b"1" * 5000 + b"]}}"), "not JSON"),
        (raw({"__metadata__": []}), "__metadata__ must be an object"),
        (raw({"__metadata__": {"format": 1}}), "__metadata__['format']"),
        (raw({"a": []}), "tensor 'a' must have exactly dtype, shape and data_offsets"),
        (raw({"a": {"dtype": "F32", "shape": []}}), "tensor 'a' must have exactly"),
        (raw({"a": tensor(0, 4) | {"x": 1}}, bytes(4)), "tensor 'a' must have exactly"),
        (raw(b'{"\\ud800": {}}'), "not valid Unicode"),
        (raw({"a": tensor(0, 4, "F33")}, bytes(4)), "'a': dtype 'F33'"),
        (raw({"a": tensor(0, 4, "f32")}, bytes(4)), "'a': dtype 'f32'"),
        (raw({"a": tensor(0, 4, ["F32"])}, bytes(4)), "'a': dtype ['F32']"),
        (raw({"a": tensor(0, 4, None)}, bytes(4)), "'a': dtype None"),
        (raw({"a": tensor(0, 4, shape="1")}, bytes(4)), "'a': shape '1'"),
        (raw({"a": tensor(0, 4, shape=[-1])}, bytes(4)), "'a': shape [-1]"),
        (raw({"a": tensor(0, 4, shape=[1.0])}, bytes(4)), "'a': shape [1.0]"),
        (raw({"a": tensor(0, 4, shape=[True])}, bytes(4)), "'a': shape [True]"),
        (raw({"a": tensor(0, 4, shape=[1] * 65)}, bytes(4)), "'a': 65 axes"),
        (raw({"a": tensor(0, 4, shape=[2**62, 2**62])}, bytes(4)), "overflows"),
        (raw({"a": tensor(0, 0, shape=[0, 2**62])}), "overflows"),
        (raw({"a": tensor(0, 4, shape=[2**64, 0])}, bytes(4)), "overflows"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4.0]}}, bytes(4)), "data_offsets [0, 4.0]"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4)), "data_offsets [0]"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": 4}}, bytes(4)), "data_offsets 4"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [False, 4]}}, bytes(4)), "[False, 4]"),
        (raw({"a": tensor(-4, 0, shape=[1])}, bytes(4)), "data_offsets [-4, 0]"),
        (raw({"a": tensor(4, 0, shape=[1])}, bytes(4)), "[4, 0] lie outside"),
        (raw({"a": tensor(0, 8)}, bytes(4)), "[0, 8] lie outside of the 4 bytes"),
        (raw({"a": tensor(2**63, 2**63 + 4)}, bytes(4)), "lie outside"),
        (raw({"a": tensor(0, 4, shape=[2])}, bytes(4)), "hold 4 bytes; F32 [2] needs 8"),
        (raw({"a": tensor(0, 4, "F64", [1])}, bytes(4)), "F64 [1] needs 8"),
        (raw({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)), "tensor 'b' begins at byte 4 of the data, want 8"),
        (raw({"a": tensor(0, 4), "b": tensor(8, 12)}, bytes(12)), "tensor 'b' begins at byte 8 of the data, want 4"),
        (raw({"a": tensor(4, 8)}, bytes(8)), "tensor 'a' begins at byte 4 of the data, want 0"),
        (raw({"a": tensor(0, 4)}, bytes(5)), "end at byte 4, but the file holds 5"),
        (raw({"a": tensor(0, 4), "b": tensor(0, 4)}, bytes(4)), "tensor 'b' begins at byte 0 of the data, want 4"),
        (raw({}, bytes(1)), "end at byte 0, but the file holds 1"),
    ],
)
def test_a_hostile_file_is_refused_with_a_reason(weights, content, named):
    refused(weights(content), "B-60", named)


def test_a_header_above_the_limit_is_refused_without_allocating_it(weights):
    path = weights(raw({}, length=MAX_HEADER_BYTES + 8))
    os.truncate(path, MAX_HEADER_BYTES * 2)
    tracemalloc.start()
    try:
        refused(path, "B-60", str(MAX_HEADER_BYTES + 8))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("metadata", "rule", "named"),
    [
        ({}, "B-59", "argument_order is missing, but there are 1 tensors"),
        (meta(), "B-59", "'a' is not in metadata argument_order"),
        (meta("a", "b"), "B-59", "'b', which is not in the file"),
        (meta("a", "a"), "B-59", "'a' twice"),
        ({"argument_order": '{"a": 1}'}, "B-59", "must be a list of names"),
        ({"argument_order": "[1]"}, "B-59", "must be a list of names, got [1]"),
        ({"argument_order": "a"}, "B-60", "argument_order is not JSON"),
        (meta("a", tensor_digests="[]"), "B-58a", "tensor_digests must be an object"),
        (meta("a", tensor_digests='{"z": "0"}'), "B-58a", "'z', which is not in the file"),
        (meta("a", tensor_digests='{"a": "0"}'), "B-58a", "tensor_digests['a'] is '0'"),
        (meta("a", tensor_digests='{"a": 0}'), "B-58a", "tensor_digests['a'] is 0"),
        (meta("a", tensor_digests='{"a": "0", "a": "0"}'), "B-60", "'a' twice"),
    ],
)
def test_bad_metadata_is_refused_with_its_rule(weights, metadata, rule, named):
    refused(weights(raw({"__metadata__": metadata, "a": tensor(0, 4)}, bytes(4))), rule, named)


def test_a_file_without_tensors_needs_no_order(weights):
    assert read_header(weights(raw({}))).argument_order == ()
    assert read_header(weights(raw({"__metadata__": {"format": "np"}}))).tensors == {}


def test_more_tensors_than_a_program_has_arguments_are_refused_early(weights, tmp_path):
    many = {f"t{i}": tensor(0, 0, shape=[0]) for i in range(MAX_TENSORS + 2)}
    refused(weights(raw(many)), "B-60", f"header has more than {MAX_TENSORS} tensors")
    with pytest.raises(WeightsError, match=f"{MAX_TENSORS + 1} tensors; at most {MAX_TENSORS}"):
        write_weights(tmp_path / "w", [(f"t{i}", np.zeros(0, np.float32)) for i in range(MAX_TENSORS + 1)])


def test_a_missing_file_or_a_directory_is_refused(tmp_path):
    refused(tmp_path / "weights.safetensors", "B-58", "cannot be opened")
    (tmp_path / "weights.safetensors").mkdir()
    refused(tmp_path / "weights.safetensors", "B-58", "is not a regular file")


HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BOOL", "BF16", "F8_E4M3", "nope"]),
            "shape": st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**40]), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 24), min_size=2, max_size=2),
        }
    )
    | st.just(meta("a"))
    | st.just(meta("b", "a")),
    max_size=3,
)


@settings(deadline=None, max_examples=300)
@given(header=HEADERS | st.binary(max_size=40), data=st.integers(0, 24), length=st.none() | st.integers(0, 2**64 - 1))
def test_whatever_the_file_holds_the_reader_refuses_it_or_covers_the_data_exactly(
    tmp_path_factory, header, data, length
):
    path = tmp_path_factory.mktemp("fuzz") / "weights.safetensors"
    path.write_bytes(raw(header, bytes(data), length=length))
    try:
        found = read_header(path)
    except WeightsError:
        return
    size = path.stat().st_size
    assert found.data_offset + found.data_bytes == size
    reached = 0
    for entry in found.tensors.values():
        assert entry.begin == reached
        assert entry.nbytes == int(np.prod(entry.shape, dtype=object)) * entry.dtype.itemsize
        reached = entry.end
    assert reached == found.data_bytes
    assert sorted(found.argument_order) == sorted(found.tensors)


# --- writing ------------------------------------------------------------------------------------------------------

ITEMS = [
    ("odd", np.arange(3, dtype=np.int8)),
    ("big", np.arange(32, dtype=np.float32).reshape(4, 8)),
    ("scalar", np.array(2.5, dtype=np.float64)),
    ("empty", np.zeros((0, 3), dtype=np.int64)),
    ("flags", np.array([True, False, True])),
    ("half", np.arange(64, dtype=np.float16)),
    ("brain", np.arange(5).astype(ml_dtypes.bfloat16)),
]


def test_the_layout_is_aligned_and_keeps_the_argument_order(tmp_path):
    path = tmp_path / "weights.safetensors"
    write_weights(path, ITEMS)
    header = read_header(path)
    assert header.argument_order == tuple(name for name, _ in ITEMS)
    assert header.data_offset % 64 == 0
    assert list(header.tensors) == ["big", "empty", "half", "odd", "scalar", "flags", "brain"]
    content = path.read_bytes()
    for name, array in ITEMS:
        entry = header.tensors[name]
        body = content[header.data_offset + entry.begin : header.data_offset + entry.end]
        assert body == array.tobytes()
        assert (entry.dtype, entry.shape) == (DType.from_numpy(array.dtype), array.shape)
        assert header.tensor_digests[name] == hashlib.sha256(body).hexdigest()
        if array.nbytes % 64 == 0:
            assert (header.data_offset + entry.begin) % 64 == 0


def test_the_stock_library_reads_what_is_written_here(tmp_path):
    path = tmp_path / "weights.safetensors"
    write_weights(path, ITEMS)
    loaded = safetensors.numpy.load_file(path)
    assert set(loaded) == {name for name, _ in ITEMS}
    for name, array in ITEMS:
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        np.testing.assert_array_equal(loaded[name], array)
    with safetensors.safe_open(path, framework="np") as file:
        assert json.loads(file.metadata()["argument_order"]) == [name for name, _ in ITEMS]
        assert set(json.loads(file.metadata()["tensor_digests"])) == set(loaded)


def test_the_stock_library_reads_an_empty_file_of_ours(tmp_path):
    path = tmp_path / "weights.safetensors"
    write_weights(path, [])
    assert safetensors.numpy.load_file(path) == {}
    assert read_header(path).argument_order == ()


@pytest.mark.parametrize("dtype", list(DType))
def test_what_the_stock_library_writes_is_read_here(tmp_path, dtype):
    path = tmp_path / "weights.safetensors"
    array = np.arange(6).reshape(2, 3).astype(dtype.numpy)
    spec = safetensors.TensorSpec(
        dtype=dtype.numpy.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
    )
    path.write_bytes(bytes(safetensors.serialize({"w": spec}, metadata=meta("w"))))
    header = read_header(path)
    entry = header.tensors["w"]
    assert (entry.dtype, entry.shape) == (dtype, (2, 3))
    begin = header.data_offset + entry.begin
    assert path.read_bytes()[begin : begin + entry.nbytes] == array.tobytes()


def test_many_tensors_of_the_stock_library_are_read_in_its_own_order(tmp_path):
    path = tmp_path / "weights.safetensors"
    arrays = {f"t{i}": np.full((i,), i, dtype=[np.float32, np.int8, np.float64][i % 3]) for i in range(9)}
    safetensors.numpy.save_file(arrays, path, metadata=meta(*arrays))
    header = read_header(path)
    assert header.argument_order == tuple(arrays)
    content = path.read_bytes()
    for name, array in arrays.items():
        entry = header.tensors[name]
        assert content[header.data_offset + entry.begin : header.data_offset + entry.end] == array.tobytes()


def test_equal_weights_give_equal_bytes_whatever_their_memory_layout(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_weights(tmp_path / "a", [("w", array)])
    write_weights(tmp_path / "b", [("w", np.asfortranarray(array))])
    write_weights(tmp_path / "c", [("w", array.astype(">f4"))])
    write_weights(tmp_path / "d", [("w", np.repeat(array, 2, axis=1)[:, ::2])])
    assert len({(tmp_path / name).read_bytes() for name in "abcd"}) == 1


@pytest.mark.parametrize(
    ("items", "rule", "named"),
    [
        ([("w", np.zeros(1)), ("w", np.zeros(1))], "X-6", "'w'"),
        ([("__metadata__", np.zeros(1))], "X-6", "'__metadata__'"),
        ([("", np.zeros(1))], "X-6", "''"),
        ([("\ud800", np.zeros(1))], "X-6", "ud800"),
        ([("c", np.zeros(1, dtype=np.complex64))], "B-58", "'c': dtype complex64"),
        ([("o", np.array([None]))], "B-58", "'o': dtype object"),
        ([("s", np.array(["a"]))], "B-58", "'s'"),
    ],
)
def test_weights_that_no_file_can_hold_are_refused(tmp_path, items, rule, named):
    with pytest.raises(WeightsError) as raised:
        write_weights(tmp_path / "w", items)
    assert raised.value.rule == rule
    assert named in raised.value.message
    assert not (tmp_path / "w").exists()


ARRAYS = st.builds(
    lambda dtype, shape: np.arange(int(np.prod(shape))).reshape(shape).astype(dtype.numpy),
    st.sampled_from(list(DType)),
    st.lists(st.integers(0, 9), max_size=3),
)


@settings(deadline=None, max_examples=60)
@given(
    items=st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6), ARRAYS, max_size=6
    )
)
def test_every_set_of_arrays_survives_writing_and_reading(tmp_path_factory, items):
    path = tmp_path_factory.mktemp("round") / "weights.safetensors"
    write_weights(path, list(items.items()))
    header = read_header(path)
    content = path.read_bytes()
    assert header.argument_order == tuple(items)
    for entry in ordered(header):
        body = content[header.data_offset + entry.begin : header.data_offset + entry.end]
        assert body == items[entry.name].tobytes()
        assert entry.shape == items[entry.name].shape
    # The stock library of this version has no name for one of the numpy dtypes, so it only checks the file.
    with safetensors.safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(items)


@pytest.mark.parametrize(
    "content",
    [
        raw({"a": tensor(0, 4, shape=[10**4000] * 60)}, bytes(4)),
        raw({"a": tensor(0, 10**4000)}, bytes(4)),
        raw({"a": [[]] * 100_000}),
        raw({"a": tensor(0, 4, "F" * 100_000)}, bytes(4)),
        raw({"__metadata__": {"k" * 100_000: 1}}),
        raw({"n" * 100_000: tensor(0, 3)}, bytes(4)),
    ],
)
def test_a_refusal_quotes_the_beginning_of_a_huge_value(weights, content):
    with pytest.raises(WeightsError) as raised:
        read_header(weights(content))
    assert len(raised.value.message) < 3000
