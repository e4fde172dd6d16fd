"""Weights from file to device: right values, no copies where none are needed, and memory that goes away when freed."""

import mmap
import os

import numpy as np
import pytest

from rsrv.bundle.safetensors import read_header, write_weights
from rsrv.core.dtypes import DType
from rsrv.core.errors import DeviceError, DeviceOutOfMemory, WeightsError
from rsrv.runtime.device import execute
from rsrv.runtime.fake import FakeDevice
from rsrv.serve import weights as module
from rsrv.serve.weights import load_weights


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
    return path, read_header(path)


def loaded(device, path, header, **options):
    weights = load_weights(device, path, header, **options)
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
    path, header = write(tmp_path / "w.safetensors", **ODD)
    arrays = loaded(FakeDevice(), path, header, map_weights=map_weights)
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
    path, header = write(tmp_path / "w.safetensors", **arrays)
    for expected, array in zip(
        arrays.values(), loaded(FakeDevice(), path, header, map_weights=map_weights), strict=True
    ):
        assert array.dtype == expected.dtype
        assert np.array_equal(array.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("map_weights", [False, True])
def test_every_tensor_starts_on_a_64_byte_boundary_so_that_none_is_copied_by_the_device(tmp_path, map_weights):
    path, header = write(tmp_path / "w.safetensors", **ODD)
    device = Recorder()
    weights = load_weights(device, path, header, map_weights=map_weights)
    sizes = [np.asarray(array).nbytes for array in ODD.values()]
    assert [address % 64 for address, size in zip(device.addresses, sizes, strict=True) if size] == [0] * 5
    assert all(device.aliased)
    assert weights.nbytes == sum(sizes) == device.live_bytes
    weights.free()
    assert (weights.nbytes, device.live_bytes, device.live_buffers) == (0, 0, 0)


def test_a_file_of_many_parts_is_read_completely(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PART_BYTES", 1000)
    rng = np.random.default_rng(2)
    arrays = {f"w{i}": rng.standard_normal(n).astype(np.float32) for i, n in enumerate((1600, 333, 16, 4097))}
    path, header = write(tmp_path / "w.safetensors", **arrays)
    for expected, array in zip(arrays.values(), loaded(FakeDevice(), path, header), strict=True):
        assert np.array_equal(array, expected)


def test_short_reads_are_continued(tmp_path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:100]], offset))
    path, header = write(tmp_path / "w.safetensors", w=np.arange(1000, dtype=np.float32))
    assert np.array_equal(loaded(FakeDevice(), path, header)[0], np.arange(1000))


def test_a_file_that_is_truncated_while_it_is_read_is_an_error_that_names_it(tmp_path, monkeypatch):
    path, header = write(tmp_path / "w.safetensors", w=np.arange(1000, dtype=np.float32))
    preadv = os.preadv

    def cut(fd, buffers, offset):
        os.truncate(path, header.data_offset + 100)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    device = FakeDevice()
    with pytest.raises(WeightsError, match=r"w\.safetensors ends at byte .*truncated while it was read"):
        load_weights(device, path, header)
    assert device.live_buffers == 0


def test_a_file_that_was_replaced_after_its_header_was_read_is_refused(tmp_path):
    path, header = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    write(path, w=np.arange(16, dtype=np.int32))
    with pytest.raises(WeightsError, match=r"w\.safetensors changed"):
        load_weights(FakeDevice(), path, header)


def test_a_file_that_is_gone_or_no_file_is_refused(tmp_path):
    path, header = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    path.unlink()
    with pytest.raises(WeightsError, match=r"w\.safetensors"):
        load_weights(FakeDevice(), path, header)
    path.mkdir()
    with pytest.raises(WeightsError, match=r"w\.safetensors"):
        load_weights(FakeDevice(), path, header)


def test_a_read_error_is_reported_from_either_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PART_BYTES", 64)
    path, header = write(tmp_path / "w.safetensors", w=np.arange(1000, dtype=np.float32))

    def fail(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(WeightsError, match="Input/output error"):
        load_weights(FakeDevice(), path, header)


def test_what_is_rewritten_in_place_after_loading_does_not_reach_the_device(tmp_path):
    path, header = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    device = FakeDevice()
    weights = load_weights(device, path, header)
    with path.open("r+b") as file:
        file.seek(header.data_offset)
        file.write(b"\xff" * 64)
    path.unlink()
    assert np.array_equal(values(device, weights)[0], np.arange(16))
    weights.free()


def test_weights_without_tensors_are_empty(tmp_path):
    path, header = write(tmp_path / "w.safetensors")
    weights = load_weights(FakeDevice(), path, header)
    assert (weights.buffers, weights.nbytes) == ((), 0)
    weights.free()


def test_tensors_that_the_device_refuses_leave_nothing_behind(tmp_path):
    path, header = write(tmp_path / "w.safetensors", a=np.zeros(16, np.float32), b=np.zeros(64, np.float32))
    device = FakeDevice(memory_bytes=100)
    with pytest.raises(DeviceOutOfMemory):
        load_weights(device, path, header)
    assert device.live_bytes == 0


def test_freeing_twice_does_nothing(tmp_path):
    path, header = write(tmp_path / "w.safetensors", w=np.zeros(16, np.float32))
    weights = load_weights(FakeDevice(), path, header)
    weights.free()
    weights.free()


def test_memory_that_somebody_still_looks_at_is_not_unmapped_silently(tmp_path):
    path, header = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    device = FakeDevice()
    weights = load_weights(device, path, header)
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

    monkeypatch.setattr(module.mmap, "mmap", Mapping)
    path, header = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    device = Recorder(unified=False)
    weights = load_weights(device, path, header)
    assert closed == [64]
    assert device.aliased == [False]
    assert np.array_equal(values(device, weights)[0], np.arange(16))
    weights.free()


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
    path, header = write(tmp_path / "w.safetensors", **ODD)
    weights = load_weights(cpu, path, header, map_weights=map_weights)
    for expected, buffer in zip(ODD.values(), weights.buffers, strict=True):
        assert np.array_equal(host(cpu, buffer), expected)
    weights.free()


@pytest.mark.parametrize("map_weights", [False, True])
def test_freeing_on_the_cpu_device_gives_the_memory_back_exactly(cpu, tmp_path, map_weights):
    megabytes = 24
    arrays = {f"w{i}": np.full((1 << 18) * 3, i, np.float32) for i in range(megabytes // 3)}
    path, header = write(tmp_path / "w.safetensors", **arrays)
    kind = "RssFile" if map_weights else "RssAnon"
    before = resident_kb(kind)
    weights = load_weights(cpu, path, header, map_weights=map_weights)
    total = sum(float(host(cpu, buffer).sum()) for buffer in weights.buffers)
    assert total == sum(float(array.sum()) for array in arrays.values())
    held = resident_kb(kind)
    assert held - before > 0.9 * megabytes * 1024
    weights.free()
    assert held - resident_kb(kind) > 0.9 * megabytes * 1024


def test_using_freed_weights_is_an_error_and_not_a_crash(cpu, tmp_path):
    from support.bundles import lower

    path, header = write(tmp_path / "w.safetensors", w=np.arange(16, dtype=np.float32))
    weights = load_weights(cpu, path, header)
    executable = cpu.compile(lower(lambda x: (x + 1,), [((16,), np.float32)]))
    buffers = weights.buffers
    weights.free()
    with pytest.raises(DeviceError, match="freed"):
        cpu.launch(executable, buffers)
    assert execute(cpu, executable, [np.zeros(16, np.float32)])[0].sum() == 16
