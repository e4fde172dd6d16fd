"""`export_bundle`: one entry for all front ends."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import ExportError
from rsrv.export.options import Axes, ExportOptions, Int64, Lowering, Precision, checked_batch_sizes

if TYPE_CHECKING:
    from rsrv.bundle.iospec import IOSpec
    from rsrv.runtime.compile_pool import CompilePool


def export_bundle(
    frontend: str,
    *model: Any,
    dir: str | Path,  # noqa: A002 - the older system's name for it
    name: str | None = None,
    batch_sizes: Sequence[int] | None = (1,),
    dynamic_batch: bool = False,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    input_batch_axes: Axes | None = None,
    output_batch_axes: Axes | None = None,
    axis_letters: Mapping[str, str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    wrap: Callable[[Any], Any] | None = None,
    int64: Int64 = "keep",
    lowering: Lowering = "torchax",
    torch_xla_python: str | Path | None = None,
    shape_variants: Sequence[Any] | None = None,
    client_inputs: Sequence[IOSpec] | None = None,
    client_outputs: Sequence[IOSpec] | None = None,
    hooks: str | Path | None = None,
    extra_files: Mapping[str, Any] | None = None,
    matmul_precision: Precision | None = None,
    platform: str | None = None,
    stablehlo_version: str | None = None,
    drop_unused_inputs: bool = False,
    x64: bool | None = None,
    golden: int = 0,
    input_ranges: Mapping[str, tuple[float, float]] | None = None,
    tolerances: Mapping[str, float] | float | None = None,
    row_check: bool = True,
    provenance: Mapping[str, Any] | None = None,
    collect_git: bool = True,
    diff: bool = True,
    overwrite: bool = False,
    description: str = "",
    pool: CompilePool | None = None,
) -> Path:
    """Export a model as the bundle `dir` and return its path. Nothing appears there unless every check passed.

    Front ends:
        ``export_bundle("jax", fn, params, inputs, …)``: ``fn(params, *inputs)`` returns an array, a tuple or list of
        arrays, or a flat dict (its keys become the output names). `params` is any pytree.
        ``export_bundle("jax-fn", f, inputs, weights, …)``: ``f(*inputs, *weights)`` with ``weights = [(name, array)]``.
        ``export_bundle("torch", module, inputs, …)``: an nn.Module (run in evaluation mode), a TorchScript module
        (experimental) or a ``torch.export.ExportedProgram`` (``inputs=None``: those that it was exported with). Inputs
        are the tensors among the examples, named and ordered as forward's parameters, whatever order they are given in;
        everything else is part of the model. It returns a tensor, a flat tuple or list, or a flat dict; None is left
        out. Every program has to answer the example and seeded samples as eager PyTorch does, or nothing is written.

    Programs take ``inputs…, weights…``. Weights are the arrays of `params` that the outputs depend on, depth first in
    the order in which dicts were written, with dotted 0-based names (``layers.0.kernel``); then the arrays of more than
    16 elements that the function closes over, ``constant_0``, ``constant_1``, … in order of use.

    Args:
        dir: where the bundle goes; the directory's name is the model's name.
        name: must equal the directory's name when given.
        batch_sizes: one program per size; None: one program without a batch axis, as the examples are.
        dynamic_batch: instead, one program with a symbolic batch axis, which servers specialise to `batch_sizes` or to
            sizes that their operator prefers. Refused for a model in which the number itself matters.
        input_names: in order; default ``input``, or ``input_0``, ``input_1``, … A mapping of examples brings its own.
        output_names: in order; default ``output``, or ``output_0``, …; for a dict: the order of its keys.
        input_batch_axes: per input, in order or by name; default 0. Negative counts from the end.
        output_batch_axes: what you expect, None for an unbatched output. They are found by tracing at two batch sizes;
            a difference from what you expect is an error.
        axis_letters: tensor name → letters of its axes other than the batch axis, for the manifest.
        kwargs: examples of further inputs by name (``torch``).
        wrap: makes the module to export from a TorchScript module (``torch``), for example its part before the
            operators that no program can have: ``wrap=lambda script: script.backbone``. It is called after the patches
            that torch.export needs; the examples are those of the module that it returns.
        int64: ``narrow`` declares 64-bit integer inputs and outputs as 32-bit ones and converts at the border of the
            program (``torch``, which computes indices in 64 bits).
        lowering: ``torch-xla`` makes the programs with torch-xla, in the environment of `torch_xla_python` (``torch``).
        torch_xla_python: the Python of an environment with torch-xla, which is run once for each program.
        shape_variants: several input sizes in one bundle: a list of sets of examples, each as `inputs` could be, that
            differ only in sizes. As a mapping, a set may leave out inputs: these are as in `inputs`, which then is no
            variant itself and may be None. Axes whose sizes differ are written as -1; every variant has programs for
            all batch sizes, and all of them share the weights.
        client_inputs, client_outputs: the tensors that clients see when `hooks` transform them.
        hooks: path or source of ``model.py``.
        extra_files: name → path or bytes, further files of the bundle.
        matmul_precision: ``default``, ``high`` or ``highest``, frozen into the programs.
        platform: what to lower for (``cpu``, ``cuda``); default: the platform that JAX runs on here.
        stablehlo_version: oldest StableHLO that has to read the programs; default: that of `rsrv.stablehlo`.
        drop_unused_inputs: leave inputs that no output depends on out of the bundle instead of refusing them.
        x64: trace in JAX's 64-bit mode or not; default: as JAX is configured in this process (``JAX_ENABLE_X64``), so
            that the bundle computes what ``jax.jit(fn)`` computes here. Outside of that mode 64-bit inputs are refused
            and 64-bit parameters narrowed, as JAX narrows them.
        golden: store this many seeded samples with the framework's own answers in ``golden.safetensors`` (for each
            shape variant, and for each batch size where rows depend on each other), and run every program on them
            before the bundle appears.
        input_ranges: input name → (low, high) of the sampled values, both included for integers; see
            `rsrv.export.golden.make_samples`.
        tolerances: of max|Δ| / max|reference|: one number, or dtype token or output name → number; default:
            `rsrv.audit.parity.TOLERANCES`. Stated in the provenance, and used again by every later check.
        row_check: run the function on random rows, and refuse it when a row's answer depends on the rows beside it or
            on its place: a server that merges requests would answer them wrongly.
        provenance: further provenance; wins over what is collected.
        collect_git: record commit, branch and remote of the repository in the current directory.
        diff: with `collect_git`, keep uncommitted changes as ``working_tree.patch``.
        overwrite: replace an existing bundle as a whole.
        description: free text for the manifest.
        pool: compile pool that parses the programs for the gate; default: one of its own.

    Raises ExportError when the model cannot be exported as it is, BundleError (SignatureMismatch, …) when the finished
    bundle does not pass the gate.
    """
    run = _front_end(frontend)
    path = Path(os.path.abspath(dir))
    options = ExportOptions(
        dir=path,
        name=path.name if name is None else name,
        batch_sizes=checked_batch_sizes(batch_sizes),
        dynamic_batch=dynamic_batch,
        input_names=input_names,
        output_names=output_names,
        input_batch_axes=input_batch_axes,
        output_batch_axes=output_batch_axes,
        axis_letters=axis_letters if axis_letters is not None else {},
        kwargs=kwargs,
        wrap=wrap,
        int64=int64,
        lowering=lowering,
        torch_xla_python=torch_xla_python,
        shape_variants=shape_variants,
        client_inputs=client_inputs,
        client_outputs=client_outputs,
        hooks=hooks,
        extra_files=dict(extra_files or {}),
        matmul_precision=matmul_precision,
        platform=platform,
        stablehlo_version=stablehlo_version,
        drop_unused_inputs=drop_unused_inputs,
        x64=x64,
        golden=golden,
        input_ranges=dict(input_ranges or {}),
        tolerances=tolerances,
        row_check=row_check,
        provenance=dict(provenance or {}),
        collect_git=collect_git,
        diff=diff,
        overwrite=overwrite,
        description=description,
        pool=pool,
    )
    wanted, _ = _FRONT_ENDS[frontend]
    if len(model) != len(wanted.split(", ")):
        raise ExportError(f"front end {frontend!r} takes ({wanted}), got {len(model)} arguments")
    only_torch = {
        "kwargs": kwargs is not None,
        "wrap": wrap is not None,
        "int64": int64 != "keep",
        "lowering": lowering != "torchax",
    }
    if frontend != "torch" and (given := [option for option, used in only_torch.items() if used]):
        raise ExportError(f"{given[0]} is an option of the front end torch only")
    return run(*model, options)


_FRONT_ENDS = {
    "jax": ("fn, params, inputs", "rsrv.export.jax:export_jax"),
    "jax-fn": ("f, inputs, weights", "rsrv.export.jax:export_jax_function"),
    "torch": ("module, inputs", "rsrv.export.torch.frontend:export_torch"),
}
"""Name → what it takes before the options, and where it is: the module is imported when it is needed."""


def _front_end(name: str) -> Callable[..., Path]:
    if name not in _FRONT_ENDS:
        close = difflib.get_close_matches(name, _FRONT_ENDS, n=1)
        raise ExportError(
            f"unknown front end {name!r}; there are {', '.join(_FRONT_ENDS)}",
            hint=f"did you mean {close[0]!r}?" if close else None,
        )
    module, _, function = _FRONT_ENDS[name][1].partition(":")
    found: Callable[..., Path] = getattr(import_module(module), function)
    return found
