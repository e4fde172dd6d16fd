import gc
import subprocess
import sys
import weakref

import jax
import numpy as np
import pytest

from rsrv.core.errors import DeviceError, DeviceOutOfMemory, ProgramError
from rsrv.runtime import CompileOptions, PjrtDevice, execute
from rsrv.stablehlo import ProgramSignature, TensorType

DOUBLE = b"""func.func @main(%a: tensor<1024xf32>) -> tensor<1024xf32> {
  %0 = stablehlo.add %a, %a : tensor<1024xf32>
  return %0 : tensor<1024xf32> }"""


def aligned(count, offset=0):
    """`count` float32 whose address is `offset` bytes past a 64-byte boundary."""
    raw = np.zeros(count * 4 + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + count * 4].view(np.float32)


def test_aligned_memory_is_used_as_it_is_and_other_memory_is_copied(cpu):
    executable = cpu.compile(DOUBLE)
    for offset, seen in ((0, 14.0), (4, 2.0)):
        array = aligned(1024, offset)
        array[:] = 1
        buffer = cpu.put(array, alias=True)
        array[:] = 7
        assert cpu.launch(executable, [buffer]).result()[0][0] == seen
        cpu.free([buffer])


def test_without_alias_the_array_is_copied(cpu):
    array = aligned(1024)
    array[:] = 1
    buffer = cpu.put(array)
    array[:] = 7
    assert cpu.launch(cpu.compile(DOUBLE), [buffer]).result()[0][0] == 2.0
    cpu.free([buffer])


def test_an_aliased_array_is_kept_alive_until_it_is_freed(cpu):
    array = aligned(1024)
    alive = weakref.ref(array)
    buffer = cpu.put(array, alias=True)
    del array
    gc.collect()
    assert alive() is not None
    cpu.free([buffer])
    assert alive() is None


def test_an_output_does_not_alias_an_argument_that_passes_through(cpu):
    executable = cpu.compile(
        b"func.func @main(%a: tensor<1024xf32>) -> tensor<1024xf32> { return %a : tensor<1024xf32> }"
    )
    array = aligned(1024)
    array[:] = 3
    (output,) = execute(cpu, executable, [array])
    array[:] = 9
    assert output[0] == 3
    assert not np.shares_memory(output, array)


def test_outputs_are_aligned_so_that_they_can_be_aliased_again(cpu):
    (output,) = execute(cpu, cpu.compile(DOUBLE), [aligned(1024)])
    assert output.ctypes.data % 64 == 0


def test_a_donated_argument_survives_the_call(cpu):
    donating = DOUBLE.replace(b"%a: tensor<1024xf32>", b"%a: tensor<1024xf32> {tf.aliasing_output = 0 : i32}")
    executable = cpu.compile(donating)
    buffer = cpu.put(np.ones(1024, np.float32))
    for _ in range(2):
        assert cpu.launch(executable, [buffer]).result()[0].tolist() == [2.0] * 1024
    cpu.free([buffer])


def test_a_column_major_layout_in_the_program_does_not_transpose_the_data(cpu):
    text = b"""func.func @main(%a: tensor<2x3xf32> {mhlo.layout_mode = "{0,1}"})
      -> (tensor<2x3xf32> {mhlo.layout_mode = "{0,1}"}) {
      %0 = stablehlo.add %a, %a : tensor<2x3xf32>
      return %0 : tensor<2x3xf32> }"""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (output,) = execute(cpu, cpu.compile(text), [array])
    np.testing.assert_array_equal(output, array * 2)


def test_64_bit_elements_are_not_narrowed_and_jax_keeps_its_own_setting(cpu):
    before = jax.config.jax_enable_x64
    text = b"""func.func @main(%a: tensor<2xi64>, %b: tensor<2xf64>) -> (tensor<2xi64>, tensor<2xf64>) {
      return %a, %b : tensor<2xi64>, tensor<2xf64> }"""
    integers, floats = np.array([2**40 + 1, -(2**62)]), np.array([1 / 3, 1e300])
    outputs = execute(cpu, cpu.compile(text), [integers, floats])
    np.testing.assert_array_equal(outputs[0], integers)
    np.testing.assert_array_equal(outputs[1], floats)
    assert jax.config.jax_enable_x64 == before


