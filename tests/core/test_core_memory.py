"""Aligned arrays, malloc tuning and the staging pool."""

import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from rsrv.core.memory import address, aligned, aligned_empty, trim_malloc, tune_malloc
from rsrv.core.staging import StagingPool, size_class


def test_alignment_rounds_up():
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


@pytest.mark.parametrize("align", [64, 4096])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (7, 11, 13)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, ml_dtypes.bfloat16, np.bool_])
def test_aligned_arrays_start_on_the_boundary_and_are_c_ordered(shape, dtype, align):
    array = aligned_empty(shape, dtype, align=align)
    assert address(array) % align == 0
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.flags.writeable


def test_a_bare_integer_is_a_one_dimensional_shape():
    assert aligned_empty(5, np.int16).shape == (5,)


def test_aligned_arrays_do_not_share_memory():
    arrays = [aligned_empty(100, np.uint8) for _ in range(20)]
    for i, array in enumerate(arrays):
        array[:] = i
    assert [set(array.tolist()) for array in arrays] == [{i} for i in range(20)]


def test_malloc_tuning_keeps_large_blocks_in_the_process():
    # In a process of its own: the setting cannot be taken back. Page faults are counted, not time.
    code = """
import resource, sys
from rsrv.core.memory import tune_malloc, trim_malloc
if sys.argv[1] == "tuned":
    tune_malloc()
def churn():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        bytes(bytearray(b"x") * 1_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
churn()
print(churn())
trim_malloc()
"""
    faults = {
        mode: int(
            subprocess.run([sys.executable, "-c", code, mode], capture_output=True, check=True, timeout=60).stdout
        )
        for mode in ("tuned", "default")
    }
    assert faults["tuned"] < 1000 < faults["default"]


def test_malloc_functions_are_skipped_where_libc_has_none(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    tune_malloc()
    trim_malloc()


def test_a_block_is_aligned_and_as_long_as_asked():
    pool = StagingPool()
    for n_bytes in (0, 1, 63, 4096, 4097, 602_112):
        block = pool.acquire(n_bytes)
        assert len(block) == n_bytes
        assert block.dtype == np.uint8
        assert address(block) % 64 == 0
    assert pool.lent == 6


def test_a_released_block_is_used_again_for_its_size_class():
    pool = StagingPool()
    first = pool.acquire(10_000)
    where = address(first)
    pool.release(first)
    assert pool.idle_bytes == size_class(10_000)
    again = pool.acquire(10_001)
    assert address(again) == where
    assert pool.idle_bytes == 0
    assert address(pool.acquire(10_001)) != where


def test_a_block_that_is_out_is_never_handed_out_again():
    pool = StagingPool()
    rng = np.random.default_rng(0)
    out: dict[int, np.ndarray] = {}
    for step in range(2000):
        if out and rng.random() < 0.5:
            value, block = out.popitem()
            assert (block == value % 251).all()
            pool.release(block)
        else:
            block = pool.acquire(int(rng.integers(1, 40_000)))
            block[:] = step % 251
            out[step] = block
    assert pool.lent == len(out)


@pytest.mark.parametrize("n_bytes", [1, 4096, 4097, 65_537, 602_112, (1 << 30) + 1])
def test_a_size_class_wastes_at_most_an_eighth_and_keeps_lines_whole(n_bytes):
    size = size_class(n_bytes)
    assert n_bytes <= size <= max(4096, n_bytes * 9 / 8)
    assert size % 64 == 0
    assert size_class(size) == size


def test_a_second_release_and_a_foreign_block_are_refused():
    pool = StagingPool()
    block = pool.acquire(100)
    pool.release(block)
    with pytest.raises(ValueError, match="not lent by this pool"):
        pool.release(block)
    with pytest.raises(ValueError, match="not lent by this pool"):
        pool.release(np.empty(100, np.uint8))
    with pytest.raises(ValueError, match="-1"):
        pool.acquire(-1)


def test_idle_memory_is_bounded_and_the_longest_idle_blocks_go_first():
    pool = StagingPool(max_idle_bytes=8192)
    blocks = [pool.acquire(4096) for _ in range(3)]
    places = [address(block) for block in blocks]
    for block in blocks:
        pool.release(block)
    assert pool.idle_bytes == 8192
    assert [address(pool.acquire(4096)) for _ in range(2)] == [places[2], places[1]]
    large = pool.acquire(100_000)
    pool.release(large)
    assert pool.idle_bytes == 0


def test_a_closed_pool_lends_nothing_and_still_takes_blocks_back():
    pool = StagingPool()
    block = pool.acquire(10)
    pool.release(pool.acquire(20))
    pool.close()
    assert pool.idle_bytes == 0
    pool.release(block)
    assert (pool.idle_bytes, pool.lent) == (0, 0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(10)


def test_threads_never_see_each_others_blocks():
    pool = StagingPool(max_idle_bytes=64 << 10)
    wrong = []

    def work(value: int) -> None:
        for n_bytes in (100, 5000, 20_000) * 100:
            block = pool.acquire(n_bytes)
            block[:] = value
            if not (block == value).all():
                wrong.append(value)
            pool.release(block)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.lent == 0
    assert pool.idle_bytes <= 64 << 10
