"""Arithmetic on the device: what the startup probe finds, and what each mode makes of products (worker spec 9, 14)."""

import numpy as np
import pytest

from rsrv.runtime import execute
from rsrv.serve import numerics
from rsrv.serve.loading.programs import ProgramJob
from rsrv.serve.numerics import numerics_for, probe
from rsrv.stablehlo.policy import tf32_capable

N = numerics.SIZE
TF32 = (
    ", algorithm = <lhs_precision_type = tf32, rhs_precision_type = tf32, accumulation_type = f32, "
    "lhs_component_count = 1, rhs_component_count = 1, num_primitive_operations = 1, "
    "allow_imprecise_accumulation = false>"
)
SUMMARIES = {"": "f32 (pinned 1 dot_general)", TF32: "f32 (rewrote 1 tf32 algorithm(s))"}


def dot(options="", dtype="f32"):
    kind = f"tensor<{N}x{N}x{dtype}>"
    product = f"stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]{options} : ({kind}, {kind}) -> {kind}"
    return f"func.func public @main(%a: {kind}, %b: {kind}) -> {kind} {{ %c = {product} return %c : {kind} }}".encode()


def conv():
    """A 3 × 3 convolution of 64 channels, as image recognition has them."""
    image, kernel = "tensor<1x32x32x64xf32>", "tensor<3x3x64x64xf32>"
    return f"""func.func public @main(%x: {image}, %k: {kernel}) -> {image} {{
      %y = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
        window = {{stride = [1, 1], pad = [[1, 1], [1, 1]]}}
        {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}} : ({image}, {kernel}) -> {image}
      return %y : {image} }}""".encode()


def run(device, source, program, mode, arrays):
    """The result, and what the mode did to the program."""
    job = ProgramJob.of("numerics", (), 0, program, numerics_for(mode, device).policy)
    loaded = source.load(job, source.find(job))
    return execute(device, loaded.executable, arrays)[0], loaded.compiled.summary


@pytest.fixture(scope="module")
def capable(device):
    return tf32_capable(device.platform, device.facts.get("compute capability"))


@pytest.fixture(scope="module")
def operands():
    """A matrix whose last bits TF32 loses, and the identity."""
    return [numerics._matrix(), np.eye(N, dtype=np.float32)]


def test_a_card_says_what_it_can_do(device):
    if device.platform == "cuda":
        assert device.facts.get("compute capability"), "without it no card counts as capable of TF32"


def test_the_probe_finds_tf32_exactly_where_the_device_has_it(device, source, capable):
    found = probe(numerics_for("auto", device), device, source)
    assert found.tf32_active is capable
    assert probe(numerics_for("f32", device), device, source).pinned_exact is True


@pytest.mark.parametrize("options", SUMMARIES, ids=["default", "tf32"])
def test_in_f32_a_product_is_exact(device, source, operands, options):
    product, summary = run(device, source, dot(options), "f32", operands)
    assert summary == SUMMARIES[options]
    np.testing.assert_array_equal(product, operands[0])


def test_in_auto_an_explicit_tf32_algorithm_runs_everywhere(device, source, operands, capable):
    product, summary = run(device, source, dot(TF32), "auto", operands)
    if capable:
        assert summary == "auto (tf32 active)"
        np.testing.assert_array_equal(product, np.ones_like(product))
    else:
        assert summary == "auto (stripped 1 tf32 algorithm(s): target lacks TF32)"
        np.testing.assert_array_equal(product, operands[0])


def test_in_f32_a_convolution_keeps_the_bits_that_tf32_loses(device, source):
    x = np.resize(numerics._matrix(), (1, 32, 32, 64))
    kernel = np.zeros((3, 3, 64, 64), np.float32)
    kernel[1, 1] = np.eye(64)
    y, summary = run(device, source, conv(), "f32", [x, kernel])
    assert summary == "f32 (pinned 1 convolution)"
    # Not bit for bit: an algorithm may transform its operands. TF32 would be off by up to 5e-4.
    np.testing.assert_allclose(y, x, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 2e-3), ("bf16", 1e-2)])
def test_in_f32_products_of_other_types_stay_as_they_are(device, source, dtype, tolerance):
    from rsrv.stablehlo import numpy_dtype

    made = np.random.default_rng(5)
    a, b = (made.uniform(-1, 1, (N, N)).astype(numpy_dtype(dtype)) for _ in range(2))
    product, summary = run(device, source, dot(dtype=dtype), "f32", [a, b])
    assert summary == "f32 (nothing to pin)"
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(product.astype(np.float64) - wanted).max() <= tolerance * np.abs(wanted).max()
