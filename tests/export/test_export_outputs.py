from __future__ import annotations

import collections
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.core.errors import ExportError
from rsrv.export.outputs import named_outputs

A, B = jnp.zeros(1), jnp.ones(2)


def described(result: Any, names: list[str] | None = None) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, value.shape) for name, value in named_outputs(result, names)]


def test_one_array_is_called_output() -> None:
    assert described(A) == [("output", (1,))]
    assert described(A, ["y"]) == [("y", (1,))]
    assert described(3.0) == [("output", ())]


def test_tuples_and_lists_are_numbered_and_named_tuples_bring_their_fields() -> None:
    Pair = collections.namedtuple("Pair", "mean std")
    assert described((A, B)) == [("output_0", (1,)), ("output_1", (2,))]
    assert described([A]) == [("output", (1,))]
    assert described(Pair(A, B)) == [("mean", (1,)), ("std", (2,))]
    assert described(Pair(A, B), ["m", "s"]) == [("m", (1,)), ("s", (2,))]


def test_a_dict_keeps_its_own_order_unless_names_reorder_it() -> None:
    assert described({"z": A, "a": B}) == [("z", (1,)), ("a", (2,))]
    assert described({"z": A, "a": B}, ["a", "z"]) == [("a", (2,)), ("z", (1,))]


@pytest.mark.parametrize(
    ("result", "names", "says"),
    [
        ((A, B), ["only"], "returns 2 outputs"),
        ((A, B), ["y", "y"], "two outputs are named 'y'"),
        (A, "y", "output_names is 'y'"),
        ({"z": A}, ["other"], "returns a dict with the keys z"),
        ({0: A}, None, "with the key 0"),
        ((A, (B,)), None, "output 1 ('output_1') is a tuple, want an array"),
        ({"a": {"b": A}}, None, "output 0 ('a') is a dict, want an array"),
        ((A, None), None, "output 1 ('output_1') is a NoneType"),
        ("text", None, "returned a str"),
        (None, None, "returned a NoneType"),
        ((), None, "returned no array"),
        ({}, None, "returned no array"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_position(result: Any, names: Any, says: str) -> None:
    with pytest.raises(ExportError) as raised:
        named_outputs(result, names)
    assert says in raised.value.message


def test_numpy_results_become_arrays() -> None:
    ((name, value),) = named_outputs(np.arange(3, dtype=np.int8), None)
    assert name == "output"
    np.testing.assert_array_equal(np.asarray(value), [0, 1, 2])
