"""What is in a TorchScript file, and why it does not convert: the inspector. It loads neither JAX nor torchax."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError, RsrvError, UsageError
from rsrv.export.repository.triton import TritonModel, find_model_file, read_triton_model
from rsrv.export.specs import InputSpec
from rsrv.export.torch.arguments import Call, bind, bind_as_triton, room_for
from rsrv.export.torch.dtypes import short, torch_dtype
from rsrv.export.torch.refusals import check_graph, explain, operator_name
from rsrv.export.torch.torchscript import explain_script, load_script, patched, require_forward, script_program
from rsrv.export.torch.torchscript_graph import Operator, operators
from rsrv.export.torch.tracing import FlatModule, evaluating, tracing

DATA_DEPENDENT = frozenset(
    f"aten::{name}" for name in ("index", "item", "masked_select", "nonzero", "unique", "unique_dim", "_unique2")
) | {"prim::If", "prim::Loop", "torchvision::nms"}
"""What no program can have, unless sizes and constants decide what it does. The probe tells."""

ATTENTION = DATA_DEPENDENT | frozenset(
    f"aten::{name}" for name in ("_convolution", "adaptive_max_pool2d", "gru", "lstm", "rnn_relu", "rnn_tanh")
)
"""What to look at first: also what needs a lowering of our own."""

_GUARD = re.compile(r"Could not (guard|extract)|data-dependent (expression|value)")
MOST = 25
LEVELS = 2
GUARD_LINES = 5


@dataclass(frozen=True)
class ModelInput:
    """`shape`: -1 is any size; from a configuration it is without the batch axis of a batched model."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A module of the tree. `attention` counts the operators to look at in its forward, and below."""

    path: str
    type: str
    depth: int
    parameters: int
    attention: Mapping[str, int]


@dataclass(frozen=True)
class Count:
    """`place`: the first line of the model that has the operator."""

    operator: str
    count: int
    attention: bool = False
    place: str | None = None


@dataclass(frozen=True)
class Probe:
    """Whether torch.export takes the module; `operators` are the most frequent ones of its graph."""

    converts: bool
    operators: tuple[Count, ...] = ()
    message: str | None = None
    hint: str | None = None
    guards: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScriptReport:
    """What `inspect_torchscript` found.

    Attributes:
        max_batch_size: of the configuration; None without one, 0 when nothing is batched.
        code_file: the source of all parts.
        forward: one line per tensor, or other value, that a call on zeros returned; None when there was no answer.
        problem: why there was none.
        probe: None when it was not tried.
        clean: parts of the first level without operators that may depend on data: candidates to be exported alone.
    """

    name: str
    file: str
    inputs: tuple[ModelInput, ...]
    max_batch_size: int | None
    parameters: tuple[str, ...]
    tree: tuple[Part, ...]
    census: tuple[Count, ...]
    code_file: str
    forward: tuple[str, ...] | None
    problem: str | None
    probe: Probe | None
    clean: tuple[str, ...]


def inspect_torchscript(
    path: Path,
    *,
    inputs: Sequence[InputSpec] = (),
    size: int = 512,
    export: bool = True,
    code_out: Path | None = None,
) -> ScriptReport:
    """Look into a TorchScript module.

    Args:
        path: a file, or a model directory of a Triton repository (``config.pbtxt`` and ``1/model.pt``).
        inputs: complete shapes, with the batch axis; of a directory's inputs they replace those of the same name.
        size: for axes that the configuration leaves open.
        export: try torch.export, with the patches of the exporter.
        code_out: where the source of all parts goes; default: a new temporary file.

    The module is run on zeros. Raises UsageError when there is nothing at `path`, ExportError when it is no TorchScript
    module or its configuration cannot be read.
    """
    config = None
    if path.is_dir():
        config = read_triton_model(path)
        file = find_model_file(path, config)
    elif path.is_file():
        file = path
    else:
        raise UsageError(f"{path}: no such file or directory")
    if file.suffix == ".pt2":
        raise UsageError(f"{file} is a program of torch.export, not TorchScript", hint="rsrv export torch takes it")
    script = load_script(file)
    found = operators(script)
    tree = tuple(_tree(script))
    forward, problem, probe = None, None, None
    try:
        require_forward(script)
        call = _call(script, config, inputs, size)
        forward = _forward(script, call)
        probe = _probe(script, call) if export else None
    except RsrvError as error:
        problem = error.message + (f" ({error.hint})" if error.hint else "")
    return ScriptReport(
        name=path.resolve().name if config is not None else path.stem,
        file=str(file),
        inputs=tuple(_declared(config, inputs)),
        max_batch_size=None if config is None else config.max_batch_size,
        parameters=tuple(_parameters(script)),
        tree=tree,
        census=tuple(_census(found)),
        code_file=str(_dump(script, code_out, path.resolve().stem)),
        forward=forward,
        problem=problem,
        probe=probe,
        clean=tuple(
            one.path for one in tree if one.depth == 1 and one.parameters and not DATA_DEPENDENT & {*one.attention}
        ),
    )


