"""Weights from file to device: right values, no copies where none are needed, and memory that goes away when freed."""

import mmap
import os
import random

import numpy as np
import pytest

from rsrv.bundle.safetensors import write_weights
from rsrv.core.dtypes import DType
from rsrv.core.errors import DeviceError, DeviceOutOfMemory, ServerStopping, WeightsError
from rsrv.runtime.device import execute
from rsrv.runtime.fake import FakeDevice
from rsrv.serve.residency import memory, reading
from rsrv.serve.residency.host_pool import PooledWeightStore
from rsrv.serve.residency.store import PrivateWeightStore
from rsrv.serve.residency.tensors import TensorPool, open_weights, trim


class Recorder(FakeDevice):
    """Remembers each array that was put, where it lay, and whether it might be aliased."""

    def __init__(self, **options):
        super().__init__(**options)
        self.addresses, self.aliased = [], []

    def put(self, array, *, alias=False):
        self.addresses.append(array.ctypes.data)
        self.aliased.append(alias)
        return super().put(array, alias=alias)


def values(device, weights):
    return [np.array(buffer.array) for buffer in weights.buffers]


def write(path, **arrays):
    write_weights(path, list(arrays.items()))
    return open_weights(path)


def loaded(device, file, **options):
    weights = TensorPool(device, **options).load(file)
    try:
        return values(device, weights)
    finally:
        weights.free()


ODD = {
    "b": np.arange(7, dtype=np.float32),
    "w": np.arange(64, dtype=np.float32).reshape(4, 16),
    "scalar": np.float64(2.5),
    "empty": np.zeros((0, 3), np.int8),
    "flag": np.array([True, False, True]),
    "v": np.arange(32, dtype=np.int16).reshape(2, 16),
}


@pytest.mark.parametrize("map_weights", [False, True])
def test_tensors_arrive_in_argument_order_with_their_values(tmp_path, map_weights):
    file = write(tmp_path / "w.safetensors", **ODD)
    arrays = loaded(FakeDevice(), file, map_weights=map_weights)
    for expected, array in zip(ODD.values(), arrays, strict=True):
        assert array.dtype == np.asarray(expected).dtype
        assert array.shape == np.shape(expected)
        assert np.array_equal(array, expected)


