"""How many items go into a request: the table of the specification, and what holds for any sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.client.dataset.geometry import Geometry, chunk_geometry
from rsrv.core.errors import UsageError


def geometry(input_bytes, output_bytes=(), *, slot=1024, slots=4, limit=64, **more):
    return chunk_geometry(input_bytes, output_bytes, slot_bytes=slot, n_slots=slots, max_batch_size=limit, **more)


@pytest.mark.parametrize(
    ("item_bytes", "limit", "chunk", "span"),
    [(16, 64, 64, 1), (2000, 64, 1, 2), (1025, 64, 1, 2), (2049, 64, 1, 3), (16, 3, 3, 1)],
)
def test_the_table_of_the_specification(item_bytes, limit, chunk, span):
    found = geometry(item_bytes, limit=limit)
    assert (found.chunk, found.span) == (chunk, span)
    assert found.window == max(1, 4 // span)


def test_an_item_larger_than_the_pool_is_an_error_with_all_sizes():
    with pytest.raises(UsageError) as caught:
        geometry(5000, (64,))
    for number in ("5000", "64", "4 slots", "1024", "4096"):
        assert number in caught.value.message
    assert "pool_bytes" in caught.value.hint


def test_outputs_share_the_slot_in_shared_memory():
    assert geometry(16).chunk == 64
    assert geometry(16, (16,), slots=1).chunk == 32
    assert geometry(8, (4, 4), slots=1).chunk == 64


def test_more_slots_are_taken_to_reach_the_limit_but_two_chunks_have_room():
    assert geometry(100, slots=8, limit=10) == Geometry(10, 1, 8)
    assert geometry(100, slots=8, limit=20) == Geometry(20, 2, 4)
    assert geometry(100, slots=8, limit=40) == Geometry(40, 4, 2)
    assert geometry(100, slots=8, limit=1000) == Geometry(40, 4, 2)
    assert geometry(100, slots=1, limit=1000) == Geometry(10, 1, 1)


def test_a_chunk_has_a_compiled_number_of_rows():
    sizes = (1, 8, 32)
    assert geometry(100, slots=8, limit=1000, batch_sizes=sizes) == Geometry(32, 4, 2)
    assert geometry(100, slots=8, limit=31, batch_sizes=sizes) == Geometry(8, 1, 8)
    assert geometry(100, slots=8, limit=5, batch_sizes=(8, 32)).chunk == 5  # padded by the server in any case


def test_several_inputs_leave_room_for_their_alignment():
    # Nine inputs of one byte each take nine times 64 bytes, whatever their total is.
    assert geometry(9, slot=64 * 9, slots=1, limit=1, buffers=9) == Geometry(1, 1, 1)
    assert geometry(9, slot=64 * 8, slots=2, limit=1, buffers=9).span == 2


@settings(deadline=None)
@given(
    inputs=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    outputs=st.lists(st.integers(0, 3000), max_size=4),
    slot=st.integers(1, 64).map(lambda n: 64 * n),
    slots=st.integers(1, 9),
    limit=st.integers(1, 500),
    sizes=st.lists(st.integers(1, 300), max_size=4),
)
def test_a_chunk_always_fits_into_its_slots_however_the_inputs_share_the_bytes(
    inputs, outputs, slot, slots, limit, sizes
):
    def need(items):
        return sum(-(-items * size // 64) * 64 for size in inputs + outputs)

    try:
        found = geometry(
            sum(inputs), outputs, slot=slot, slots=slots, limit=limit, buffers=len(inputs), batch_sizes=sizes
        )
    except UsageError:
        assert need(1) + 64 * len(inputs) > slot * slots
        return
    assert need(found.chunk) <= found.span * slot
    assert 1 <= found.chunk <= limit
    assert found.window == max(1, slots // found.span)
    assert found.span <= max(slots // 2, -(-(need(1) + 64 * len(inputs)) // slot))
    if any(size <= found.chunk for size in sizes):
        assert found.chunk in sizes
