"""What users carve from a slot and declare: shapes, dtypes, alignment, and every way to get it wrong."""

import ml_dtypes
import numpy as np
import pytest

from rsrv.client import InferenceIO, OutputSpec, PoolInferInput, pool_view, scratch
from rsrv.core.errors import UsageError
from rsrv.core.shm.pool import BufferPool


@pytest.fixture
def slot():
    with BufferPool(1 << 12, n_slots=1, use_shm=False) as pool, pool.acquire() as lent:
        yield lent


def test_scratch_carves_one_input_that_pool_view_writes(slot):
    one = scratch(slot, "x", (3, 4), np.float32)
    view = pool_view(one)
    view[:] = np.arange(12).reshape(3, 4)
    assert (one.name, one.shape, one.dtype, one.nbytes) == ("x", (3, 4), np.float32, 48)
    np.testing.assert_array_equal(pool_view(one), np.arange(12).reshape(3, 4))


def test_scratch_carves_several_inputs_in_order_each_at_a_multiple_of_64(slot):
    inputs = scratch(slot, {"a": (5, np.uint8), "b": ((2, 3), np.float64), "c": ((2,), ml_dtypes.bfloat16)})
    assert [one.name for one in inputs] == ["a", "b", "c"]
    assert [one.subslot.offset - slot.offset for one in inputs] == [0, 64, 128]
    a, b, c = pool_view(*inputs)
    assert (a.shape, b.shape, c.dtype) == ((5,), (2, 3), ml_dtypes.bfloat16)


def test_scratch_says_what_is_left_when_a_slot_is_too_small(slot):
    scratch(slot, "a", (1000,), np.float32)
    with pytest.raises(UsageError, match="64 are left") as caught:
        scratch(slot, "b", (100,), np.float32)
    assert "item_input_bytes" in caught.value.hint


@pytest.mark.parametrize("dtype", [object, "U4", np.complex64, ml_dtypes.float8_e5m2])
def test_a_dtype_that_cannot_travel_is_refused_by_name(slot, dtype):
    with pytest.raises(UsageError, match="input 'x'"):
        scratch(slot, "x", (1,), dtype)
    with pytest.raises(UsageError, match="output 'y'"):
        OutputSpec("y", dtype, (1,))


def test_extents_below_zero_are_refused(slot):
    with pytest.raises(UsageError, match="input 'x'"):
        scratch(slot, "x", (2, -1), np.float32)
    with pytest.raises(UsageError, match="output 'y'"):
        OutputSpec("y", np.float32, (-1,))


@pytest.mark.parametrize("extents", [2.5, (2.0, 3), ("2",), np.array([2, 3])])
def test_extents_that_are_no_whole_numbers_are_refused_rather_than_cut_off(slot, extents):
    with pytest.raises(UsageError, match=r"input 'x' has the extents .*; wanted whole numbers"):
        scratch(slot, "x", extents, np.float32)
    with pytest.raises(UsageError, match="output 'y'"):
        OutputSpec("y", np.float32, extents)


def test_a_descriptor_by_hand_must_fit_its_part(slot):
    part = slot.subslot(64)
    assert PoolInferInput("x", part, (4, 4), np.float32).nbytes == 64
    with pytest.raises(UsageError, match="takes 68 bytes, its slot has 64"):
        PoolInferInput("x", part, 17, np.float32)


def test_an_output_spec_knows_the_bytes_of_an_item():
    assert OutputSpec("y", "float16", (2, 3)).item_bytes == 12
    assert OutputSpec("label", np.int64).item_bytes == 8
    assert OutputSpec("v", np.uint8, 7).per_item_dims == (7,)
    assert OutputSpec("y", np.float32, [2]) == OutputSpec("y", np.dtype("float32"), (2,))


def test_an_io_declares_no_outputs_by_default():
    class Nothing(InferenceIO):
        def __len__(self):
            return 0

        def item_input_bytes(self):
            return 1

        def encode_chunk(self, rows, slot):
            raise AssertionError

        def decode_chunk(self, rows, response):
            raise AssertionError

    assert list(Nothing().output_specs()) == []
