from __future__ import annotations

import collections
import dataclasses
from typing import Any

import equinox as eqx
import flax.core
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from rsrv.core.errors import ExportError
from rsrv.export.params import flatten_params, named_weights


def names(params: Any) -> list[str]:
    return [weight.name for weight in flatten_params(params).weights]


def arr(value: float = 0.0) -> np.ndarray:
    return np.full(2, value, np.float32)


def test_dicts_keep_the_order_in_which_they_were_written() -> None:
    assert names({"z": {"kernel": arr(), "bias": arr()}, "a": arr()}) == ["z.kernel", "z.bias", "a"]


def test_sequences_are_numbered_from_zero() -> None:
    assert names([{"w": arr()}, (arr(), arr())]) == ["0.w", "1.0", "1.1"]


def test_named_tuples_ordered_dicts_and_registered_dataclasses_use_their_fields() -> None:
    Point = collections.namedtuple("Point", "y x")

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        weight: Any
        bias: Any

    params = collections.OrderedDict(b=Point(arr(), arr()), a=Layer(arr(), arr()))
    assert names(params) == ["b.y", "b.x", "a.weight", "a.bias"]


def test_frozen_dicts_are_walked_like_dicts() -> None:
    assert names(flax.core.freeze({"z": arr(), "a": {"y": arr(), "b": arr()}})) == ["z", "a.y", "a.b"]


def test_a_box_around_one_array_adds_no_name() -> None:
    _, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert sorted(names(state)) == ["bias", "kernel"]
    assert sorted(names({"a": nnx.Linear(2, 3, rngs=nnx.Rngs(0))})) == ["a.bias", "a.kernel"]


def test_an_equinox_module_may_be_partitioned_or_whole() -> None:
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    arrays, _ = eqx.partition(model, eqx.is_array)
    expected = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert names(arrays) == expected
    assert names(model) == expected


def test_a_bare_array_is_called_param() -> None:
    assert names(arr()) == ["param"]


def test_a_repeated_dotted_name_is_told_apart_in_order() -> None:
    assert names({"a.b": arr(), "a": {"b": arr(), "b~1": arr()}}) == ["a.b", "a.b~1", "a.b~1~1"]


def test_rebuilding_puts_each_value_where_its_weight_was() -> None:
    params = {"z": arr(1), "a": [arr(2), "text", None, 3.0], "m": flax.core.freeze({"y": arr(4), "b": arr(5)})}
    flat = flatten_params(params)
    rebuilt = flat.rebuild([weight.name for weight in flat.weights])
    assert rebuilt == {"z": "z", "a": ["a.0", "text", None, 3.0], "m": flax.core.freeze({"y": "m.y", "b": "m.b"})}


def test_values_are_the_users_own_arrays_without_a_copy() -> None:
    value = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    (weight,) = flatten_params({"w": value}).weights
    host = weight.numpy()
    assert host.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(host, np.asarray(value))
    np.testing.assert_array_equal(host, np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16))


def test_a_transposed_array_and_a_scalar_come_out_in_c_order_with_their_shape() -> None:
    flat = flatten_params({"t": np.arange(6.0).reshape(2, 3).T, "s": np.float32(3)})
    transposed, scalar = (weight.numpy() for weight in flat.weights)
    assert transposed.flags.c_contiguous
    np.testing.assert_array_equal(transposed, [[0, 3], [1, 4], [2, 5]])
    assert scalar.shape == ()
    assert scalar == 3


def test_nothing_at_all_is_a_model_without_weights() -> None:
    assert names({}) == []
    assert names(None) == []
    assert names(()) == []


def test_leaves_without_any_array_are_refused_with_their_types() -> None:
    @dataclasses.dataclass
    class Opaque:
        w: Any

    with pytest.raises(ExportError, match="no array, only Opaque, str") as raised:
        flatten_params([Opaque(arr()), "text"])
    assert "register_dataclass" in str(raised.value.hint)


def test_an_array_that_no_bundle_can_hold_is_named() -> None:
    with pytest.raises(ExportError, match=r"weight 'a\.w': dtype complex64 is not supported"):
        flatten_params({"a": {"w": np.zeros(2, np.complex64)}})
    with pytest.raises(ExportError, match="weight 'w' is a ShapeDtypeStruct, want an array"):
        flatten_params({"w": jax.ShapeDtypeStruct((2,), np.float32)})


def test_a_random_key_is_no_weight_but_is_remembered_by_name() -> None:
    key = jax.random.key(0)
    flat = flatten_params({"rngs": {"key": key}, "w": arr()})
    assert [weight.name for weight in flat.weights] == ["w"]
    assert flat.random_keys == {id(key): "rngs.key"}


def test_named_weights_keep_their_order_and_refuse_repetitions() -> None:
    flat = named_weights([("b", arr(1)), ("a", arr(2))])
    assert [weight.name for weight in flat.weights] == ["b", "a"]
    assert flat.rebuild([1, 2]) == [1, 2]
    with pytest.raises(ExportError, match="two weights are named 'a'"):
        named_weights([("a", arr()), ("a", arr())])
    with pytest.raises(ExportError, match="weight 'a' is a list, want an array"):
        named_weights([("a", [1.0])])
    with pytest.raises(ExportError, match="weight name '' is not"):
        named_weights([("", arr())])
