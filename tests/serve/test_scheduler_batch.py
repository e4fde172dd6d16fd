"""Merging requests into one aligned, padded batch, and cutting its results: values against numpy's own concatenate."""

import math

import ml_dtypes
import numpy as np
import pytest
from sched_support import lone_queue, paper_model, rows_of, spec

from rsrv.core.dtypes import DType
from rsrv.core.errors import DeviceError, UnregisteredRegion
from rsrv.core.memory import address, aligned_empty
from rsrv.core.shm import OwnedRegion, RegionRegistry, RegionTensor
from rsrv.core.staging import StagingPool
from rsrv.serve.scheduler import batch
from rsrv.serve.scheduler.batch import split, stage
from rsrv.serve.scheduler.queue import Ticket


@pytest.fixture
def pool():
    pool = StagingPool()
    yield pool
    assert pool.lent == 0, "a staged block was not given back"
    pool.close()


def tickets(model, *requests, rows=None, variant=()):
    queue = lone_queue(model)
    axis = next((s.batch_axis for s in model.input_specs if s.batch_axis is not None), None)
    first = model.input_specs[0].name
    return [
        Ticket(queue, r, (1 if axis is None else r[first].shape[axis]) if rows is None else rows, variant, 0, print, 0)
        for r in requests
    ]


@pytest.fixture
def no_small(monkeypatch):
    """Even the smallest array goes to a block."""
    monkeypatch.setattr(batch, "SMALL_BYTES", 0)


def staged_arrays(model, requests, key, pool, **more):
    staged = stage(model, tickets(model, *requests, **more), key, pool)
    copies = [array.copy() for array, _ in staged.inputs]
    assert all(array.flags.c_contiguous for array, _ in staged.inputs)
    assert all(address(array) % 64 == 0 for array, alias in staged.inputs if alias)
    blocks, aliased = len(staged.blocks), [alias for _, alias in staged.inputs]
    for block in staged.blocks:
        pool.release(block)
    return copies, blocks, aliased


def test_rows_are_merged_in_order_and_padded_with_zeros(pool, no_small):
    requests = [{"x": rows_of(1, 2)}, {"x": rows_of(3)}]
    (x,), blocks, aliased = staged_arrays(paper_model(), requests, 4, pool)
    assert np.array_equal(x, np.vstack([rows_of(1, 2, 3), np.zeros((1, 2))]))
    assert (blocks, aliased) == (1, [True])


def test_padding_is_zero_even_in_a_block_that_was_used_before(pool, no_small):
    block = pool.acquire(32)
    block[:] = 0xFF
    pool.release(block)
    (x,), _, _ = staged_arrays(paper_model(), [{"x": rows_of(1)}], 4, pool)
    assert np.array_equal(x[1:], np.zeros((3, 2)))


def test_small_inputs_are_left_to_the_device_to_copy(pool):
    m = paper_model(inputs=[spec("x", "n", 256), spec("z", "n", 257)])
    requests = [{"x": rows_of(i, width=256), "z": rows_of(i, width=257)} for i in (1, 2, 3)]
    (x, z), blocks, aliased = staged_arrays(m, requests, 4, pool)
    assert np.array_equal(x, rows_of(1, 2, 3, 0, width=256))
    assert np.array_equal(z, rows_of(1, 2, 3, 0, width=257))
    assert (blocks, aliased) == (1, [False, True])


def test_each_input_is_merged_along_its_own_batch_axis(pool, no_small):
    m = paper_model(inputs=[spec("x", "n", 3), spec("s", 2, "n"), spec("v", "n"), spec("c", 2, "n", 2)])

    def request(n, start):
        full = np.arange(start, start + n, dtype=np.float32)
        return {
            "x": np.repeat(full[:, None], 3, 1),
            "s": np.stack([full, -full]),
            "v": full * 10,
            "c": np.broadcast_to(full[None, :, None], (2, n, 2)).copy(),
        }

    requests = [request(2, 1), request(1, 7), request(3, 20)]
    arrays, blocks, aliased = staged_arrays(m, requests, 8, pool)
    assert (blocks, aliased) == (4, [True] * 4)
    for declared, array in zip(m.input_specs, arrays, strict=True):
        axis = declared.batch_axis
        padding = declared.concrete_shape(2)
        expected = np.concatenate([*(r[declared.name] for r in requests), np.zeros(padding, np.float32)], axis)
        assert np.array_equal(array, expected), declared.name


