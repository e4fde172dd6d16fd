"""From a decomposed FX graph to JAX: runs the graph node by node inside a JAX trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.fx.node import Argument, Node, Target

from rsrv.core.errors import ExportError
from rsrv.export.torch.dtypes import numpy_dtype, short
from rsrv.export.torch.refusals import MISSING, hint_for, operator_name, refuse
from rsrv.export.torch.registry import registry
from rsrv.stablehlo.mlir import summary

aten: Any = torch.ops.aten

IGNORED = frozenset(
    {
        aten._assert_async.msg,
        aten._assert_async.default,
        aten._assert_scalar.default,
        aten._assert_tensor_metadata.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        aten._linalg_check_errors.default,
    }
)
"""Checks of values: a program cannot raise. Eager PyTorch would have refused the request."""


class Lowering(torch.fx.Interpreter):
    """Computes a graph with JAX arrays. Every result gets the dtype that torch gave it, and its shape is compared.

    Raises ExportError that names the operator and the line of the model.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        try:
            value = super().run_node(n)
        except ExportError:
            raise
        except Exception as error:
            raise self._explain(n, error) from error
        return _conform(n, value) if n.op == "call_function" else value

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        if target in IGNORED:
            return None
        if isinstance(target, torch._ops.HigherOrderOperator):
            lower = _HIGHER_ORDER.get(target.__name__)
            if lower is None:
                raise _Missing
            return lower(*args, **kwargs)
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        lowering = registry().find(target)
        if lowering is None:
            raise _Missing
        return lowering(*args, **kwargs)

    def _explain(self, node: Node, error: Exception) -> ExportError:
        name = operator_name(node.target)
        if isinstance(error, _Missing):
            return refuse(node, "there is no lowering for this operator", hint=hint_for(name) or MISSING)
        if type(error) is NotImplementedError:  # a lowering of ours says what it cannot do
            return refuse(node, str(error), hint=hint_for(name) or MISSING)
        return refuse(node, f"cannot be lowered: {type(error).__name__}: {summary(str(error))}", hint=MISSING)


class _Missing(Exception):
    """The operator is in no table."""


def run(module: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
    """The results of `module` for JAX arrays (or tracers) `args`."""
    return Lowering(module).run(*args, enable_io_processing=False)


def _conform(node: Node, value: Any) -> Any:
    """`value` in the dtype that torch computed; in JAX's 64-bit mode a Python number would otherwise widen it."""
    wanted = node.meta.get("val")
    if not isinstance(wanted, torch.Tensor) or value is None or isinstance(value, (tuple, list)):
        return value
    dtype = numpy_dtype(wanted.dtype)
    if dtype is None:
        raise refuse(node, f"its result is {short(wanted.dtype)}, which programs do not have")
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex, bool)):
        return value
    array = jnp.asarray(value)
    if array.dtype != dtype:
        if jnp.issubdtype(array.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
            raise refuse(node, f"its lowering gives complex numbers, torch {short(wanted.dtype)}")
        array = array.astype(dtype)
    known = [size if isinstance(size, int) else None for size in wanted.shape]
    if len(known) != array.ndim or any(
        size is not None and size != found for size, found in zip(known, array.shape, strict=True)
    ):
        raise refuse(node, f"its lowering gives the shape {list(array.shape)}, torch {list(wanted.shape)}")
    return array


# --- operators that take graphs -----------------------------------------------------------------------------------


def _cond(condition: Any, true: Any, false: Any, operands: Sequence[Any] = ()) -> Any:
    return jax.lax.cond(
        jnp.reshape(condition, ()), lambda *x: _tuple(run(true, x)), lambda *x: _tuple(run(false, x)), *operands
    )


def _while_loop(condition: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any] = ()) -> Any:
    start = tuple(jnp.asarray(value) for value in carried)

    def proceed(state: Any) -> Any:
        return jnp.reshape(_tuple(run(condition, (*state, *additional)))[0], ())

    def step(state: Any) -> Any:
        results = _tuple(run(body, (*state, *additional)))
        return tuple(jnp.asarray(new).astype(old.dtype) for new, old in zip(results, state, strict=True))

    return jax.lax.while_loop(proceed, step, start)


def _with_effects(token: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """A check ordered by tokens; the token itself means nothing to a program."""
    if operator in IGNORED:
        return (token,)
    lowering = registry().find(operator)
    if lowering is None:
        raise _Missing
    result = lowering(*args, **kwargs)
    return (token, *result) if isinstance(result, (tuple, list)) else (token, result)


def _region(settings: int) -> Callable[..., Any]:
    """A region with a grad or autocast mode of its own, after that many settings: the casts are in its graph."""

    def lower(*args: Any) -> Any:
        return run(args[settings], args[settings + 1 :])

    return lower


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


_HIGHER_ORDER: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "with_effects": _with_effects,
    "wrap_with_set_grad_enabled": _region(1),
    "wrap_with_autocast": _region(4),
}
