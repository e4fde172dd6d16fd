"""The numerics vectors of the worker's specification (§14): strip, pin, what is left alone, what cannot be governed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.core.errors import ProgramError
from rsrv.runtime import execute, open_device
from rsrv.stablehlo import apply, parse, report, serialize, tf32_capable
from rsrv.stablehlo.mlir import ir
from rsrv.stablehlo.numerics import Pinned, pin, require_pinned, strip_tf32, ungoverned
from rsrv.stablehlo.policy import Policy

TF32 = (
    "algorithm = <lhs_precision_type = tf32, rhs_precision_type = tf32, accumulation_type = f32, "
    "lhs_component_count = 1, rhs_component_count = 1, num_primitive_operations = {operations}, "
    "allow_imprecise_accumulation = false>"
)
BF16 = TF32.format(operations=1).replace("tf32", "bf16")


def dot(options="", dtype="f32"):
    """``y = x · x`` with 4 × 4 matrices, in an inner function as well."""
    kind = f"tensor<4x4x{dtype}>"
    product = f"stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]{options} : ({kind}, {kind}) -> {kind}"
    return f"module {{ func.func public @main(%x: {kind}) -> {kind} {{ %0 = {product} return %0 : {kind} }} }}".encode()


def attributes(program):
    """Names and texts of the attributes of the products in `program`, each with its operation's name."""
    found = []

    def visit(operation):
        if operation.name in ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.dot"):
            there = operation.attributes
            named = {name: str(there[name]) for name in ("algorithm", "precision_config") if name in there}
            found.append((operation.name, named))
        return ir.WalkResult.ADVANCE

    (parse(program) if isinstance(program, bytes) else program).operation.walk(visit)
    return found


def lowered(fn, *specs):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]
    return serialize(jax.jit(fn).lower(*arguments).compiler_ir("stablehlo"))


def test_cards_from_ampere_on_can_run_tf32_and_nothing_else_can():
    assert all(tf32_capable("cuda", capability) for capability in ("8.0", "8.6", "9.0", "12.0"))
    assert not any(
        tf32_capable(platform, capability)
        for platform, capability in (
            ("cuda", "7.5"),
            ("cpu", None),
            ("cpu", "9.0"),
            ("rocm", "9.0"),
            ("fake", "9.0"),
            ("cuda", None),
            ("cuda", "unknown"),
            ("cuda", ""),
        )
    )


@pytest.mark.parametrize("operations", [1, 3])
def test_stripping_takes_a_tf32_algorithm_out_once(operations):
    module = parse(dot(", " + TF32.format(operations=operations)))
    assert [strip_tf32(module), strip_tf32(module)] == [1, 0]
    assert attributes(module) == [("stablehlo.dot_general", {})]


@pytest.mark.parametrize("operations", [1, 3])
def test_pinning_turns_a_tf32_algorithm_into_the_float32_one_without_a_precision(operations):
    module = parse(dot(", " + TF32.format(operations=operations)))
    assert [pin(module), pin(module)] == [Pinned(algorithms=1), Pinned()]
    ((_, found),) = attributes(module)
    assert found["algorithm"].count("= f32") == 3
    assert "num_primitive_operations = 1" in found["algorithm"]
    assert "HIGHEST" not in found.get("precision_config", "")
    require_pinned(module)


def test_a_dot_is_pinned_once():
    module = parse(dot())
    assert [pin(module), pin(module)] == [Pinned(dots=1), Pinned()]
    ((_, found),) = attributes(module)
    assert found["precision_config"].count("HIGHEST") == 2
    assert not pin(parse(dot(", precision = [HIGHEST, HIGHEST]")))
    assert pin(parse(dot(", precision = [HIGHEST, DEFAULT]"))) == Pinned(dots=1)


@pytest.mark.parametrize(("options", "dtype"), [("", "f16"), ("", "bf16"), ("", "f64"), (", " + BF16, "f32")])
def test_other_types_and_other_algorithms_are_left_alone(options, dtype):
    program = dot(options, dtype)
    applied = apply(program, Policy("f32"))
    assert applied.program is program
    assert applied.summary == "f32 (nothing to pin)"