@pytest.mark.parametrize("map_weights", [False, True])
def test_every_dtype_keeps_its_bits(tmp_path, map_weights):
    rng = np.random.default_rng(1)
    arrays = {}
    for dtype in DType:
        raw = rng.integers(0, 2 if dtype is DType.BOOL else 256, 33 * dtype.itemsize, np.uint8)
        arrays[dtype.value] = raw.view(dtype.numpy)
    file = write(tmp_path / "w.safetensors", **arrays)
    for expected, array in zip(arrays.values(), loaded(FakeDevice(), file, map_weights=map_weights), strict=True):
        assert array.dtype == expected.dtype
        assert np.array_equal(array.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("map_weights", [False, True])
def test_every_tensor_starts_on_a_64_byte_boundary_so_that_none_is_copied_by_the_device(tmp_path, map_weights):
    file = write(tmp_path / "w.safetensors", **ODD)
    device = Recorder()
    weights = TensorPool(device, map_weights=map_weights).load(file)
    sizes = [np.asarray(array).nbytes for array in ODD.values()]
    assert [address % 64 for address, size in zip(device.addresses, sizes, strict=True) if size] == [0] * 5
    assert all(device.aliased)
    assert weights.nbytes == sum(sizes) == device.live_bytes
    weights.free()
    assert (weights.nbytes, device.live_bytes, device.live_buffers) == (0, 0, 0)


def test_a_file_of_many_parts_is_read_completely(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_PART_BYTES", 1000)
    rng = np.random.default_rng(2)
    arrays = {f"w{i}": rng.standard_normal(n).astype(np.float32) for i, n in enumerate((1600, 333, 16, 4097))}
    file = write(tmp_path / "w.safetensors", **arrays)
    for expected, array in zip(arrays.values(), loaded(FakeDevice(), file), strict=True):
        assert np.array_equal(array, expected)


@pytest.mark.parametrize(
    "shape", [(), (5,), (40000,), (300, 70), (2, 9000), (9000, 2), (3, 5, 700), (700, 1, 33), (2, 3, 4, 5, 60)]
)
@pytest.mark.parametrize("kind", ["f4", "u1", "f8"])
def test_a_column_major_tensor_is_transposed_in_blocks(tmp_path, monkeypatch, shape, kind):
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 4096)
    sizes = []
    allocate = reading.allocate
    monkeypatch.setattr(reading, "allocate", lambda asked: sizes.extend(asked) or allocate(asked))
    stored = np.random.default_rng(4).integers(0, 99, shape).astype(kind)
    write_weights(tmp_path / "w.safetensors", [("w", stored), ("v", stored + 1)])
    file = open_weights(tmp_path / "w.safetensors", column_major=True)
    w, v = loaded(FakeDevice(), file)
    assert np.array_equal(w, stored.T)
    assert np.array_equal(v, stored.T + 1)
    assert w.shape == shape[::-1]
    assert len(sizes) == 2
    assert max(sizes) <= 4096


def test_a_load_ends_with_its_part_when_the_pool_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_PART_BYTES", 1000)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 1000)
    preadv, reads = os.preadv, []
    write_weights(tmp_path / "w.safetensors", [("w", np.zeros((100, 1000), np.float32))])
    for column_major in (False, True):
        file = open_weights(tmp_path / "w.safetensors", column_major=column_major)
        for host in (False, True):
            device = FakeDevice(unified=not host)
            pool = TensorPool(device)
            store = PooledWeightStore() if host else None

            def read(fd, buffers, offset, closed=store or pool):
                reads.append(offset)
                closed.close()
                return preadv(fd, buffers, offset)

            reads.clear()
            monkeypatch.setattr(os, "preadv", read)
            with pytest.raises(ServerStopping):
                pool.host_copy(store, "m", file) if store else pool.load(file)
            assert 1 <= len(reads) <= 2 * 64  # on two threads, a block of 64 runs at most
            assert device.live_buffers == pool.resident_bytes == 0
            with pytest.raises(ServerStopping):
                pool.host_copy(store, "m", file) if store else pool.load(file)


@pytest.mark.parametrize("unified", [True, False])
def test_tensors_are_not_put_and_nothing_is_hashed_or_compared_once_the_pool_is_closed(tmp_path, unified):
    arrays = {"v": np.zeros(1 << 15, np.float32), "w": np.ones(1 << 15, np.float32)}

    class Closes(FakeDevice):
        def put(self, array, *, alias=False):
            pool.close()
            return super().put(array, alias=alias)

    pool = TensorPool(Closes(unified=unified))
    with pytest.raises(ServerStopping):
        pool.load(write(tmp_path / "w.safetensors", **arrays))
    assert (pool.device.live_bytes, pool.resident_bytes) == (0, 0)
    check = Gate(3)
    file = write(tmp_path / "v.safetensors", **arrays)
    os.utime(file.path)
    with pytest.raises(ServerStopping):
        file.confirm(lambda: [(file.header.tensors["v"], arrays["v"].view(np.uint8))] * 9, check)
    assert check.left < 0
    with pytest.raises(ServerStopping):
        reading.is_equal(file, file.header.tensors["v"], arrays["v"].view(np.uint8), Gate(0))


class Gate:
    """Lets some calls pass."""

    def __init__(self, left):
        self.left = left

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise ServerStopping("enough")


def test_short_reads_are_continued(tmp_path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:100]], offset))
    file = write(tmp_path / "w.safetensors", w=np.arange(1000, dtype=np.float32))
    assert np.array_equal(loaded(FakeDevice(), file)[0], np.arange(1000))


def test_a_file_that_is_truncated_while_it_is_read_is_an_error_that_names_it(tmp_path, monkeypatch):
    file = write(tmp_path / "w.safetensors", w=np.arange(1000, dtype=np.float32))
    preadv = os.preadv

    def cut(fd, buffers, offset):
        os.truncate(file.path, file.header.data_offset + 100)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    device = FakeDevice()
    with pytest.raises(WeightsError, match=r"w\.safetensors ends at byte .*truncated while it was read"):
        TensorPool(device).load(file)
    assert device.live_buffers == 0


def test_a_file_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "w.safetensors").mkdir()
    for name in ("w.safetensors", "none.safetensors"):
        with pytest.raises(WeightsError, match=name):
            open_weights(tmp_path / name)


def test_a_file_that_was_closed_is_refused(tmp_path):
    file = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    file.close()
    file.close()
    with pytest.raises(WeightsError, match=r"w\.safetensors cannot be read"):
        TensorPool(FakeDevice()).load(file)


