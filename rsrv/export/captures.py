"""Arrays that a function closes over: found in its trace, and made arguments, so that they can be weights.

A program that holds a large array as a constant is slow to compile and cannot share or replace its weights; a captured
random key means that the model is not deterministic. What cannot be lifted is refused here by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.interpreters import partial_eval

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.params import Weight, is_random_key

LIFT_ABOVE = 16
"""A captured array with more elements than this becomes a weight; smaller ones stay constants of the program."""

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "remat"})
"""Primitives that only call their one inner function; replacing the call by its body changes no value."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A function traced at one batch size, without dead code; `jaxpr` takes ``captured…, arguments…``."""

    jaxpr: jex.Jaxpr
    captured: tuple[Any, ...]
    used: tuple[bool, ...]
    """Per argument: whether a result depends on it."""


def capture(closed: jex.ClosedJaxpr, random_keys: Mapping[int, str]) -> Trace:
    """Bring every captured array of `closed` to the surface. Raises ExportError for what cannot be a weight."""
    _refuse_effects(closed)
    if _captures(closed.jaxpr):
        closed = jax.make_jaxpr(lambda *args: _inline(closed.jaxpr, closed.consts, args))(*closed.in_avals)
    open_jaxpr = closed.jaxpr.replace(constvars=(), invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    count = len(closed.consts)
    keep = [False] * count + [True] * (len(open_jaxpr.invars) - count)
    _, used = partial_eval.dce_jaxpr(open_jaxpr, True)
    live, kept = partial_eval.dce_jaxpr(open_jaxpr, True, instantiate=keep)
    captured = tuple(value for value, wanted in zip(closed.consts, kept, strict=False) if wanted)
    for value in captured:
        _refuse_random_key(value, random_keys)
    for value in _inner_consts(live):
        _refuse_random_key(value, random_keys)
        if np.size(value) > LIFT_ABOVE:
            raise ExportError(
                f"an array {_shown(value)} is captured by a jitted function inside a loop or branch and cannot be "
                "made a weight",
                hint="pass the array as a parameter of the model",
            )
    return Trace(live, captured, tuple(used[count:]))


def lift(traces: Sequence[Trace], taken: set[str]) -> tuple[tuple[Weight, ...], list[list[int | None]]]:
    """Choose which captured arrays become weights ``constant_0``, ``constant_1``, …

    An array is lifted when it is larger than `LIFT_ABOVE`, of a dtype that bundles hold, and captured with the same
    values by every trace: one that depends on the batch size (a table as long as the batch) belongs to its program.
    Numbered in the order of the first trace.

    Returns the weights, and per trace and captured array the index of its weight, or None where it stays a constant.
    """
    once: dict[int, str] = {}
    digests = [
        [_digest(value, once) if _can_be_weight(value) else None for value in trace.captured] for trace in traces
    ]
    common = set(digests[0]).intersection(*digests[1:]) - {None}
    index: dict[str | None, int] = {}
    weights: list[Weight] = []
    number = 0
    for digest, value in zip(digests[0], traces[0].captured, strict=True):
        if digest not in common or digest in index:
            continue
        while f"constant_{number}" in taken:
            number += 1
        index[digest] = len(weights)
        weights.append(Weight(f"constant_{number}", np.asarray(value)))
        number += 1
    return tuple(weights), [[index.get(digest) for digest in row] for row in digests]


def _inline(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate `jaxpr`, replacing calls of functions with captured arrays by their bodies."""
    values: dict[jex.Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        body = _called(eqn)
        with eqn.ctx.manager:
            if body is not None:
                results = _inline(body.jaxpr, body.consts, operands)
            else:
                params = eqn.primitive.get_bind_params(eqn.params)  # type: ignore[no-untyped-call]
                results = eqn.primitive.bind(*operands, **params)  # type: ignore[no-untyped-call]
        values.update(zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The function that `eqn` calls, when inlining it brings a captured array to the surface."""
    if eqn.primitive.name not in _CALLS:
        return None
    bodies = [body for body in inner_jaxprs(eqn) if len(body.jaxpr.invars) == len(eqn.invars)]
    if len(bodies) != 1 or not (bodies[0].consts or _captures(bodies[0].jaxpr)):
        return None
    return bodies[0]


def inner_jaxprs(eqn: jex.JaxprEqn) -> Iterator[jex.ClosedJaxpr]:
    """The functions that `eqn` carries: bodies of calls, loops and branches."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                yield item
            elif isinstance(item, jex.Jaxpr):
                yield jex.ClosedJaxpr(item, ())


def _captures(jaxpr: jex.Jaxpr) -> bool:
    return next((True for _ in _inner_consts(jaxpr)), False)


def _inner_consts(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Captured arrays of functions that `jaxpr` calls, at any depth."""
    for eqn in jaxpr.eqns:
        for body in inner_jaxprs(eqn):
            yield from body.consts
            yield from _inner_consts(body.jaxpr)


def _refuse_effects(closed: jex.ClosedJaxpr) -> None:
    kinds = {type(effect).__name__ for effect in closed.effects} | set(_callbacks(closed.jaxpr))
    if kinds:
        raise ExportError(
            f"the function does more than compute ({', '.join(sorted(kinds))}); a program runs without Python",
            hint="remove jax.debug.print, callbacks and updates of state that lives outside the function",
        )


def _callbacks(jaxpr: jex.Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if "callback" in eqn.primitive.name:
            yield eqn.primitive.name
        for body in inner_jaxprs(eqn):
            yield from _callbacks(body.jaxpr)


def _refuse_random_key(value: Any, random_keys: Mapping[int, str]) -> None:
    if not is_random_key(value):
        return
    name = random_keys.get(id(value))
    where = f"uses the random key {name!r} of params" if name else f"captures a random key {value.dtype}"
    raise ExportError(
        f"the function {where}: its answers would not depend on its inputs alone",
        hint="put the model in inference mode (dropout off), or make the raw key (jax.random.key_data) an input",
    )


def _can_be_weight(value: Any) -> bool:
    if np.size(value) <= LIFT_ABOVE:
        return False
    try:
        DType.from_numpy(value.dtype)
    except TypeError:  # a table of complex numbers
        return False
    return True


def _digest(value: Any, once: dict[int, str]) -> str:
    """Digest of dtype, shape and bytes. Traces capture the same objects, so each is hashed `once`."""
    if id(value) not in once:
        array = np.ascontiguousarray(value)
        found = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
        once[id(value)] = found.hexdigest()
    return once[id(value)]


def _shown(value: Any) -> str:
    return f"{value.dtype}[{','.join(str(size) for size in np.shape(value))}]"
