"""A card as the device protocol promises it: compile, put, launch, free, count, and run out of memory."""

import gc

import ml_dtypes
import numpy as np
import pytest

from rsrv.core.errors import DeviceError, DeviceOutOfMemory
from rsrv.runtime import execute, open_cache
from rsrv.runtime.fingerprint import fingerprint
from rsrv.runtime.options import compile_options
from rsrv.runtime.probe import require_usable_options
from rsrv.serve.loading import ProgramSource
from rsrv.serve.loading.programs import ProgramJob
from rsrv.serve.residency.probe import Reading, scratch_from_peaks
from rsrv.stablehlo.signature import element_type

MIB = 1 << 20
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int64, np.uint64, np.bool_]
ADD = b"""func.func public @main(%x: tensor<256xf32>, %y: tensor<256xf32>) -> tensor<256xf32> {
  %0 = stablehlo.add %x, %y : tensor<256xf32>
  return %0 : tensor<256xf32> }"""
MATRIX = "tensor<1024x1024xf32>"
# Two products whose operands are computed first, so that there is something to keep in between.
PRODUCTS = f"""func.func public @main(%x: {MATRIX}) -> {MATRIX} {{
  %0 = stablehlo.exponential %x : {MATRIX}
  %1 = stablehlo.dot_general %0, %x, contracting_dims = [1] x [0] : ({MATRIX}, {MATRIX}) -> {MATRIX}
  %2 = stablehlo.dot_general %1, %0, contracting_dims = [1] x [0] : ({MATRIX}, {MATRIX}) -> {MATRIX}
  return %2 : {MATRIX} }}""".encode()


def load(source, program):
    job = ProgramJob.of("gpu", (), 0, program)
    return source.load(job, source.find(job))


@pytest.fixture(scope="module")
def add(source):
    return load(source, ADD).executable


def test_a_program_that_a_compile_process_made_runs_here(device, source):
    executable = load(source, ADD).executable
    x = np.arange(256, dtype=np.float32)
    (result,) = execute(device, executable, [x, 2 * x])
    np.testing.assert_array_equal(result, 3 * x)
    assert not result.flags.writeable


def test_an_executable_from_the_cache_computes_the_same(device, pool, tmp_path):
    x = np.ones(256, np.float32)
    origins = []
    for _ in range(2):
        cache = open_cache(str(tmp_path / "cache"), fingerprint(device), None)
        loaded = load(ProgramSource(device=device, pool=pool, cache=cache), ADD)
        origins.append(loaded.origin)
        np.testing.assert_array_equal(execute(device, loaded.executable, [x, x])[0], x + x)
        cache.close()
    assert origins == ["compiled", "cache"]


def test_every_dtype_keeps_its_bits(device):
    kinds = [element_type(np.dtype(dtype)) for dtype in DTYPES]
    arguments = ", ".join(f"%a{i}: tensor<8x{kind}>" for i, kind in enumerate(kinds))
    results = ", ".join(f"tensor<8x{kind}>" for kind in kinds)
    names = ", ".join(f"%a{i}" for i in range(len(kinds)))
    program = f"func.func public @main({arguments}) -> ({results}) {{ return {names} : {results} }}"
    raw = np.random.default_rng(3).integers(0, 100, 64, np.uint8)
    arrays = [(raw[:8] % 2 == 0) if dtype is np.bool_ else raw[:8].astype(dtype) for dtype in DTYPES]
    arrays[1] = np.array([np.pi * 1e300, 2.0**-1000, -0.0, np.inf, 1, 2, 3, 4])
    arrays[6] = np.array([2**63 - 1, -(2**63), 0, -1, 2**40, 5, 6, 7])
    for array, result in zip(arrays, execute(device, device.compile(program.encode()), arrays), strict=True):
        assert result.dtype == array.dtype
        assert result.tobytes() == array.tobytes()


def test_an_array_may_change_as_soon_as_it_was_put(device, add):
    x, zeros = np.full(256, 7, np.float32), np.zeros(256, np.float32)
    buffers = [device.put(x), device.put(zeros)]
    x[:] = 0
    (result,) = device.launch(add, buffers).result()
    device.free(buffers)
    np.testing.assert_array_equal(result, np.full(256, 7, np.float32))


def test_a_buffer_that_was_freed_cannot_be_used(device, add):
    buffers = [device.put(np.ones(256, np.float32)) for _ in range(2)]
    launch = device.launch(add, buffers)
    device.free(buffers[:1])
    with pytest.raises(DeviceError, match="argument 0 was freed while its launch was outstanding"):
        launch.result()
    with pytest.raises(DeviceError, match=r"argument 0 \(f32\[256\]\) was freed before the launch"):
        device.launch(add, buffers)
    device.free(buffers)


@pytest.mark.parametrize("keys", [{"autotune": False}, {"autotune_cache": True}], ids=["off", "cached"])
def test_the_keys_of_autotuning_are_options_that_xla_takes(device, pool, tmp_path, keys):
    options = compile_options(platform="cuda", autotune_cache_dir=str(tmp_path), **keys)
    assert options.overrides
    require_usable_options(pool, options)
    tuned = ProgramSource(device=device, pool=pool, options=options)
    x = np.full((1024, 1024), 1e-3, np.float32)
    (result,) = execute(device, load(tuned, PRODUCTS).executable, [x])
    np.testing.assert_allclose(result, np.exp(x) @ x @ np.exp(x), rtol=1e-2)


def test_memory_is_counted_and_comes_back_at_once(card):
    gc.collect()
    before = card.memory()
    assert 0 <= before.bytes_in_use <= before.peak_bytes_in_use <= before.bytes_limit
    buffers = [card.put(np.ones(4 * MIB, np.uint8)) for _ in range(4)]
    during = card.memory()
    assert 16 * MIB <= during.bytes_in_use - before.bytes_in_use <= 17 * MIB
    card.free(buffers)
    after = card.memory()
    assert after.bytes_in_use == before.bytes_in_use
    assert after.peak_bytes_in_use >= during.bytes_in_use
    assert after.largest_free_block_bytes is None or 0 < after.largest_free_block_bytes <= after.bytes_limit


def test_what_does_not_fit_is_refused_and_the_device_goes_on(card):
    program = card.compile(ADD)
    before = card.memory()
    with pytest.raises(DeviceOutOfMemory):
        card.put(np.zeros(before.bytes_limit + MIB, np.uint8))
    x = np.ones(256, np.float32)
    execute(card, program, [x, x])
    assert card.memory().bytes_in_use == before.bytes_in_use


def test_the_peak_shows_at_least_what_the_compiler_says(device, source):
    program = load(source, PRODUCTS).executable
    assert program.scratch_bytes >= 4 * MIB, "its result alone takes that"
    x = np.full((1024, 1024), 1e-3, np.float32)
    before = device.memory()
    execute(device, program, [x])
    if before is None:
        pytest.skip("the CPU does not count its memory")
    measured = scratch_from_peaks([Reading(0, before.bytes_in_use, device.memory().peak_bytes_in_use)])
    assert measured >= program.scratch_bytes + x.nbytes
