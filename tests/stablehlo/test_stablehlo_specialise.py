"""Programs with a symbolic batch axis: one program becomes the program of any batch size, or says why it cannot."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.core.errors import ProgramError
from rsrv.runtime import execute, open_device
from rsrv.stablehlo import apply, parse, report, serialize, specialised
from rsrv.stablehlo.policy import Policy
from rsrv.stablehlo.specialise import without_assertions

W = np.random.default_rng(1).standard_normal((8, 16), dtype=np.float32)


def model(x, w):
    """Operations whose shapes depend on the batch in every way: broadcasts, top_k, windows, a scan, a counter."""
    h = jax.nn.gelu(x @ w, approximate=False)
    windows = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME")
    sums = jax.lax.scan(lambda carry, column: (carry + column, None), jnp.zeros(x.shape[0]), x.T)[0]
    return jax.lax.top_k(h, 3)[0], jax.nn.softmax(windows) + jnp.ones((x.shape[0], 1)), sums, jnp.arange(x.shape[0])


def symbolic(fn, *specs, constraints=()):
    """`fn` exported by JAX; "b" in a shape is the symbol."""
    (b,) = jax.export.symbolic_shape("b", constraints=constraints)
    arguments = [jax.ShapeDtypeStruct([b if s == "b" else s for s in shape], jnp.float32) for shape in specs]
    return jax.export.export(jax.jit(fn, keep_unused=True), platforms=("cpu",))(*arguments).mlir_module_serialized


@pytest.fixture(scope="module")
def program():
    return serialize(without_assertions(parse(symbolic(model, ("b", 8), (8, 16)))))


@pytest.fixture(scope="module")
def device():
    device = open_device("cpu")
    yield device
    device.close()


def entry(body, *, x="?x3", y="?x3"):
    return f"module {{ func.func public @main(%x: tensor<{x}xf32>) -> tensor<{y}xf32> {{ {body} }} }}".encode()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_specialised_program_computes_what_jax_jit_computes(program, device, batch):
    x = np.random.default_rng(batch).standard_normal((batch, 8), dtype=np.float32)
    executable = device.compile(specialised(program, batch))
    assert [tensor.shape[0] for tensor in executable.signature.results] == [batch] * 4
    for found, wanted in zip(execute(device, executable, [x, W]), jax.jit(model)(x, W), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_the_written_program_has_one_symbol_and_asserts_nothing(program):
    found = report(program)
    assert [str(tensor) for tensor in found.signature.arguments] == ["f32[?,8]", "f32[8,16]"]
    assert found.custom_calls == ()
    assert found.stablehlo_version == "1.13.7"


def test_assertions_of_other_exporters_are_checked_and_gone_afterwards():
    program = symbolic(lambda x: x * 2, ("b", 3), constraints=["b>=4"])
    assert report(program).custom_calls == ("shape_assertion",)
    assert report(specialised(program, 4)).custom_calls == ()
    with pytest.raises(ProgramError, match=r"cannot be specialised to batch size 3: .*constraint b>=4") as raised:
        specialised(program, 3)
    assert raised.value.rule == "B-12a"


def test_text_is_specialised_like_an_artifact():
    text = entry("%0 = stablehlo.add %x, %x : tensor<?x3xf32> return %0 : tensor<?x3xf32>")
    assert [str(tensor) for tensor in report(specialised(text, 5)).signature.results] == ["f32[5,3]"]


def test_every_batched_argument_gets_the_size():
    program = symbolic(lambda x, y: (x + y, y), ("b", 3), ("b", 3))
    signature = report(specialised(program, 6)).signature
    assert {str(tensor) for tensor in (*signature.arguments, *signature.results)} == {"f32[6,3]"}


def test_what_cannot_be_specialised_says_why():
    static = entry("return %x : tensor<4x3xf32>", x="4x3", y="4x3")
    with pytest.raises(ProgramError, match="program has no symbolic axis") as raised:
        specialised(static, 4)
    assert "--dynamic-batch" in raised.value.hint
    with pytest.raises(ProgramError, match=r"argument 0 is f32\[\?,\?\]; one axis, the batch, may be symbolic"):
        specialised(entry("return %x : tensor<?x?xf32>", x="?x?", y="?x?"), 4)
    fixed = entry(
        "%c = stablehlo.constant dense<1.0> : tensor<4x3xf32> "
        "%0 = stablehlo.add %x, %c : (tensor<?x3xf32>, tensor<4x3xf32>) -> tensor<?x3xf32> return %0 : tensor<?x3xf32>"
    )
    assert report(specialised(fixed, 4)).signature.results[0].shape == (4, 3)
    with pytest.raises(ProgramError, match=r"batch size 5: 'stablehlo\.add' op requires the same shape"):
        specialised(fixed, 5)


def test_a_result_whose_size_depends_on_values_is_refused():
    text = b"""module { func.func public @main(%x: tensor<?xf32>, %n: tensor<1xi32>) -> tensor<?xf32> {
      %0 = stablehlo.dynamic_reshape %x, %n : (tensor<?xf32>, tensor<1xi32>) -> tensor<?xf32>
      return %0 : tensor<?xf32> } }"""
    with pytest.raises(ProgramError, match=r"'stablehlo\.dynamic_reshape' op has dynamic shapes"):
        specialised(text, 4)


def test_a_batch_size_is_part_of_a_policy(program):
    assert Policy.from_json(Policy(batch=8).to_json()) == Policy(batch=8)
    applied = apply(program, Policy(numerics="f32", batch=8))
    assert applied.summary == "f32 (pinned 1 dot_general)"
    assert report(applied.program).signature.arguments[0].shape == (8, 8)
