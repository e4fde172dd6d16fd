"""What a module is called with: the tensors among its arguments are inputs, everything else is part of the model."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rsrv.core.errors import ExportError, UsageError
from rsrv.export.repository.triton import forward_parameters, tensor_order
from rsrv.export.specs import InputSpec, parse_input_spec
from rsrv.export.torch.dtypes import bundle_dtype, short, to_torch, torch_dtype


@dataclass(frozen=True, eq=False)
class Call:
    """Example arguments of a forward, in the order of its signature whatever order they were given in.

    `names` and `tensors` are the inputs; `given` says which of them came with values of the user's.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    given: tuple[bool, ...]
    _leaves: tuple[Any, ...]
    _positions: tuple[int, ...]
    _spec: Any

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with `tensors` in place of the examples."""
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def replaced(self, specs: Sequence[InputSpec]) -> Call:
        """With other examples for the inputs that `specs` name. Raises UsageError for a name that is none of them."""
        tensors, given = list(self.tensors), list(self.given)
        for spec in specs:
            if spec.name not in self.names:
                close = difflib.get_close_matches(spec.name, self.names, n=1)
                raise UsageError(
                    f"--inputs names {spec.name!r}; the inputs are {', '.join(self.names)}",
                    hint=f"did you mean {close[0]!r}?" if close else None,
                )
            place = self.names.index(spec.name)
            tensors[place], given[place] = _made_up(spec), False
        return replace(self, tensors=tuple(tensors), given=tuple(given))


def bind(forward: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any] | None) -> Call:
    """Read example arguments.

    Args:
        inputs: one example, a sequence of positional ones, or a mapping by name. An example is a tensor, a NumPy array,
            a text such as ``"x=f32[1,3]"``, a Python value (which becomes part of the model), or a container of these.
        kwargs: further examples by name.

    Raises ExportError when they do not fit the signature, or when there is no tensor among them. A `Call` for `inputs`
    is taken as it is.
    """
    if isinstance(inputs, Call):
        return inputs
    args, named = _split(inputs)
    if repeated := sorted(set(named) & set(kwargs or {})):
        raise ExportError(f"the input {repeated[0]!r} is given twice")
    named |= dict(kwargs or {})
    signature = _signature(forward)
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise ExportError(f"the examples do not fit forward{signature}: {error}") from None
    # In the order of the signature; by name from the first parameter on that keeps its default.
    ordered: list[tuple[str, Any]] = []
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    by_name = False
    for name, parameter in signature.parameters.items():
        if name not in bound.arguments:
            by_name = True
            continue
        value = bound.arguments[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            positional += value
            ordered += [(f"{name}_{i}" if len(value) > 1 else name, item) for i, item in enumerate(value)]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            keywords |= value
            ordered += value.items()
        elif by_name or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            keywords[name] = value
            ordered.append((name, value))
        else:
            positional.append(value)
            ordered.append((name, value))
    return _call(ordered, tuple(positional), keywords)


def bind_as_triton(forward: Callable[..., Any], examples: Mapping[str, Any]) -> tuple[Call, list[str]]:
    """The call of a forward for tensors with names of a Triton configuration, and these names in the order of the call.

    See `forward_parameters` for what the names mean. Raises ExportError.
    """
    parameters = _signature(forward).parameters
    names = list(examples)
    open_ended = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if len(names) > len(parameters) or any(one.kind in open_ended for one in parameters.values()):
        ordered = [names[i] for i in tensor_order(names)]
        return bind(forward, [examples[name] for name in ordered], None), ordered
    chosen = forward_parameters(names, list(parameters))
    call = bind(forward, {parameter: examples[name] for parameter, name in chosen.items()}, None)
    return call, [chosen[parameter] for parameter in call.names]


def input_spec(name: str, tensor: torch.Tensor) -> InputSpec:
    """Name, dtype and shape of an input; its dtype is one that bundles hold."""
    dtype = bundle_dtype(tensor.dtype)
    assert dtype is not None
    return InputSpec(name, dtype, tuple(tensor.shape))


def _call(ordered: Sequence[tuple[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    paths = [path for name, value in ordered for path in _paths(name, value)]
    names, tensors, given, positions = [], [], [], []
    for position, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        found = _tensor(path, leaf)
        if found is not None:
            names.append(path)
            tensors.append(found)
            given.append(isinstance(leaf, (torch.Tensor, np.ndarray)))
            positions.append(position)
    if not names:
        raise ExportError("a model needs at least one input, and there is no tensor among the examples")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ExportError(f"two inputs are named {repeated[0]!r}")
    return Call(tuple(names), tuple(tensors), tuple(given), tuple(leaves), tuple(positions), spec)


def _split(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs is None:
        return (), {}
    if isinstance(inputs, Mapping):
        return (), {str(name): value for name, value in inputs.items()}
    if isinstance(inputs, (str, InputSpec, torch.Tensor, np.ndarray)):
        inputs = (inputs,)
    if not isinstance(inputs, Sequence):
        raise ExportError(f"inputs is a {type(inputs).__name__}, want an example, a sequence or a mapping of examples")
    specs = [parse_input_spec(item) if isinstance(item, str) else item for item in inputs]
    if specs and all(isinstance(item, InputSpec) for item in specs):
        return (), {item.name: item for item in specs}
    return tuple(specs), {}


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    schema = getattr(forward, "schema", None)  # of a TorchScript method, which Python shows as (*args, **kwargs)
    if schema is None:
        return inspect.signature(forward)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                kind,
                default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in schema.arguments[1:]
        ]
    )


def _paths(name: str, value: Any) -> list[str]:
    """A name for each leaf of `value`, in the order in which torch flattens it."""
    paths, _ = pytree.tree_flatten_with_path(value)
    return ["_".join([name, *(_part(key) for key in path)]) for path, _ in paths]


def _part(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _tensor(name: str, leaf: Any) -> torch.Tensor | None:
    """The example as a tensor; None for a Python value."""
    if isinstance(leaf, InputSpec):
        return _made_up(leaf)
    if isinstance(leaf, np.ndarray):
        try:
            return to_torch(leaf)
        except (KeyError, TypeError):
            raise ExportError(f"input {name!r} has dtype {leaf.dtype}, which torch does not have") from None
    if isinstance(leaf, torch.Tensor):
        if bundle_dtype(leaf.dtype) is None:
            raise ExportError(
                f"input {name!r} is {short(leaf.dtype)}, which no bundle can hold",
                hint="take the real and imaginary parts as a last axis of 2 and join them with torch.view_as_complex"
                if leaf.is_complex()
                else None,
            )
        return leaf.detach()
    return None


def _made_up(spec: InputSpec) -> torch.Tensor:
    """Values where the user gives none: from 0 to 1, zeros for integers."""
    dtype = torch_dtype(spec.dtype)
    with room_for(spec.name, spec.shape):
        if not dtype.is_floating_point:
            return torch.zeros(spec.shape, dtype=dtype)
        return torch.linspace(0, 1, max(1, math.prod(spec.shape))).reshape(spec.shape).to(dtype)


@contextmanager
def room_for(name: str, shape: Sequence[int]) -> Iterator[None]:
    """Around the making of an example that may be larger than memory. Raises ExportError."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, ValueError) as error:
        raise ExportError(
            f"an example of shape {list(shape)} for input {name!r} cannot be made: {str(error).partition(chr(10))[0]}",
            hint="give smaller sizes",
        ) from error