def test_a_read_error_is_reported_from_either_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_PART_BYTES", 64)
    file = write(tmp_path / "w.safetensors", w=np.arange(1000, dtype=np.float32))

    def fail(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(WeightsError, match="Input/output error"):
        TensorPool(FakeDevice()).load(file)


def test_what_is_rewritten_in_place_after_loading_does_not_reach_the_device(tmp_path):
    file = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    device = FakeDevice()
    weights = TensorPool(device).load(file)
    with file.path.open("r+b") as written:
        written.seek(file.header.data_offset)
        written.write(b"\xff" * 64)
    file.path.unlink()
    assert np.array_equal(values(device, weights)[0], np.arange(16))
    weights.free()


def test_weights_without_tensors_are_empty(tmp_path):
    file = write(tmp_path / "w.safetensors")
    weights = TensorPool(FakeDevice()).load(file)
    assert (weights.buffers, weights.nbytes) == ((), 0)
    weights.free()


def test_tensors_that_the_device_refuses_leave_nothing_behind(tmp_path):
    file = write(tmp_path / "w.safetensors", a=np.zeros(16, np.float32), b=np.zeros(64, np.float32))
    device = FakeDevice(memory_bytes=100)
    with pytest.raises(DeviceOutOfMemory):
        TensorPool(device).load(file)
    assert device.live_bytes == 0


def test_freeing_twice_does_nothing(tmp_path):
    file = write(tmp_path / "w.safetensors", w=np.zeros(16, np.float32))
    weights = TensorPool(FakeDevice()).load(file)
    weights.free()
    weights.free()


def test_memory_that_somebody_still_looks_at_is_not_unmapped_silently(tmp_path):
    file = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    device = FakeDevice()
    weights = TensorPool(device).load(file)
    view = weights.buffers[0].array
    with pytest.raises(BufferError):
        weights.free()
    assert np.array_equal(view, np.arange(16))
    del view
    weights.free()


def test_a_device_with_its_own_memory_keeps_no_host_copy(tmp_path, monkeypatch):
    closed = []

    class Mapping(mmap.mmap):
        def close(self):
            closed.append(len(self))
            super().close()

    monkeypatch.setattr(memory.mmap, "mmap", Mapping)
    file = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32), v=np.arange(1 << 15, dtype=np.float32))
    device = Recorder(unified=False)
    weights = TensorPool(device).load(file)
    assert closed == [(1 << 17) + mmap.PAGESIZE]
    assert not any(device.aliased)
    assert np.array_equal(values(device, weights)[0], np.arange(16))
    weights.free()
    assert device.live_bytes == 0


@pytest.mark.parametrize("unified", [True, False])
def test_a_copy_in_host_memory_is_all_that_is_needed(tmp_path, unified):
    arrays = {**ODD, "large": np.arange(1 << 15, dtype=np.float32)}
    file = write(tmp_path / "w.safetensors", **arrays)
    device = Recorder(unified=unified)
    pool = TensorPool(device)
    host = pool.host_copy(PrivateWeightStore(), "m", file)
    with open(file.path, "r+b") as written:
        written.write(b"\xff" * file.token.size)
    weights = pool.load(file, host)
    for expected, array in zip(arrays.values(), values(device, weights), strict=True):
        assert np.array_equal(array, expected)
    assert pool.resident_bytes == weights.nbytes == sum(np.asarray(array).nbytes for array in arrays.values())
    assert (device.addresses[-1] == host.arrays[-1].ctypes.data, device.aliased[-1]) == (True, unified)
    weights.free()
    assert (pool.resident_bytes, device.live_bytes) == (0, 0)
    host.release()


def test_a_host_copy_of_a_changed_file_is_refused(tmp_path):
    file = write(tmp_path / "w.safetensors", w=np.arange(1 << 15, dtype=np.float32))
    file.path.write_bytes(b"\xff" * file.token.size)
    with pytest.raises(WeightsError, match="changed on disk"):
        TensorPool(FakeDevice()).host_copy(PrivateWeightStore(), "m", file)