def test_an_output_that_does_not_fit_is_out_of_memory(cpu):
    text = b"""func.func @main(%a: tensor<f32>) -> tensor<400000x400000xf32> {
      %0 = stablehlo.broadcast_in_dim %a, dims = [] : (tensor<f32>) -> tensor<400000x400000xf32>
      return %0 : tensor<400000x400000xf32> }"""
    with pytest.raises(DeviceOutOfMemory, match="execution failed: RESOURCE_EXHAUSTED"):
        execute(cpu, cpu.compile(text), [np.array(1, np.float32)])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "%0 = stablehlo.custom_call @nobody_has_this(%a) : (tensor<2xf32>) -> tensor<2xf32>",
            "cannot be compiled for cpu: NOT_FOUND.*nobody_has_this",
        ),
        (
            "%0 = arith.addf %a, %a : tensor<2xf32>",
            "uses dialect 'arith', re-export needed",
        ),
    ],
)
def test_a_program_that_xla_does_not_take_is_refused_with_its_reason(cpu, body, words):
    text = f"func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {{ {body}\n return %0 : tensor<2xf32> }}"
    with pytest.raises(ProgramError, match=words):
        cpu.compile(text.encode())


def test_compile_options_reach_xla(cpu):
    with pytest.raises(ProgramError, match="no_such_flag"):
        cpu.compile(DOUBLE, CompileOptions((("no_such_flag", True),)))
    assert cpu.compile(DOUBLE, CompileOptions((("xla_cpu_enable_fast_math", False),))).signature.arguments


@pytest.mark.parametrize("blob", [b"", b"garbage"])
def test_a_damaged_executable_is_an_error(cpu, blob):
    with pytest.raises(DeviceError, match=f"executable of {len(blob)} bytes cannot be loaded"):
        cpu.load(blob, ProgramSignature((), ()))


def test_an_executable_that_sorts_is_serialised_before_its_first_run_or_never(cpu):
    text = b"""func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
      %0 = "stablehlo.sort"(%a) ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %c = stablehlo.compare LT, %l, %r : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      }) {dimension = 0 : i64} : (tensor<4xf32>) -> tensor<4xf32>
      return %0 : tensor<4xf32> }"""
    executable = cpu.compile(text)
    blob = cpu.serialize(executable)
    assert blob is not None
    array = np.array([3, 1, 2, 0], np.float32)
    assert execute(cpu, executable, [array])[0].tolist() == [0, 1, 2, 3]
    assert cpu.serialize(executable) is None
    assert execute(cpu, cpu.load(blob, executable.signature), [array])[0].tolist() == [0, 1, 2, 3]


def test_scratch_is_temporaries_and_outputs(cpu):
    executable = cpu.compile(DOUBLE)
    assert executable.scratch_bytes == 4096
    blob = cpu.serialize(executable)
    assert cpu.load(blob, executable.signature).scratch_bytes == 4096


def test_the_cpu_counts_no_memory_and_is_unified(cpu):
    assert (cpu.platform, cpu.unified, cpu.memory()) == ("cpu", True, None)


def test_an_ordinal_that_does_not_exist_is_named():
    with pytest.raises(DeviceError, match=r"device ordinal 7 does not exist, cpu has 1 device"):
        PjrtDevice("cpu", ordinal=7)


def test_a_program_without_arguments_or_without_results_runs(cpu):
    constant = b"""func.func @main() -> (tensor<0x4xf32>, tensor<f32>) {
      %0 = stablehlo.constant dense<> : tensor<0x4xf32>
      %1 = stablehlo.constant dense<2.5> : tensor<f32>
      return %0, %1 : tensor<0x4xf32>, tensor<f32> }"""
    empty, scalar = execute(cpu, cpu.compile(constant), [])
    assert empty.shape == (0, 4)
    assert scalar.shape == ()
    assert scalar == 2.5
    assert execute(cpu, cpu.compile(b"func.func @main(%a: tensor<2xi8>) { return }"), [np.zeros(2, np.int8)]) == []


@pytest.mark.parametrize(
    "element",
    ["f32", "f64", "f16", "bf16", "f8E4M3FN", "f8E5M2", "i1", "i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64",
     "complex<f32>", "complex<f64>", "i4", "ui4", "f4E2M1FN"],
)  # fmt: skip
def test_every_element_type_goes_through_unchanged(cpu, element):
    tensor = TensorType(element, (3, 2))
    from rsrv.stablehlo import numpy_dtype

    text = (
        f"func.func @main(%a: tensor<3x2x{element}>) -> tensor<3x2x{element}> {{ return %a : tensor<3x2x{element}> }}"
    )
    executable = cpu.compile(text.encode())
    assert executable.signature == ProgramSignature((tensor,), (tensor,))
    array = np.array([[1, 0], [1, 1], [0, 1]]).astype(numpy_dtype(element))
    (output,) = execute(cpu, executable, [array])
    assert output.dtype == array.dtype
    assert not output.flags.writeable
    np.testing.assert_array_equal(output, array)


def test_opening_a_device_is_silent_and_leaves_the_backends_of_jax_alone():
    code = (
        "from rsrv.runtime import PjrtDevice; PjrtDevice('cpu')\n"
        "from jax._src import xla_bridge; print(xla_bridge._backends)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{}"
    assert done.stderr == ""