def _parameters(script: Any) -> Iterator[str]:
    """``x: Tensor``, ``scale: float = 1.0``, …"""
    if script._c._has_method("forward"):
        for argument in script.forward.schema.arguments[1:]:
            default = f" = {argument.default_value}" if argument.has_default_value() else ""
            yield f"{argument.name}: {argument.type}{default}"


def _declared(config: TritonModel | None, inputs: Sequence[InputSpec]) -> Iterator[ModelInput]:
    given = {one.name: ModelInput(one.name, one.dtype.value, one.shape) for one in inputs}
    if config is None:
        yield from given.values()
        return
    for tensor in config.inputs:
        yield given.get(tensor.name) or ModelInput(tensor.name, tensor.data_type, tensor.dims)


def _call(script: Any, config: TritonModel | None, inputs: Sequence[InputSpec], size: int) -> Call:
    """A call on zeros. Raises UsageError, or ExportError when the examples are not those of forward."""
    zeros = {one.name: _zeros(one.name, one.shape, one.dtype) for one in inputs}
    if config is None:
        if not zeros:
            raise UsageError("the file does not say what it takes", hint="give --inputs NAME=DTYPE[SIZES] for each")
        return bind(script.forward, zeros, None)
    names = [tensor.name for tensor in config.inputs]
    if unknown := sorted(set(zeros) - set(names)):
        raise UsageError(f"--inputs names {unknown[0]!r}; the inputs are {', '.join(names)}")
    lead = (1,) if config.max_batch_size else ()
    for tensor in config.inputs:
        if tensor.name in zeros:
            continue
        if tensor.dtype is None:
            raise ExportError(f"input {tensor.name!r} is {tensor.data_type}, which no bundle can hold")
        sizes = (*lead, *(size if extent < 0 else extent for extent in tensor.dims))
        zeros[tensor.name] = _zeros(tensor.name, sizes, tensor.dtype)
    return bind_as_triton(script.forward, {name: zeros[name] for name in names})[0]


def _zeros(name: str, shape: Sequence[int], dtype: DType) -> torch.Tensor:
    with room_for(name, shape):
        return torch.zeros(tuple(shape), dtype=torch_dtype(dtype))


def _forward(script: Any, call: Call) -> tuple[str, ...]:
    args, kwargs = call.rebuild([tensor.clone() for tensor in call.tensors])
    try:
        with evaluating(script), torch.no_grad():
            result = script(*args, **kwargs)
    except Exception as error:
        known = explain_script(error, script)
        raise ExportError(f"a call on zeros failed: {known.message if known is not None else _first(error)}") from error
    leaves, _ = pytree.tree_flatten_with_path(result)
    return tuple(f"{pytree.keystr(path)} {_shown(leaf)}".strip() for path, leaf in leaves)


def _probe(script: torch.jit.ScriptModule, call: Call) -> Probe:
    module = patched(script)
    try:
        with tracing(module):
            program = script_program(FlatModule(module, call, None), call.tensors)
        check_graph(program.graph_module)
    except Exception as error:
        known = error if isinstance(error, RsrvError) else explain_script(error, module) or explain(error)
        guards = [line.strip() for line in str(error).splitlines() if _GUARD.search(line)]
        return Probe(
            False,
            message=known.message if known is not None else _first(error),
            hint=known.hint if known is not None else None,
            guards=tuple(line[:300] for line in dict.fromkeys(guards))[:GUARD_LINES] if known is not error else (),
        )
    counts = Counter(operator_name(node.target) for node in program.graph.nodes if node.op == "call_function")
    return Probe(True, tuple(Count(name, count) for name, count in counts.most_common(MOST)))


def _tree(script: torch.jit.ScriptModule) -> Iterator[Part]:
    for path, part in script.named_modules():
        depth = path.count(".") + 1 if path else 0
        if depth <= LEVELS:
            marked = Counter(one.kind for one in operators(part) if one.kind in ATTENTION)
            count = sum(tensor.numel() for tensor in part.parameters())
            yield Part(
                path, getattr(part, "original_name", type(part).__name__), depth, count, dict(marked.most_common())
            )


def _census(found: Sequence[Operator]) -> Iterator[Count]:
    first: dict[str, str] = {}
    for operator in found:
        said = operator.kind in ATTENTION or not operator.kind.startswith(
            "prim::"
        )  # constants and attributes are all over
        if operator.place is not None and said:
            first.setdefault(operator.kind, operator.place.text)
    for kind, count in Counter(one.kind for one in found).most_common():
        yield Count(kind, count, kind in ATTENTION, first.get(kind))


def _dump(script: torch.jit.ScriptModule, target: Path | None, name: str) -> Path:
    """Write the source of every part that has a forward."""
    if target is None:
        handle, made = tempfile.mkstemp(prefix=f"{name}-", suffix=".py")
        os.close(handle)
        target = Path(made)
    sections = []
    for path, part in script.named_modules():
        source: Any = part
        if source._c._has_method("forward"):
            sections.append(f"# {path or 'the module itself'} ({source.original_name})\n{source.code}")
    target.write_text("\n\n".join(sections), encoding="utf-8")
    return target


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{short(value.dtype)}[{','.join(map(str, value.shape))}]"
    return f"{type(value).__name__} {str(value)[:60]}"


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
