"""TorchScript modules made fit for torch.export (X-23): loading, patches, tracing, explaining. No JAX here.

A script module runs in torch's own interpreter. Traced through a plain module around it, its operators reach
torch.export one by one; sizes and constants decide branches and loops on the way, values of tensors cannot.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.jit._fuser import optimized_execution
from torch.jit._recursive import wrap_cpp_module

from rsrv.core.errors import ExportError
from rsrv.export.torch.refusals import BRANCH, MISSING, is_data_dependent
from rsrv.export.torch.torchscript_graph import Operator, Place, operators, places_in
from rsrv.export.torch.tracing import FlatModule, traced
from rsrv.export.usercode import user_code

log = logging.getLogger(__name__)

Wrap = Callable[[Any], nn.Module]
"""Makes the module to export from a script module whose patches have run."""

_UNKNOWN = re.compile(r"Unknown builtin op: (?P<op>(?P<library>\w+)::\w+)")
_WANTED = re.compile(
    r"Expected a value of type '(?P<type>[^']+)' for argument '(?P<name>\w+)' but instead found type '(Fake)?Tensor'"
)
_LIBRARIES = ("torchaudio", "torchvision")
"""Packages that a file may ask for by naming their operators; importing them registers these."""

_RECAST = {
    "aten::to_mkldnn": "torch.jit.optimize_for_inference changed it for oneDNN",
    "prim::ConstantMKLDNNTensor": "torch.jit.optimize_for_inference changed it for oneDNN",
    "prim::TensorExprGroup": "it was compiled by the fuser of TorchScript",
    "prim::FusionGroup": "it was compiled by the fuser of TorchScript",
}


def load_script(path: Path) -> torch.jit.ScriptModule:
    """The module in a TorchScript file, on the CPU. Raises ExportError."""
    try:
        return _load(path)
    except Exception as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is None:
            first = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"{path} is no TorchScript module: {first}",
                hint="a state dict needs its module: rsrv export torch MODULE:FN --weights FILE",
            ) from error
        hint = f"install the package that has {unknown['op']}, import it in a factory that returns torch.jit.load(FILE)"
        if unknown["library"] in _LIBRARIES:
            try:
                importlib.import_module(unknown["library"])
                return _load(path)
            except ImportError:
                hint = f"pip install {unknown['library']}"
            except Exception as again:
                error = again
        raise ExportError(f"{path} uses {unknown['op']}, which is not registered in this process", hint=hint) from error


def _load(path: Path) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; that is why one exports it
        module: torch.jit.ScriptModule = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
    return module


def patched(script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """`script` as torch.export takes it, sharing everything with `script` itself.

    It holds Parameters, where a loaded file has bare tensors; they share the memory, and want gradients only if those
    did. And it knows nothing of the class that it was scripted from, whose forward torch.export would run instead.
    """
    made: Any = wrap_cpp_module(script._c)  # type: ignore[no-untyped-call]  # as torch.jit.load makes one
    for part in made.modules():
        for name, tensor in list(part.named_parameters(recurse=False)):
            if not isinstance(tensor, nn.Parameter):
                setattr(part, name, nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad))
        if getattr(part, "training", False) and not _can_evaluate(part):
            kind = getattr(part, "original_name", "a part of the module")
            log.warning("%s is fixed in training mode: save it again after module.eval()", kind)
    return made  # type: ignore[no-any-return]


def require_forward(module: torch.jit.ScriptModule) -> None:
    """Raises ExportError for a module with other methods only."""
    script: Any = module
    if not script._c._has_method("forward"):
        methods = ", ".join(sorted(script._c._method_names())) or "none"
        raise ExportError(
            f"the TorchScript module has no forward; its methods: {methods}",
            hint="wrap= of export_bundle can make a module whose forward calls one of them",
        )


def holds_script(module: nn.Module) -> bool:
    return any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())


def wrapped(module: nn.Module, wrap: Wrap | None) -> nn.Module:
    """`module` after the patches, in the module that `wrap` makes of it. Raises ExportError."""
    if isinstance(module, torch.jit.ScriptModule):
        module = patched(module)
    if wrap is None:
        if isinstance(module, torch.jit.ScriptModule):
            require_forward(module)
        return module
    with user_code("wrap"):
        made = wrap(module)
    if not isinstance(made, nn.Module):
        raise ExportError(
            f"wrap returned a {type(made).__name__}, want an nn.Module",
            hint="for example wrap=lambda script: script.backbone",
        )
    return patched(made) if isinstance(made, torch.jit.ScriptModule) else made


def script_program(
    flat: FlatModule, tensors: Sequence[torch.Tensor], dims: Sequence[dict[int, Any]] | None = None
) -> torch.export.ExportedProgram:
    """As `traced`, of a module with script modules in it; the graph knows the lines that its operators come from."""
    # Unoptimised: the other mode runs a graph of its own making, with operators that nothing else knows.
    with optimized_execution(False), _patched_parts(flat.module):
        program = traced(flat, tensors, dims)
    _locate(program, _operators(flat))
    return program


def explain_script(error: BaseException, module: nn.Module) -> ExportError | None:
    """What went wrong while TorchScript ran `module` for torch.export; None when TorchScript is not to blame."""
    text = str(error)
    found = _operators(module)
    if (recast := next((one.kind for one in found if one.kind in _RECAST), None)) is not None:
        return ExportError(
            f"the module holds {recast}, which only TorchScript can run: {_RECAST[recast]}",
            hint="save the module before that step",
        )
    if (wanted := _WANTED.search(text)) is not None:
        return ExportError(
            f"forward wants a {wanted['type']} for {wanted['name']!r}, and the example is a tensor",
            hint="give the value itself among the examples (from Python): it becomes part of the model",
        )
    if "TorchScript interpreter" not in text and "TorchScript" not in type(error).__name__:
        return None
    place = places_in(text)
    at = f" at {place.text}" if place is not None else ""
    if is_data_dependent(error):
        return ExportError(
            f"{_control(found, place)}{at}: the values of a tensor decide what to compute; a branch, a loop or a size "
            "that depends on data cannot be part of a program",
            hint=BRANCH,
        )
    reason = _reason(text)
    if reason is None:
        foreign = sorted({one.kind for one in found if not one.kind.startswith(("aten::", "prim::"))})
        reason = f"it does not say why; operators of other libraries: {', '.join(foreign) or 'none'}"
    what = next((one.kind for one in found if place is not None and _same(one.place, place)), "the TorchScript module")
    return ExportError(f"{what}{at} cannot be exported: {reason}", hint=f"{MISSING}, with wrap=")


@contextmanager
def _patched_parts(module: nn.Module) -> Iterator[None]:
    """The script modules that are parts of plain ones in their patched form."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, torch.jit.ScriptModule)
        for name, child in parent.named_children()
        if isinstance(child, torch.jit.ScriptModule)
    ]
    for parent, name, child in found:
        setattr(parent, name, patched(child))
    try:
        yield
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


