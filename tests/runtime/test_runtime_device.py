"""What both devices promise."""

import threading

import ml_dtypes
import numpy as np
import pytest

from rsrv.core.errors import DeviceError, ProgramError
from rsrv.runtime import CompileOptions, FakeDevice, PjrtDevice, execute

TWO_ARGUMENTS = b"""func.func @main(%a: tensor<2x3xf32>, %b: tensor<4xi64>) -> (tensor<2x3xf32>, tensor<4xi64>) {
  %0 = stablehlo.add %a, %a : tensor<2x3xf32>
  return %0, %b : tensor<2x3xf32>, tensor<4xi64> }"""
GOOD = [np.ones((2, 3), np.float32), np.arange(4, dtype=np.int64)]


@pytest.fixture(params=["pjrt", "fake"])
def device(request):
    device = PjrtDevice("cpu") if request.param == "pjrt" else FakeDevice()
    yield device
    device.close()


@pytest.fixture
def executable(device):
    return device.compile(TWO_ARGUMENTS)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (GOOD[:1], "takes 2 arguments, got 1"),
        ([*GOOD, GOOD[0]], "takes 2 arguments, got 3"),
        ([], "takes 2 arguments, got 0"),
        ([np.ones((3, 2), np.float32), GOOD[1]], r"argument 0 is f32\[3,2\], wanted f32\[2,3\]"),
        ([np.ones((2, 3), np.int32), GOOD[1]], r"argument 0 is i32\[2,3\], wanted f32\[2,3\]"),
        ([GOOD[0], np.ones((4, 1), np.int64)], r"argument 1 is i64\[4,1\], wanted i64\[4\]"),
        ([GOOD[0], np.ones(4, np.float64)], r"argument 1 is f64\[4\], wanted i64\[4\]"),
    ],
)
def test_a_launch_refuses_arguments_that_have_the_right_number_of_bytes_only(device, executable, arrays, words):
    buffers = [device.put(array) for array in arrays]
    with pytest.raises(DeviceError, match=words):
        device.launch(executable, buffers)
    device.free(buffers)


def test_a_freed_buffer_cannot_be_used(device, executable):
    buffers = [device.put(array) for array in GOOD]
    device.free(buffers[1:])
    with pytest.raises(DeviceError, match=r"argument 1 \(i64\[4\]\) was freed before the launch"):
        device.launch(executable, buffers)
    device.free(buffers)  # the second time for one of them


def test_freeing_an_argument_of_an_outstanding_launch_is_told_by_its_result(device, executable):
    buffers = [device.put(array) for array in GOOD]
    launch = device.launch(executable, buffers)
    device.free(buffers[:1])
    for _ in range(2):
        with pytest.raises(DeviceError, match="argument 0 was freed while its launch was outstanding"):
            launch.result()
    device.free(buffers)


def test_a_launch_leaves_its_arguments_as_they_were(device, executable):
    buffers = [device.put(array) for array in GOOD]
    first = device.launch(executable, buffers).result()
    second = device.launch(executable, buffers).result()
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)
    device.free(buffers)


def test_outputs_have_the_declared_types_are_read_only_and_outlive_their_arguments(device, executable):
    launch = device.launch(executable, buffers := [device.put(array) for array in GOOD])
    outputs = launch.result()
    before = [output.copy() for output in outputs]
    device.free(buffers)
    assert [(o.dtype, o.shape) for o in outputs] == [(np.float32, (2, 3)), (np.int64, (4,))]
    for output, copy in zip(outputs, before, strict=True):
        assert not output.flags.writeable
        assert output.flags.c_contiguous
        np.testing.assert_array_equal(output, copy)
    assert launch.result() is outputs


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.ones((2, 3), np.float32)),
        np.ones((4, 3), np.float32)[::2],
        np.ones((2, 6), np.float32)[:, :3],
    ],
)
def test_put_refuses_an_array_that_is_not_in_c_order(device, array):
    with pytest.raises(DeviceError, match=r"shape \(2, 3\) and strides .* is not in C order"):
        device.put(array)


@pytest.mark.parametrize("dtype", [">f4", "S3"])
def test_put_refuses_a_dtype_that_no_program_takes(device, dtype):
    with pytest.raises(DeviceError, match=r"shape \(2,\) cannot be put on the device"):
        device.put(np.zeros(2, dtype))


@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 4), np.float32), np.array(3.0), np.ones(5, ml_dtypes.bfloat16), np.array([True, False])],
    ids=["zero-size", "rank-0", "bf16", "bool"],
)
def test_a_buffer_knows_its_shape_dtype_and_size(device, array):
    buffer = device.put(array)
    assert (buffer.shape, buffer.dtype, buffer.nbytes) == (array.shape, array.dtype, array.nbytes)
    device.free([buffer])


def test_an_executable_of_another_device_is_refused(device):
    other = FakeDevice() if isinstance(device, PjrtDevice) else PjrtDevice("cpu")
    with pytest.raises(DeviceError, match="belongs to another device"):
        device.launch(other.compile(TWO_ARGUMENTS), [])


def test_a_closed_device_takes_no_work(device, executable):
    device.close()
    for attempt in (
        lambda: device.put(GOOD[0]),
        lambda: device.compile(TWO_ARGUMENTS),
        lambda: device.load(b"", executable.signature),
    ):
        with pytest.raises(DeviceError, match="device is closed"):
            attempt()


def test_dynamic_shapes_are_not_compiled(device):
    with pytest.raises(ProgramError, match=r"argument 0 is f32\[\?\]"):
        device.compile(b"func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> }")


def test_an_executable_survives_serialisation(device, executable):
    blob = device.serialize(executable)
    assert blob is not None
    again = device.load(blob, executable.signature)
    for one, two in zip(execute(device, executable, GOOD), execute(device, again, GOOD), strict=True):
        np.testing.assert_array_equal(one, two)


def test_execute_takes_any_memory_order_and_frees_its_buffers_also_after_an_error(device, executable):
    fortran = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    expected = execute(device, executable, [np.ascontiguousarray(fortran), GOOD[1]])
    np.testing.assert_array_equal(execute(device, executable, [fortran, GOOD[1]])[0], expected[0])
    with pytest.raises(DeviceError, match="takes 2 arguments, got 1"):
        execute(device, executable, [fortran])


def test_launches_of_several_threads_do_not_disturb_each_other(device, executable):
    failures = []

    def run(value):
        arrays = [np.full((2, 3), value, np.float32), np.full(4, value, np.int64)]
        alone = execute(device, executable, arrays)
        for _ in range(50):
            for one, two in zip(execute(device, executable, arrays), alone, strict=True):
                if not np.array_equal(one, two):
                    failures.append(value)

    threads = [threading.Thread(target=run, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_compile_options_survive_the_way_through_json():
    options = CompileOptions((("xla_gpu_autotune_level", 0), ("xla_cpu_prefer_vector_width", "256")))
    assert CompileOptions.from_json(options.to_json()) == options