def test_products_in_loops_branches_and_functions_are_pinned():
    def fn(x, w):
        x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w), x)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jax.jit(lambda x: x @ w.T)(x), x)

    matrix = ((4, 4), jnp.float32)
    applied = apply(lowered(fn, matrix, matrix), Policy("f32"))
    assert applied.summary == "f32 (pinned 3 dot_general)"
    assert all("HIGHEST" in found["precision_config"] for _, found in attributes(applied.program))


def test_convolutions_and_legacy_dots_are_pinned():
    image, kernel = ((1, 8, 8, 3), jnp.float32), ((3, 3, 3, 4), jnp.float32)

    def conv(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert apply(lowered(conv, image, kernel), Policy("f32")).summary == "f32 (pinned 1 convolution)"
    legacy = b"""module { func.func public @main(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
      %0 = stablehlo.dot %x, %x : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      return %0 : tensor<4x4xf32> } }"""
    assert apply(legacy, Policy("f32")).summary == "f32 (pinned 1 dot_general)"


def test_a_product_that_stays_unpinned_fails_the_model():
    require_pinned(parse(dot(dtype="f16")))
    for program in (dot(), dot(", " + TF32.format(operations=1))):
        with pytest.raises(ProgramError, match=r"a stablehlo.dot_general of the program could not be pinned"):
            require_pinned(parse(program))


def test_what_no_attribute_reaches_is_named():
    program = lowered(lambda x: jnp.linalg.eigh(x @ x.T)[0], ((4, 4), jnp.float32))
    applied = apply(program, Policy("f32"))
    assert applied.summary == "f32 (pinned 1 dot_general, UNGOVERNED opaque ops: lapack_ssyevd_ffi)"
    assert applied.warnings == ("no setting governs the arithmetic of lapack_ssyevd_ffi",)
    solver = b"""module { func.func public @main(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
      %0 = stablehlo.cholesky %x, lower = true : tensor<4x4xf32>
      %1 = "stablehlo.triangular_solve"(%0, %x) <{left_side = true, lower = true, unit_diagonal = false,
        transpose_a = #stablehlo<transpose NO_TRANSPOSE>}>
        : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      return %1 : tensor<4x4xf32> } }"""
    assert apply(solver, Policy("f32")).summary == "f32 (UNGOVERNED opaque ops: cholesky, triangular_solve)"
    assert ungoverned(parse(lowered(lambda x: jax.lax.top_k(x, 2)[0], ((4, 4), jnp.float32)))) == ()


def test_each_mode_says_what_it_did():
    tf32 = dot(", " + TF32.format(operations=1))
    plain = dot()
    assert apply(plain, Policy("tf32", True)).summary == "tf32"
    assert apply(tf32, Policy("auto", True)).summary == "auto (tf32 active)"
    assert apply(tf32, Policy("auto", True)).program is tf32
    assert apply(plain, Policy("auto")).summary == "auto (f32: target lacks TF32)"
    assert apply(plain, Policy("auto")).program is plain
    stripped = apply(tf32, Policy("auto"))
    assert stripped.summary == "auto (stripped 1 tf32 algorithm(s): target lacks TF32)"
    assert stripped.warnings == ("stripped 1 tf32 algorithm(s): target lacks TF32",)
    assert attributes(stripped.program) == [("stablehlo.dot_general", {})]
    assert apply(tf32, Policy("f32")).summary == "f32 (rewrote 1 tf32 algorithm(s))"


def test_a_pinned_program_compiles_and_computes_the_same_on_a_cpu():
    device = open_device("cpu")
    x = np.random.default_rng(0).standard_normal((4, 4), dtype=np.float32)
    for options in ("", ", " + TF32.format(operations=1), ", " + TF32.format(operations=3)):
        for policy in (Policy("f32"), Policy("auto")):
            program = apply(dot(options), policy).program
            assert report(program).signature == report(dot()).signature
            np.testing.assert_allclose(execute(device, device.compile(program), [x])[0], x @ x, rtol=1e-5)
    device.close()
