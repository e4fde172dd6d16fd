"""What is carved from a slot: alignment, bounds, disjointness, and the end of its life."""

import random
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from rsrv.core.dtypes import DType
from rsrv.core.errors import UsageError
from rsrv.core.shm.pool import BufferPool


@pytest.fixture(params=["shm", "inline"])
def pool(request):
    with BufferPool(4 * 1024, n_slots=4, use_shm=request.param == "shm") as pool:
        yield pool


@pytest.fixture
def slot(pool):
    """The second slot, so that offsets of the slot and of the region differ."""
    with pool.acquire(), pool.acquire() as slot:
        yield slot


def test_parts_start_on_64_bytes_and_padding_counts(slot):
    parts = [slot.subslot(n) for n in (1, 64, 65, 0, 10)]
    assert [part.offset - 1024 for part in parts] == [0, 64, 128, 256, 256]
    assert [part.capacity for part in parts] == [1, 64, 65, 0, 10]
    assert slot.cursor == 266
    assert {(part.index, part.span, part.cursor, part.pool) for part in parts} == {(None, 0, 0, slot.pool)}


@pytest.mark.parametrize(("taken", "wanted", "left"), [(0, 1025, 1024), (1, 961, 960), (1000, 1, 0), (1024, 1, 0)])
def test_more_than_is_left_is_refused_with_how_much_that_is(slot, taken, wanted, left):
    slot.subslot(taken)
    with pytest.raises(UsageError, match=f"cannot carve {wanted} bytes from a slot of 1024: {left} are left") as caught:
        slot.subslot(wanted)
    assert "item_input_bytes" in caught.value.hint
    assert slot.cursor == taken


def test_nothing_can_be_carved_from_a_full_slot(slot):
    slot.subslot(1024)
    assert slot.subslot(0).capacity == 0
    assert slot.view(np.uint8, 0).size == 0


def test_a_negative_size_is_refused(slot):
    with pytest.raises(UsageError, match="negative"):
        slot.subslot(-1)


def test_after_a_reset_the_slot_is_carved_from_its_start(slot):
    first = slot.subslot(100)
    slot.reset()
    assert slot.cursor == 0
    assert slot.subslot(100).offset == first.offset


def test_parts_of_parts_have_a_cursor_of_their_own(slot):
    slot.subslot(10)
    part = slot.subslot(200)
    inner = part.subslot(64), part.subslot(64)
    assert [child.offset - part.offset for child in inner] == [0, 64]
    assert (part.cursor, slot.cursor) == (128, 264)
    with pytest.raises(UsageError, match="72 are left"):
        part.subslot(100)


def test_a_view_writes_into_the_region(pool, slot):
    view = slot.view(np.float32, (2, 3))
    view[:] = [[1, 2, 3], [4, 5, 6]]
    assert view.flags.c_contiguous
    assert view.flags.writeable
    assert view.flags.aligned
    written = bytes(pool.memory[1024 : 1024 + 24])
    assert written == np.array([1, 2, 3, 4, 5, 6], np.float32).tobytes()
    if pool.region is not None:
        with open(f"/dev/shm/{pool.region_name}", "rb") as file:
            assert file.read()[1024 : 1024 + 24] == written


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float16, np.float16),
        ("<i8", np.int64),
        (DType.BF16, ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (DType.BOOL, np.bool_),
        (np.dtype(np.uint8), np.uint8),
    ],
)
def test_a_dtype_is_ours_or_whatever_numpy_takes(slot, dtype, expected):
    view = slot.view(dtype, 8)
    assert (view.dtype, view.shape) == (np.dtype(expected), (8,))


@pytest.mark.parametrize("shape", [(), 5, np.int64(5), (5,), [2, 3], (0, 7), (1,) * 20])
def test_a_shape_is_an_integer_or_a_sequence(slot, shape):
    view = slot.view(np.int16, shape)
    assert view.shape == np.empty(shape).shape


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [
        (np.float32, (257,), r"f32\[257\] takes 1028 bytes, the slot has 1024"),
        (np.uint8, (2**62, 2**62), "takes"),  # the product wraps in 64 bits
        (np.float64, (2**61,), "takes"),
        (np.uint8, (-1,), "negative extent"),
        (np.uint8, (-2, -2), "negative extent"),
        (object, (1,), "no bytes of its own"),
        (np.dtype([("a", object)]), (1,), "no bytes of its own"),
        ("S0", (1,), "no bytes of its own"),
    ],
)
def test_an_array_that_cannot_lie_there_is_refused(slot, dtype, shape, text):
    with pytest.raises(UsageError, match=text):
        slot.view(dtype, shape)
    with pytest.raises(UsageError):
        slot.scratch(shape, dtype)
    assert slot.cursor == 0


