import threading

import numpy as np
import pytest

from rsrv.core.errors import DeviceError, DeviceOutOfMemory, InvalidRequest
from rsrv.runtime import FakeDevice, MemoryStats, execute
from rsrv.runtime.fake import POISON
from rsrv.stablehlo import ProgramSignature, TensorType

VECTOR = TensorType("f32", (4,))
UNARY = ProgramSignature((VECTOR,), (VECTOR,))
ONES = np.ones(4, np.float32)


def batch(rows, *, dtype="f32", width=3):
    """A program of n rows in, n rows and a scalar out, with a weight."""
    return ProgramSignature(
        (TensorType(dtype, (rows, width)), TensorType("f32", (5, 5))),
        (TensorType("f32", (rows, 2, 2)), TensorType("i32", ())),
    )


def test_a_program_is_a_python_function_that_gets_the_arguments():
    device = FakeDevice()
    both = device.program(
        lambda a, b: (a + b, a - b), ProgramSignature((VECTOR, VECTOR), (VECTOR, VECTOR)), name="sum and difference"
    )
    total, difference = execute(device, both, [ONES * 3, ONES])
    assert total.tolist() == [4.0] * 4
    assert difference.tolist() == [2.0] * 4
    assert device.launched == ["sum and difference"]


def test_a_duration_passes_in_result_and_not_in_launch():
    slept = []
    device = FakeDevice(sleep=slept.append)
    executable = device.program(lambda a: a, UNARY, duration=0.25)
    launch = device.launch(executable, [device.put(ONES)])
    assert slept == []
    launch.result()
    assert slept == [0.25]


def test_real_programs_take_time_per_row():
    slept = []
    device = FakeDevice(seconds_per_row=0.5, sleep=slept.append)
    execute(device, device.load(b"anything", batch(8)), [np.ones((8, 3), np.float32), np.ones((5, 5), np.float32)])
    assert slept == [4.0]


def test_freed_memory_is_poisoned_where_a_stale_view_would_show_it():
    device = FakeDevice()
    seen = []
    executable = device.program(lambda a: seen.append(a) or a, UNARY)
    buffer = device.put(ONES)
    (output,) = device.launch(executable, [buffer]).result()
    device.free([buffer])
    assert set(seen[0].tobytes()) == {POISON}
    assert output.tolist() == [1.0] * 4


def test_aliased_memory_is_the_callers_and_is_not_poisoned():
    device = FakeDevice()
    raw = np.zeros(16 + 128, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + 16].view(np.float32)
    array[:] = 1
    buffer = device.put(array, alias=True)
    array[:] = 5
    (output,) = device.launch(device.program(lambda a: a, UNARY), [buffer]).result()
    assert output.tolist() == [5.0] * 4
    device.free([buffer])
    assert array.tolist() == [5.0] * 4


def test_arguments_of_a_program_are_read_only():
    device = FakeDevice()

    def overwrite(a):
        a[0] = 1
        return a

    with pytest.raises(DeviceError, match="'vandal' raised ValueError: assignment destination is read-only"):
        execute(device, device.program(overwrite, UNARY, name="vandal"), [ONES])


def test_errors_of_rsrv_pass_through_a_program_and_others_become_device_errors():
    device = FakeDevice()

    def refuse(a):
        raise InvalidRequest("scripted")

    def crash(a):
        raise KeyError("gone")

    with pytest.raises(InvalidRequest, match="scripted"):
        execute(device, device.program(refuse, UNARY), [ONES])
    with pytest.raises(DeviceError, match="fake program 'broken' raised KeyError: 'gone'"):
        execute(device, device.program(crash, UNARY, name="broken"), [ONES])
    assert device.live_buffers == 0


def test_a_function_that_returns_other_types_than_declared_is_an_error():
    device = FakeDevice()
    executable = device.program(lambda a: a.astype(np.float64), UNARY)
    with pytest.raises(DeviceError, match=r"returned f64\[4\], declared: f32\[4\]"):
        execute(device, executable, [ONES])


def test_rows_of_a_real_program_depend_on_their_own_input_row_and_not_on_the_batch_size():
    device = FakeDevice()
    weight = np.full((5, 5), 100, np.float32)
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    (large, total) = execute(device, device.load(b"", batch(8)), [rows, weight])
    assert large[2].tolist() == [[21.0, 21.0], [21.0, 21.0]]  # 6 + 7 + 8
    assert total == rows.sum()
    for index in range(8):
        (small, _) = execute(device, device.load(b"", batch(1)), [rows[index : index + 1], weight])
        np.testing.assert_array_equal(small[0], large[index])
    rows[3] = np.nan
    (changed, _) = execute(device, device.load(b"", batch(8)), [rows, weight])
    np.testing.assert_array_equal(np.delete(changed, 3, axis=0), np.delete(large, 3, axis=0))


@pytest.mark.parametrize("element", ["i1", "ui8", "bf16", "i64", "complex<f32>", "f8E5M2"])
def test_a_real_program_of_any_dtype_answers(element):
    from rsrv.stablehlo import numpy_dtype

    signature = ProgramSignature((TensorType(element, (2, 3)),), (TensorType(element, (2,)),))
    device = FakeDevice()
    array = np.array([[1, 0, 0], [0, 0, 0]]).astype(numpy_dtype(element))
    (output,) = execute(device, device.load(b"", signature), [array])
    np.testing.assert_array_equal(output, np.array([1, 0]).astype(numpy_dtype(element)))


def test_a_real_program_without_arguments_or_with_empty_rows_answers_zeros():
    device = FakeDevice()
    nothing = ProgramSignature((), (TensorType("f32", (2,)),))
    assert execute(device, device.load(b"", nothing), [])[0].tolist() == [0.0, 0.0]
    empty = ProgramSignature((TensorType("f32", (2, 0)),), (TensorType("f32", (2,)),))
    assert execute(device, device.load(b"", empty), [np.zeros((2, 0), np.float32)])[0].tolist() == [0.0, 0.0]


def test_memory_is_counted_and_limited():
    device = FakeDevice(memory_bytes=100)
    first = device.put(np.zeros(80, np.uint8))
    assert device.memory() == MemoryStats(80, 80, 100, None)
    with pytest.raises(DeviceOutOfMemory, match=r"ui8\[40\] needs 40 bytes, 20 of 100 are free"):
        device.put(np.zeros(40, np.uint8))
    device.free([first, first])
    device.put(np.zeros(40, np.uint8))
    assert device.memory() == MemoryStats(40, 80, 100, None)
    assert FakeDevice().memory() is None


def test_executions_at_the_same_time_are_counted():
    device = FakeDevice()
    barrier = threading.Barrier(2)

    def meet(a):
        barrier.wait(timeout=60)
        return a

    executable = device.program(meet, UNARY)
    threads = [threading.Thread(target=execute, args=(device, executable, [ONES])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.most_at_once == 2
