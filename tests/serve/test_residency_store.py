"""Host copies of weights: the private store, and how regions of the shared one are named and laid out."""

import dataclasses
import hashlib
import mmap
import struct

import numpy as np
import pytest
from support.weight_files import Filler, source

from rsrv.bundle.safetensors import write_weights
from rsrv.core.errors import WeightsError
from rsrv.serve.residency.content import ContentToken
from rsrv.serve.residency.regions import (
    RegionHeader,
    content_token,
    digest_of,
    fnv1a_64,
    region_digest,
    region_name,
)
from rsrv.serve.residency.store import PrivateWeightStore

TENSORS = {
    "b": np.arange(7, dtype=np.float32),
    "w": np.arange(64, dtype=np.float32).reshape(4, 16),
    "scalar": np.asarray(2.5),
    "empty": np.zeros((0, 3), np.int8),
    "flag": np.array([True, False, True]),
    "last": np.arange(5, dtype=np.int16),
}


@pytest.fixture
def file(tmp_path):
    write_weights(tmp_path / "w.safetensors", list(TENSORS.items()))
    return source(tmp_path / "w.safetensors")


def write(path, *items):
    write_weights(path, list(items))
    return source(path).header


def mapped(address):
    """Whether an address belongs to a mapping of this process."""
    with open("/proc/self/maps") as maps:
        ranges = (line.split()[0].split("-") for line in maps)
        return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_a_private_copy_has_the_tensors_in_argument_order_aligned_and_read_only(file):
    copy = PrivateWeightStore().acquire("m", file, Filler(file))
    assert not copy.shared
    assert copy.nbytes == sum(value.nbytes for value in TENSORS.values())
    for array, wanted in zip(copy.arrays, TENSORS.values(), strict=True):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)
        assert array.flags.c_contiguous
        assert not array.flags.writeable
        assert array.size == 0 or array.ctypes.data % 64 == 0
    del array
    copy.release()


def test_every_private_copy_is_filled_for_itself(file):
    fill = Filler(file)
    store = PrivateWeightStore()
    copies = [store.acquire("m", file, fill) for _ in range(2)]
    assert fill.calls == 2
    assert copies[0].arrays[0].ctypes.data != copies[1].arrays[0].ctypes.data
    for copy in copies:
        copy.release()


def test_a_released_copy_is_unmapped_and_may_be_released_again(tmp_path):
    write_weights(tmp_path / "w.safetensors", [("w", np.ones(4 << 20, np.float32))])
    file = source(tmp_path / "w.safetensors")
    copy = PrivateWeightStore().acquire("m", file, Filler(file))
    address = copy.arrays[0].ctypes.data
    assert mapped(address)
    copy.release()
    assert not mapped(address)
    copy.release()


def test_a_copy_that_is_still_looked_at_stays_until_it_is_not(file):
    copy = PrivateWeightStore().acquire("m", file, Filler(file))
    array = copy.arrays[1]
    with pytest.raises(BufferError):
        copy.release()
    np.testing.assert_array_equal(array, TENSORS["w"])
    del array
    copy.release()


def test_a_fill_that_fails_raises_its_error_and_leaves_nothing_mapped(file, monkeypatch):
    made = []
    monkeypatch.setattr(
        mmap, "mmap", type("Recorded", (mmap.mmap,), {"__init__": lambda self, *_, **__: made.append(self)})
    )
    with pytest.raises(WeightsError, match="gone"):
        PrivateWeightStore().acquire("m", file, Filler(file, error=WeightsError("gone")))
    assert [mapping.closed for mapping in made] == [True]


def test_a_file_without_tensors_needs_no_memory(tmp_path):
    write_weights(tmp_path / "w.safetensors", [])
    file = source(tmp_path / "w.safetensors")
    copy = PrivateWeightStore().acquire("m", file, lambda views: pytest.fail("there is nothing to fill"))
    assert (copy.arrays, copy.nbytes) == ((), 0)
    copy.release()


# --- regions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"), [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)]
)
def test_the_hash_is_fnv_1a_of_64_bits(text, wanted):
    assert fnv1a_64(text) == wanted