def test_a_fractional_extent_is_a_type_error(slot):
    with pytest.raises(TypeError):
        slot.view(np.uint8, (1.5,))


def test_scratch_carves_one_array_or_several_in_order(slot):
    one = slot.scratch((3, 5), np.float64)
    assert (one.shape, one.dtype, slot.cursor) == ((3, 5), np.float64, 120)
    two = slot.scratch([((2, 2), np.uint8), (7, DType.F32), ((), np.int64)])
    assert [(array.shape, array.dtype.name) for array in two] == [((2, 2), "uint8"), ((7,), "float32"), ((), "int64")]
    assert slot.cursor == 256 + 8
    assert slot.scratch([]) == []


def test_when_one_of_several_does_not_fit_nothing_is_carved(slot):
    slot.subslot(3)
    with pytest.raises(UsageError, match="left"):
        slot.scratch([(500, np.uint8), (500, np.uint8)])
    assert slot.cursor == 3


@pytest.mark.parametrize("seed", range(8))
def test_arrays_carved_in_any_mixture_are_disjoint_and_keep_what_was_written(seed):
    rng = random.Random(seed)
    dtypes = [np.uint8, np.float16, np.float32, np.int64, ml_dtypes.bfloat16, np.complex128]
    with BufferPool(1 << 16, n_slots=1, use_shm=False) as pool, pool.acquire() as slot:
        arrays = []
        while True:
            shape = tuple(rng.randrange(0, 9) for _ in range(rng.randrange(0, 4)))
            try:
                arrays.append(slot.scratch(shape, rng.choice(dtypes)))
            except UsageError:
                break
        for i, array in enumerate(arrays):
            array[...] = np.full(array.shape, i % 100).astype(array.dtype)
        for i, array in enumerate(arrays):
            assert (array == np.asarray(i % 100).astype(array.dtype)).all()
            assert array.ctypes.data % 64 == 0 or not array.size
        ranges = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays if array.size)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert len(arrays) > 20


def test_a_released_slot_and_its_parts_refuse_every_use(pool):
    slot = pool.acquire()
    part = slot.subslot(64)
    assert slot.live
    assert part.live
    slot.release()
    for use in (
        lambda: slot.view(np.uint8, 1),
        lambda: part.view(np.uint8, 1),
        lambda: slot.subslot(1),
        lambda: part.subslot(1),
        lambda: slot.scratch(1, np.uint8),
    ):
        with pytest.raises(UsageError, match="was released"):
            use()
    assert not slot.live
    assert not part.live
    with pool.acquire() as other:
        assert other.index == slot.index  # the same memory: the old handle still refuses
        with pytest.raises(UsageError, match="was released"):
            part.view(np.uint8, 1)


def test_releasing_a_part_does_nothing(pool):
    with pool.acquire() as slot:
        with slot.subslot(64) as part:
            part.view(np.uint8, 64)
        part.release()
        assert slot.live
        assert pool.free == 3
    assert pool.free == 4


def test_the_end_of_the_block_releases_what_was_not_released_before(pool):
    with pool.acquire():
        assert pool.free == 3
    assert pool.free == 4
    with pool.acquire() as slot:
        slot.release(reusable=False)
    assert (pool.free, pool.withdrawn) == (3, 1)
    with pytest.raises(KeyError), pool.acquire():
        raise KeyError
    assert pool.free == 3


def test_a_slot_says_what_it_is(pool):
    with pool.acquire() as slot:
        part = slot.subslot(10)
        assert "slot 0" in repr(slot)
        assert "1024 bytes at 0" in repr(slot)
        assert "released" not in repr(slot)
        assert "part" in repr(part)
    assert "released" in repr(slot)
