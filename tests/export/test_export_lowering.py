from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.core.errors import ExportError
from rsrv.export.inputs import resolve_examples
from rsrv.export.lowering import Model, Programs, computes_in_float64
from rsrv.export.params import flatten_params
from rsrv.stablehlo import report, serialize

WIDE = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
X = "x=f32[1,4]"


def programs(
    fn: Callable[..., Any], params: Any = None, inputs: Any = X, *, sizes: tuple[int, ...] = (1, 3), **options: Any
) -> Programs:
    model = Model(fn, flatten_params(params), resolve_examples(inputs))
    traces = [model.trace(size)[0] for size in sizes]
    return Programs.of(model, traces, drop_unused_inputs=options.get("drop_unused_inputs", False))


def weight_names(found: Programs) -> list[str]:
    return [weight.name for weight in found.weights]


def arguments(found: Programs, index: int, batch: int) -> list[str]:
    return [str(t) for t in report(serialize(found.lower(index, batch, "cpu"))).signature.arguments]


def test_the_entry_is_inputs_then_weights_and_nothing_else() -> None:
    found = programs(lambda p, x, y: x @ p["w"] + y + p["b"], {"w": WIDE, "b": WIDE[0]}, [X, "y=f32[1,8]"])
    assert arguments(found, 1, 3) == ["f32[3,4]", "f32[3,8]", "f32[4,8]", "f32[8]"]


def test_weights_that_no_output_depends_on_are_left_out_at_every_size() -> None:
    unused = programs(lambda p, x: (p["off"] + 1, x @ p["w"])[1], {"off": WIDE, "w": WIDE})
    assert weight_names(unused) == ["w"]
    assert unused.dropped_weights == ("off",)
    assert arguments(unused, 0, 1) == ["f32[1,4]", "f32[4,8]"]


def test_a_weight_that_only_one_size_uses_stays_in_all_programs() -> None:
    found = programs(lambda p, x: x @ p["w"] if x.shape[0] == 1 else x @ p["v"], {"w": WIDE, "v": WIDE})
    assert arguments(found, 0, 1) == ["f32[1,4]", "f32[4,8]", "f32[4,8]"]
    assert arguments(found, 1, 3) == ["f32[3,4]", "f32[4,8]", "f32[4,8]"]


def test_an_unused_input_is_refused_by_name_or_dropped_on_request() -> None:
    def fn(_: Any, x: Any, extra: Any) -> Any:
        return x * 2

    with pytest.raises(ExportError, match="no output depends on the input 'extra'"):
        programs(fn, None, [X, "extra=i32[1]"])
    dropped = programs(fn, None, [X, "extra=i32[1]"], drop_unused_inputs=True)
    assert dropped.dropped_inputs == ("extra",)
    assert arguments(dropped, 1, 3) == ["f32[3,4]"]
    with pytest.raises(ExportError, match="nothing to serve"):
        programs(lambda _, x: jnp.ones(3), None, drop_unused_inputs=True)


def test_large_captured_arrays_become_weights_in_order_of_use_and_small_ones_stay() -> None:
    first, second, small = jnp.asarray(WIDE), WIDE.T.copy(), jnp.float32(3)

    def fn(_: Any, x: Any) -> Any:
        return x @ first @ second * small + np.arange(4, dtype=np.float32)

    found = programs(fn)
    assert weight_names(found) == ["constant_0", "constant_1"] == list(found.lifted)
    np.testing.assert_array_equal(found.weights[0].numpy(), WIDE)
    np.testing.assert_array_equal(found.weights[1].numpy(), WIDE.T)
    assert arguments(found, 1, 3) == ["f32[3,4]", "f32[4,8]", "f32[8,4]"]


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        lambda f: jax.jit(jax.jit(f)),
        jax.checkpoint,
        lambda f: jax.checkpoint(jax.jit(f)),
        lambda f: jax.vmap(jax.jit(f)),
    ],
    ids=["jit", "nested jit", "checkpoint", "jit in checkpoint", "vmap of jit"],
)
def test_arrays_captured_by_inner_functions_are_lifted_too(wrap: Callable[..., Any]) -> None:
    table = jnp.asarray(WIDE)
    inner = wrap(lambda x: x @ table)
    found = programs(lambda _, x: jnp.tanh(inner(x)) + x @ table)
    assert weight_names(found) == ["constant_0"]
    assert arguments(found, 0, 1) == ["f32[1,4]", "f32[4,8]"]


@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp])
def test_arrays_captured_inside_functions_with_their_own_derivative_are_lifted(kind: Callable[..., Any]) -> None:
    table = jnp.asarray(WIDE)
    inner = jax.jit(lambda x: x @ table)
    custom = kind(lambda x: inner(x))
    if kind is jax.custom_jvp:
        custom.defjvp(lambda primals, tangents: (custom(*primals), inner(*tangents)))
    else:
        custom.defvjp(lambda x: (custom(x), None), lambda _, g: (g @ table.T,))
    found = programs(lambda _, x: custom(x))
    assert weight_names(found) == ["constant_0"]