@pytest.fixture
def in_region():
    """Makes a tensor whose bytes are in a registered shared-memory region, 64 bytes from its start."""
    registry, owned = RegionRegistry(), []

    def put(array):
        region = OwnedRegion.create("batch", 64 + array.nbytes)
        owned.append(region)
        region.view[64 : 64 + array.nbytes] = array.tobytes()
        registry.register(region.name, region.key, 0, region.byte_size)
        return RegionTensor(registry, region.name, 64, array.nbytes, array.dtype, array.shape)

    put.registry = registry
    yield put
    registry.close()
    for region in owned:
        region.close()


@pytest.mark.parametrize("large", [False, True])
def test_rows_come_straight_from_shared_memory_beside_inline_ones(pool, in_region, large):
    width = 2000 if large else 2
    m = paper_model(inputs=[spec("x", "n", width), spec("s", width, "n")])

    def request(*values):
        rows = rows_of(*values, width=width)
        return {"x": rows, "s": np.ascontiguousarray(-rows.T)}

    requests = [request(1, 2), request(3), request(4)]
    shared = [{name: in_region(array) for name, array in requests[0].items()}, requests[1]]
    shared.append({"x": in_region(requests[2]["x"]), "s": requests[2]["s"]})
    (x, s), _, _ = staged_arrays(m, shared, 8, pool)
    assert np.array_equal(x, np.vstack([rows_of(1, 2, 3, 4, width=width), np.zeros((4, width))]))
    assert np.array_equal(s, -x.T)


def test_one_request_in_shared_memory_that_fits_is_read_into_an_aligned_block(pool, in_region):
    m = paper_model(inputs=[spec("x", "n", 2000)])
    rows = rows_of(1, 2, 3, 4, width=2000)
    (x,), blocks, aliased = staged_arrays(m, [{"x": in_region(rows)}], 4, pool)
    assert np.array_equal(x, rows)
    assert (blocks, aliased) == (1, [True])


def test_bytes_other_than_0_and_1_of_a_bool_in_shared_memory_are_true(pool, in_region):
    tensor = in_region(np.array([[0, 1], [2, 255]], np.uint8))
    tensor.dtype = np.dtype(np.bool_)
    target = np.empty((2, 2), np.bool_)
    tensor.read_into(target)
    assert target.view(np.uint8).tolist() == tensor.read().view(np.uint8).tolist() == [[0, 1], [1, 1]]


def test_a_region_that_went_away_fails_the_staging_and_gives_the_blocks_back(pool, in_region):
    m = paper_model(inputs=[spec("x", "n", 2000)])
    gone = in_region(rows_of(2, width=2000))
    in_region.registry.unregister("")
    with pytest.raises(UnregisteredRegion):
        stage(m, tickets(m, {"x": rows_of(1, width=2000)}, {"x": gone}), 4, pool)


def filled(array):
    array[:] = np.arange(array.size).reshape(array.shape)
    return array


def aligned(shape):
    return filled(aligned_empty(shape, np.float32))


def unaligned(shape):
    return filled(aligned_empty(math.prod(shape) * 4 + 4, np.uint8)[4:].view(np.float32).reshape(shape))


@pytest.mark.parametrize(
    ("width", "make", "passes", "alias"),
    [
        pytest.param(2, unaligned, True, False, id="small"),
        pytest.param(2000, unaligned, True, False, id="unaligned"),
        pytest.param(2000, aligned, True, True, id="aligned"),
        pytest.param(300_000, aligned, True, True, id="large"),
        pytest.param(300_000, unaligned, False, True, id="large_and_unaligned"),
    ],
)
def test_one_request_that_fits_exactly_passes_through(pool, width, make, passes, alias):
    m = paper_model(inputs=[spec("x", "n", width)], keys=(1,))
    x = make((1, width))
    staged = stage(m, tickets(m, {"x": x}), 1, pool)
    ((array, aliased),) = staged.inputs
    assert (array is x, aliased) == (passes, alias)
    assert np.array_equal(array, x)
    assert len(staged.blocks) == (0 if passes else 1)
    for block in staged.blocks:
        pool.release(block)


def test_a_request_that_is_not_in_c_order_is_copied_into_c_order(pool, no_small):
    request = {"x": np.asfortranarray(np.arange(8, dtype=np.float32).reshape(4, 2))}
    (x,), blocks, aliased = staged_arrays(paper_model(), [request], 4, pool)
    assert np.array_equal(x, request["x"])
    assert (blocks, aliased) == (1, [True])


def test_a_model_that_is_not_coalescable_is_never_padded(pool, no_small):
    m = paper_model(keys=(0,), inputs=[spec("x", "n", 2), spec("t", 3)], fixed_rows=3)
    request = {"x": rows_of(1, 2, 3), "t": np.arange(6, dtype=np.float32)[::2]}
    (x, t), blocks, _ = staged_arrays(m, [request], 0, pool)
    assert np.array_equal(x, request["x"])
    assert np.array_equal(t, [0, 2, 4])
    assert blocks == 1


