"""The memory of a fake card: it hands out blocks at addresses, fragments, and joins free neighbours again."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.core.errors import DeviceOutOfMemory
from rsrv.runtime import FakeDevice, MemoryStats, execute, open_device
from rsrv.runtime.fake_memory import GRANULE_BYTES, FakeMemory
from rsrv.stablehlo import ProgramSignature, TensorType

KIB = 1024
UNARY = ProgramSignature((TensorType("f32", (4,)),), (TensorType("f32", (4,)),))
ONES = np.ones(4, np.float32)


def put(device, nbytes):
    return device.put(np.zeros(nbytes, np.uint8))


def test_a_card_counts_in_granules_and_reports_its_largest_free_block():
    device = FakeDevice(unified=False, memory_bytes=KIB)
    put(device, 1)
    assert device.memory() == MemoryStats(256, 256, KIB, 768)
    assert device.live_bytes == 1
    put(device, 0)
    assert device.memory().bytes_in_use == 256


def test_holes_do_not_add_up_until_what_lies_between_them_is_freed():
    device = FakeDevice(unified=False, memory_bytes=4 * KIB)
    blocks = [put(device, KIB) for _ in range(4)]
    device.free([blocks[0], blocks[2]])
    assert device.memory().largest_free_block_bytes == KIB
    with pytest.raises(DeviceOutOfMemory, match=r"needs 2048 bytes, 2048 of 4096 are free, 1024 of them in one block"):
        put(device, 2 * KIB)
    device.free([blocks[1]])
    assert device.memory().largest_free_block_bytes == 3 * KIB
    put(device, 3 * KIB)


def test_the_smallest_hole_that_is_large_enough_is_taken():
    device = FakeDevice(unified=False, memory_bytes=8 * KIB)
    blocks = [put(device, n * KIB) for n in (3, 1, 1, 1)]
    device.free([blocks[0], blocks[2]])  # holes of 3 and 1, and 2 at the end
    put(device, KIB)
    assert device.memory().largest_free_block_bytes == 3 * KIB


def test_host_memory_does_not_fragment():
    device = FakeDevice(memory_bytes=100)
    blocks = [put(device, 25) for _ in range(4)]
    device.free([blocks[0], blocks[2]])
    put(device, 50)
    assert device.memory() == MemoryStats(100, 100, 100, None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * GRANULE_BYTES)), max_size=60))
def test_blocks_never_overlap_and_nothing_is_lost(steps):
    memory = FakeMemory(16 * GRANULE_BYTES + 10, card=True)
    held = []
    for give, n in steps:
        if give and held:
            memory.give(held.pop(n % len(held)))
        elif (block := memory.take(n)) is not None:
            assert block.size >= n
            held.append(block)
        else:
            assert n > memory.largest_free
        spans = sorted((block.start, block.size) for block in held if block.size)
        assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
        assert memory.in_use == sum(size for _, size in spans) <= memory.peak <= memory.limit
    for block in held:
        memory.give(block)
    assert (memory.in_use, memory.largest_free) == (0, 16 * GRANULE_BYTES)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "card"])
def test_a_run_takes_scratch_while_it_lasts_and_the_peak_remembers_it(unified):
    device = FakeDevice(unified=unified, memory_bytes=8 * KIB)
    during = []
    program = device.program(lambda a: during.append(device.memory().bytes_in_use) or a, UNARY, scratch_bytes=2 * KIB)
    assert program.scratch_bytes == 2 * KIB
    execute(device, program, [ONES])
    inputs = 16 if unified else 256
    assert during == [2 * KIB + inputs]
    assert (device.memory().bytes_in_use, device.memory().peak_bytes_in_use) == (0, 2 * KIB + inputs)


def test_a_run_without_room_for_its_scratch_fails_and_leaves_nothing_behind():
    device = FakeDevice(unified=False, memory_bytes=2 * KIB)
    program = device.program(lambda a: a, UNARY, name="greedy", scratch_bytes=2 * KIB)
    with pytest.raises(DeviceOutOfMemory, match=r"program 'greedy' needs 2048 bytes, 1792 of 2048 are free$"):
        execute(device, program, [ONES])
    assert device.launched == []
    assert device.memory().bytes_in_use == 0


def test_a_spike_is_seen_in_the_peak_alone():
    device = FakeDevice(unified=False, memory_bytes=4 * KIB)
    device.spike(3 * KIB)
    assert device.memory() == MemoryStats(0, 3 * KIB, 4 * KIB, 4 * KIB)
    with pytest.raises(DeviceOutOfMemory, match="the spike needs 8192 bytes"):
        device.spike(8 * KIB)


def test_a_worker_gets_a_fake_card_by_giving_it_memory():
    environ = {"RSRV_ALLOW_FAKE": "1"}
    card = open_device("fake", fake_memory_bytes=KIB, environ=environ)
    assert not card.unified
    assert card.memory() == MemoryStats(0, 0, KIB, KIB)
    host = open_device("fake", environ=environ)
    assert host.unified
    assert host.memory() is None


def test_what_the_compiler_said_of_a_program_is_its_scratch():
    device = FakeDevice(unified=False, memory_bytes=KIB)
    assert device.load(b"", UNARY, scratch_bytes=300).scratch_bytes == 300
    assert device.load(b"", UNARY).scratch_bytes == 0