def test_a_footprint_counts_the_granules_of_a_card_and_the_bytes_elsewhere(tmp_path):
    file = write(tmp_path / "w.safetensors", **ODD)
    sizes = [np.asarray(array).nbytes for array in ODD.values()]
    assert TensorPool(FakeDevice()).footprint(file) == sum(sizes)
    assert TensorPool(FakeDevice(unified=False)).footprint(file) == sum(-(-size // 256) * 256 for size in sizes)


def test_no_memory_to_map_is_an_error_of_the_device(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory.mmap, "mmap", fail)
    file = write(tmp_path / "w.safetensors", w=np.zeros(16, np.float32))
    with pytest.raises(DeviceOutOfMemory, match=r"64 bytes for the weights of .*Cannot allocate"):
        TensorPool(FakeDevice()).load(file)
    with pytest.raises(OSError, match="Cannot allocate"):
        TensorPool(FakeDevice(unified=False)).load(file)


def test_memory_is_trimmed_at_most_once_a_second(monkeypatch):
    monkeypatch.setattr("rsrv.serve.residency.memory._last_trim_ns", -(10**9))
    assert [trim(clock=lambda ns=ns: ns) for ns in (0, 10**9 - 1, 10**9, 10**9 + 5)] == [True, False, True, False]


# --- the real device ----------------------------------------------------------------------------------------------


def resident_kb(what):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(f"{what}:"))


@pytest.fixture(scope="module")
def cpu():
    from rsrv.runtime.pjrt import PjrtDevice

    device = PjrtDevice("cpu")
    yield device
    device.close()


def host(cpu, buffer):
    """The values of a buffer, through a program that returns its argument."""
    from support.bundles import lower

    executable = cpu.compile(lower(lambda x: (x,), [(buffer.shape, buffer.dtype)]))
    return cpu.launch(executable, [buffer]).result()[0]


@pytest.mark.parametrize("map_weights", [False, True])
def test_the_cpu_device_gets_the_values(cpu, tmp_path, map_weights):
    file = write(tmp_path / "w.safetensors", **ODD)
    weights = TensorPool(cpu, map_weights=map_weights).load(file)
    for expected, buffer in zip(ODD.values(), weights.buffers, strict=True):
        assert np.array_equal(host(cpu, buffer), expected)
    weights.free()


@pytest.mark.parametrize("map_weights", [False, True])
def test_freeing_on_the_cpu_device_gives_the_memory_back_exactly(cpu, tmp_path, map_weights):
    megabytes = 24
    arrays = {f"w{i}": np.full((1 << 18) * 3, i, np.float32) for i in range(megabytes // 3)}
    file = write(tmp_path / "w.safetensors", **arrays)
    kind = "RssFile" if map_weights else "RssAnon"
    before = resident_kb(kind)
    weights = TensorPool(cpu, map_weights=map_weights).load(file)
    total = sum(float(host(cpu, buffer).sum()) for buffer in weights.buffers)
    assert total == sum(float(array.sum()) for array in arrays.values())
    held = resident_kb(kind)
    assert held - before > 0.9 * megabytes * 1024
    weights.free()
    assert held - resident_kb(kind) > 0.9 * megabytes * 1024


def test_memory_stays_flat_over_many_rounds_in_which_models_share_and_go_in_any_order(cpu, tmp_path):
    megabytes = 8
    backbone = {f"w{i}": np.full(1 << 18, i, np.float32) for i in range(megabytes)}
    files = []
    for number in range(3):
        head = np.full(1 << 18, 100 + number, np.float32)
        files.append(write(tmp_path / f"w{number}.safetensors", **backbone, head=head, bias=np.zeros(5, np.int8)))
    pool = TensorPool(cpu)
    source = random.Random(3)
    loaded, seen = {}, []
    for turn in range(120):
        number = source.randrange(3)
        if number in loaded:
            loaded.pop(number).free()
        else:
            loaded[number] = pool.load(files[number])
            assert host(cpu, loaded[number].buffers[megabytes - 1])[0] == megabytes - 1
            assert host(cpu, loaded[number].buffers[megabytes])[0] == 100 + number
        held = megabytes * bool(loaded) + len(loaded)
        assert pool.resident_bytes == held * (1 << 20) + 5 * len(loaded)
        if turn >= 20:
            seen.append(resident_kb("RssAnon") - held * 1024)
    for weights in loaded.values():
        weights.free()
    assert pool.resident_bytes == 0
    assert max(seen) - min(seen) < 4 * 1024


def test_using_freed_weights_is_an_error_and_not_a_crash(cpu, tmp_path):
    from support.bundles import lower

    file = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    weights = TensorPool(cpu).load(file)
    executable = cpu.compile(lower(lambda x: (x + 1,), [((16,), np.float32)]))
    buffers = weights.buffers
    weights.free()
    with pytest.raises(DeviceError, match="freed"):
        cpu.launch(executable, buffers)
    assert execute(cpu, executable, [np.zeros(16, np.float32)])[0].sum() == 16