def test_a_variant_stages_its_own_sizes(pool):
    m = paper_model(inputs=[spec("x", "n", "?"), spec("m", "?", "n")], variants=((3, 2), (5, 4)))
    requests = [{"x": np.full((1, 5), i, np.float32), "m": np.full((4, 1), -i, np.float32)} for i in (1, 2, 3)]
    (x, m_), _, _ = staged_arrays(m, requests, 4, pool, variant=(5, 4))
    assert np.array_equal(x, np.repeat(np.float32([[1], [2], [3], [0]]), 5, 1))
    assert np.array_equal(m_, np.repeat(np.float32([[-1, -2, -3, 0]]), 4, 0))


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.value)
def test_every_dtype_keeps_its_bits(pool, dtype):
    m = paper_model(inputs=[spec("x", "n", 2, dtype=dtype)])
    rng = np.random.default_rng(0)
    raw = [rng.integers(0, 2 if dtype is DType.BOOL else 256, (1, 2 * dtype.itemsize), np.uint8) for _ in range(3)]
    requests = [{"x": bits.view(dtype.numpy)} for bits in raw]
    (x,), _, _ = staged_arrays(m, requests, 4, pool)
    assert x.dtype == dtype.numpy
    assert np.array_equal(x.view(np.uint8), np.vstack([*raw, np.zeros_like(raw[0])]))


def test_inputs_without_elements_need_no_block(pool, no_small):
    m = paper_model(inputs=[spec("x", "n", 0), spec("z", "n")])
    requests = [{"x": np.zeros((1, 0), np.float32), "z": np.float32([i])} for i in (1, 2)]
    (x, z), blocks, _ = staged_arrays(m, requests, 4, pool)
    assert (x.shape, z.tolist(), blocks) == ((4, 0), [1, 2, 0, 0], 1)


def test_blocks_are_given_back_when_merging_fails(pool, no_small):
    m = paper_model(inputs=[spec("a", "n"), spec("x", "n", 2)])
    requests = [{"a": np.float32([1]), "x": rows_of(1)}, {"a": np.float32([2]), "x": rows_of(1, width=3)}]
    with pytest.raises(ValueError):
        stage(m, tickets(m, *requests), 4, pool)


def test_a_wrong_dtype_is_never_converted_while_merging(pool):
    m = paper_model()
    requests = [{"x": rows_of(1)}, {"x": rows_of(1).astype(ml_dtypes.bfloat16)}]
    with pytest.raises(TypeError):
        stage(m, tickets(m, *requests), 2, pool)


# --- results ------------------------------------------------------------------------------------------------------


def test_results_are_views_along_each_outputs_own_axis_without_padding():
    m = paper_model(outputs=[spec("y", "n", 2), spec("t", 3, "n"), spec("s", "n")])
    y, t, s = (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in ((8, 2), (3, 8), (8,)))
    replies = split(m, [y, t, s], [2, 1, 3], 8)
    for reply, (start, end) in zip(replies, [(0, 2), (2, 3), (3, 6)], strict=True):
        assert np.array_equal(reply["y"], y[start:end])
        assert np.array_equal(reply["t"], t[:, start:end])
        assert np.array_equal(reply["s"], s[start:end])
        assert np.shares_memory(reply["y"], y)
        assert np.shares_memory(reply["t"], t)


def test_a_single_request_that_was_padded_loses_its_padding():
    (reply,) = split(paper_model(), [rows_of(1, 0, 0, 0)], [1], 4)
    assert np.array_equal(reply["y"], rows_of(1))


def test_a_request_that_filled_its_program_gets_the_results_as_they_are():
    y = rows_of(1, 2, 3, 4)
    assert split(paper_model(), [y], [4], 4)[0]["y"] is y
    mean = np.float32([2.5, 2.5])
    m = paper_model(outputs=[spec("mean", 2)])
    assert split(m, [mean], [4], 4)[0]["mean"] is mean


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([], "returned 0 results, not 1"),
        ([rows_of(1), rows_of(1)], "returned 2 results, not 1"),
        ([rows_of(1, 2)], r"'y' has shape \[2, 2\], declared is f32\[n,2\] with n = 4"),
        ([np.float32(0)], r"'y' has shape \[\]"),
    ],
)
def test_results_that_are_not_as_declared_are_a_device_error(outputs, text):
    with pytest.raises(DeviceError, match=text):
        split(paper_model(), outputs, [1, 2], 4)