def test_an_array_captured_inside_a_loop_is_lifted_when_the_loop_takes_it_and_refused_otherwise() -> None:
    square = jnp.asarray(np.eye(8, dtype=np.float32))

    def looped(step: Callable[..., Any]) -> Callable[..., Any]:
        return lambda _, x: jax.lax.scan(lambda carry, _: (step(carry), None), x, None, length=2)[0]

    assert weight_names(programs(looped(lambda c: c @ square), None, "x=f32[1,8]")) == ["constant_0"]
    with pytest.raises(ExportError, match=r"float32\[8,8\] is captured by a jitted function inside a loop") as raised:
        programs(looped(jax.jit(lambda c: c @ square)), None, "x=f32[1,8]")
    assert "parameter" in str(raised.value.hint)


def test_a_table_that_depends_on_the_batch_size_stays_in_its_program() -> None:
    def fn(_: Any, x: Any) -> Any:
        table = np.arange(x.shape[0] * 40, dtype=np.float32).reshape(x.shape[0], 40)
        return x[:, :1] + table

    found = programs(fn, sizes=(1, 3))
    assert weight_names(found) == []
    assert arguments(found, 1, 3) == ["f32[3,4]"]


def test_a_captured_table_of_a_dtype_that_bundles_do_not_hold_stays_in_the_program() -> None:
    table = np.exp(1j * np.arange(32)).astype(np.complex64)
    found = programs(lambda _, x: jnp.abs(x[:, :1] * table))
    assert weight_names(found) == []
    assert arguments(found, 0, 1) == ["f32[1,4]"]


def test_equal_captured_arrays_become_one_weight_and_names_avoid_those_of_parameters() -> None:
    one, same = WIDE.copy(), WIDE.copy()
    found = programs(lambda p, x: x @ one + x @ same + x @ p["constant_0"], {"constant_0": WIDE})
    assert weight_names(found) == ["constant_0", "constant_1"]


def test_dead_code_brings_no_weights() -> None:
    dead = jnp.asarray(WIDE)
    inner = jax.jit(lambda x: x @ dead)

    def fn(_: Any, x: Any) -> Any:
        inner(x)
        return x + 1

    assert weight_names(programs(fn)) == []


def test_a_random_key_that_matters_is_refused_by_name_and_one_that_does_not_is_ignored() -> None:
    key = jax.random.key(0)

    def noisy(p: Any, x: Any) -> Any:
        return x + jax.random.normal(p["rngs"]["key"], (4,), np.float32)

    with pytest.raises(ExportError, match=r"uses the random key 'rngs\.key' of params") as raised:
        programs(noisy, {"rngs": {"key": key}})
    assert "dropout off" in str(raised.value.hint)
    with pytest.raises(ExportError, match="captures a random key key<fry>"):
        programs(lambda _, x: x + jax.random.normal(key, (4,), np.float32))
    assert weight_names(programs(lambda p, x: x @ p["w"], {"key": key, "w": WIDE})) == ["w"]


def test_side_effects_and_callbacks_are_refused() -> None:
    def printing(_: Any, x: Any) -> Any:
        jax.debug.print("{}", x)
        return x + 1

    def calling(_: Any, x: Any) -> Any:
        return jax.jit(lambda y: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), y))(x)

    with pytest.raises(ExportError, match="does more than compute"):
        programs(printing)
    with pytest.raises(ExportError, match=r"does more than compute \(pure_callback\)"):
        programs(calling)


def test_an_error_of_the_function_shows_the_users_line() -> None:
    def broken(_: Any, x: Any) -> Any:
        return x @ np.zeros((5, 5), np.float32)

    with pytest.raises(ExportError) as raised:
        programs(broken)
    assert raised.value.message.startswith("tracing the function at batch size 1 raised TypeError")
    assert "return x @ np.zeros((5, 5)" in raised.value.message
    assert "site-packages" not in raised.value.message


def test_an_output_dtype_that_no_bundle_holds_is_named() -> None:
    model = Model(lambda _, x: {"spectrum": jnp.fft.fft(x)}, flatten_params(None), resolve_examples(X))
    with pytest.raises(ExportError, match=r"output 'spectrum' has dtype complex\d+"):
        model.trace(1)


def test_computing_in_float64_by_accident_is_noticed() -> None:
    def traces(fn: Callable[..., Any], inputs: Any = X) -> Any:
        return [Model(fn, flatten_params(None), resolve_examples(inputs)).trace(1)[0]]

    with jax.enable_x64(True):
        assert computes_in_float64(traces(lambda _, x: x + jnp.ones(4)))
        assert computes_in_float64(traces(lambda _, x: jax.jit(lambda y: (y + jnp.ones(4)).astype(np.float32))(x)))
        assert not computes_in_float64(traces(lambda _, x: x * 2.0 + jnp.ones(4, np.float32)))
        assert not computes_in_float64(traces(lambda _, x: x * 2.0, "x=f64[1,4]"))