def test_the_header_has_its_fields_where_the_format_says():
    header = RegionHeader(True, 0x1122334455667788, 4096, 7, 1_700_000_000_000_000_000, "modèle".encode())
    data = header.pack()
    assert len(data) == 256
    assert data[:4] == b"RSV1"
    assert struct.unpack_from("<I", data, 4) == (1,)
    assert struct.unpack_from("<Q", data, 8) == (0x1122334455667788,)
    assert struct.unpack_from("<Q", data, 16) == (4096,)
    assert struct.unpack_from("<I", data, 24) == (7,)
    assert struct.unpack_from("<Q", data, 32) == (1_700_000_000_000_000_000,)
    assert data[64:].rstrip(b"\0") == "modèle".encode()


def test_a_header_is_read_back_and_a_long_name_is_cut(tmp_path):
    header = RegionHeader(False, 5, 300, 1, 2, b"n" * 255)
    with open(tmp_path / "region", "wb+") as file:
        file.write(header.pack())
        file.flush()
        assert RegionHeader.read(file.fileno()) == dataclasses.replace(header, model=b"n" * 191)


@pytest.mark.parametrize("data", [b"", b"RSV1", bytes(256), b"RSV2" + bytes(252)])
def test_what_is_no_header_is_none(tmp_path, data):
    (tmp_path / "region").write_bytes(data)
    with open(tmp_path / "region", "rb") as file:
        assert RegionHeader.read(file.fileno()) is None


def test_the_digest_is_the_same_in_every_process_and_version(tmp_path):
    header = write(tmp_path / "w", ("w", np.zeros((2, 3), np.float32)), ("b", np.zeros(3, np.float16)))
    declared = hashlib.sha256(b";".join(hashlib.sha256(bytes(size)).hexdigest().encode() for size in (24, 6)))
    text = f"rsrvw1;0000000000000abc;{declared.hexdigest()};F32:4:2x3;F16:2:3"
    assert region_digest(header, 0xABC) == fnv1a_64(text.encode())


def test_the_content_token_has_all_that_tells_versions_of_a_file_apart():
    token = ContentToken(11, 22, 33, 44)
    assert content_token(token) == fnv1a_64(b"11:22:33:44")
    others = [dataclasses.replace(token, **{field: 55}) for field in ("inode", "size", "mtime_ns", "ctime_ns")]
    assert len({content_token(token), *map(content_token, others)}) == 5


def test_declared_digests_are_part_of_the_digest_in_argument_order(tmp_path):
    header = write(tmp_path / "w", ("w", np.zeros(3, np.float32)), ("b", np.ones(3, np.float32)))
    w, b = header.tensor_digests["w"], header.tensor_digests["b"]
    declared = [{"w": w, "b": b}, {"b": b, "w": w}, {"w": b, "b": w}, {"w": w}, {"b": b}, {"b": w}, {}]
    digests = [region_digest(dataclasses.replace(header, tensor_digests=some), 1) for some in declared]
    assert digests[0] == digests[1] == region_digest(header, 1)
    assert len(set(digests)) == 6


def test_the_digest_follows_content_and_layout_and_nothing_else(tmp_path):
    w, b = ("w", np.zeros((2, 3), np.float32)), ("b", np.zeros(3, np.float32))
    digest = region_digest(write(tmp_path / "w", w, b), 1)
    assert region_digest(write(tmp_path / "w", ("x", w[1]), ("y", b[1])), 1) == digest
    others = [
        region_digest(write(tmp_path / "w", w, b), 2),
        region_digest(write(tmp_path / "w", b, w), 1),
        region_digest(write(tmp_path / "w", w), 1),
        region_digest(write(tmp_path / "w", ("w", np.zeros((3, 2), np.float32)), b), 1),
        region_digest(write(tmp_path / "w", ("w", np.zeros((2, 3), np.int32)), b), 1),
        region_digest(dataclasses.replace(write(tmp_path / "w", w, b), column_major=True), 1),
    ]
    assert len({digest, *others}) == 7


def test_names_lead_back_to_digests():
    assert region_name(0xABC) == "rsrvw-0000000000000abc"
    assert digest_of("rsrvw-0000000000000abc") == digest_of("rsrvw-0000000000000abc.lock") == 0xABC
    for name in ("rsrvw-abc", "rsrvw-0000000000000abg", "rsw-0000000000000abc", "rsrvw-0000000000000abc.lock2"):
        assert digest_of(name) is None