def _scripts(module: nn.Module) -> Iterator[torch.jit.ScriptModule]:
    """The outermost script modules within `module`, itself included."""
    if isinstance(module, torch.jit.ScriptModule):
        yield module
        return
    for child in module.children():
        yield from _scripts(child)


def _operators(module: nn.Module) -> list[Operator]:
    return [operator for script in _scripts(module) for operator in operators(script)]


def _can_evaluate(part: nn.Module) -> bool:
    try:
        part.training = False
    except RuntimeError:
        return False
    part.training = True
    return True


def _locate(program: torch.export.ExportedProgram, found: Sequence[Operator]) -> None:
    """Give the nodes of `program` the lines of the script, by the order of each kind where that is unmistakable."""
    places: dict[str, list[Place]] = {}
    for operator in found:
        if operator.place is not None:
            places.setdefault(operator.kind, []).append(operator.place)
    nodes: dict[str, list[torch.fx.Node]] = {}
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            nodes.setdefault(node.target._schema.name, []).append(node)
    for kind, known in places.items():
        here = nodes.get(kind, [])
        if len(known) == len(here):
            pairs = zip(here, known, strict=True)
        else:
            first = known[0] if len(known) == 1 else known[0].among(len(known))
            pairs = zip(here, [first] * len(here), strict=True)
        for node, place in pairs:
            node.meta["stack_trace"] = place.frame


def _control(found: Sequence[Operator], place: Place | None) -> str:
    """The operator of TorchScript that wanted a number or a truth value at `place`."""
    here = [one.kind for one in found if place is not None and _same(one.place, place)]
    for kind in ("prim::Loop", "prim::If"):
        if kind in here:
            return kind
    return next((kind for kind in here if kind in _NUMBERS), "the TorchScript module")


_NUMBERS = ("aten::item", "aten::Int", "aten::IntImplicit", "aten::Float", "aten::FloatImplicit", "aten::Bool")


def _same(one: Place | None, other: Place) -> bool:
    return one is not None and (one.file, one.line) == (other.file, other.line)


def _reason(text: str) -> str | None:
    """The last line that names an exception, without it when there is nothing else."""
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*(\w+\.)*\w*(Error|Exception)\b", line)]
    said = [line.removeprefix("RuntimeError:").strip() for line in lines]
    return next((line for line in reversed(said) if line), None)
