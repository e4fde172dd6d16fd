"""The JAX front ends: trace a function at every batch size, make its arrays weights, lower it, write the bundle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from rsrv.audit.gate import bundle_gate
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.writer import write_bundle
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.axes import UNDECLARED, Undeclared, output_batch_axis
from rsrv.export.captures import Trace
from rsrv.export.inputs import Example, resolve_examples
from rsrv.export.lowering import Model, Output, Programs, computes_in_float64
from rsrv.export.options import ExportOptions
from rsrv.export.params import Params, Weight, flatten_params, named_weights
from rsrv.export.provenance import export_provenance
from rsrv.export.rows import require_independent_rows
from rsrv.export.usercode import user_code
from rsrv.stablehlo.artifact import DEFAULT_VERSION, serialize

log = logging.getLogger(__name__)

_ONE_SIZE = "let the function take the batch size from its inputs (x.shape[0]), or export it with batch_sizes=None"

TESTED_JAX = ((0, 10), (0, 11))
"""Versions of JAX that the front ends were tested with: from the first to below the second."""


def export_jax(fn: Callable[..., Any], params: Any, inputs: Any, options: ExportOptions) -> Path:
    """Export ``fn(params, *inputs)``; see `rsrv.export.export_bundle`."""
    return _export(fn, flatten_params(params), inputs, options, converter="rsrv.export jax")


def export_jax_function(
    f: Callable[..., Any], inputs: Any, weights: Sequence[tuple[str, Any]], options: ExportOptions
) -> Path:
    """Export ``f(*inputs, *weights)``, with weights that the caller named and ordered."""

    def fn(values: Sequence[Any], *inputs: Any) -> Any:
        return f(*inputs, *values)

    return _export(fn, named_weights(weights), inputs, options, converter="rsrv.export jax-fn")


def _export(fn: Callable[..., Any], params: Params, inputs: Any, options: ExportOptions, *, converter: str) -> Path:
    _require_tested_jax()
    with nullcontext() if options.x64 is None else jax.enable_x64(options.x64):
        return _export_in_mode(fn, params, inputs, options, converter)


def _export_in_mode(
    fn: Callable[..., Any], params: Params, inputs: Any, options: ExportOptions, converter: str
) -> Path:
    """Export in the 64-bit mode that JAX is in: the same function means different programs in the two modes."""
    platform = options.platform or jax.export.default_export_platform()
    version = options.stablehlo_version or DEFAULT_VERSION
    examples = resolve_examples(
        inputs,
        names=options.input_names,
        batch_axes=options.input_batch_axes,
        batched=options.batch_sizes is not None,
    )
    x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    if not x64:
        _refuse_wide_inputs(examples)
        params = _narrowed(params, options.name)
    model = Model(fn, params, examples, options.output_names)
    precision = options.matmul_precision
    with jax.default_matmul_precision(precision) if precision is not None else nullcontext():
        effective = jax.config.jax_default_matmul_precision or "default"  # type: ignore[attr-defined]
        traced = _traced(model, options.programs)
        traces = [trace for trace, _ in traced.values()]
        outputs = _output_specs(model, {key: found for key, (_, found) in traced.items()}, options)
        programs = Programs.of(model, traces, drop_unused_inputs=options.drop_unused_inputs)
        if options.row_check:
            _check_rows(programs, list(traced), outputs)
        modules = {
            key: serialize(programs.lower(index, key or None, platform), version) for index, key in enumerate(traced)
        }
    _say_how_it_is_frozen(platform, effective)
    _report(options.name, programs, traces)
    return write_bundle(
        options.dir,
        name=options.name,
        description=options.description,
        executable_inputs=[example.io_spec(options.axis_letters.get(example.name)) for example in programs.inputs],
        executable_outputs=outputs,
        modules=modules,
        weights=[(weight.name, weight.numpy()) for weight in programs.weights],
        client_inputs=options.client_inputs,
        client_outputs=options.client_outputs,
        hooks=options.hooks,
        extra_files=options.extra_files,
        provenance=export_provenance(
            options,
            {
                "source_framework": "jax",
                "converter": converter,
                "jax_version": jax.__version__,
                "jaxlib_version": version_of("jaxlib"),
                "stablehlo_version": version,
                "export_platform": platform,
                "matmul_precision": effective,
                "x64": x64,
                **({} if options.row_check else {"row_check": False}),
                **{
                    key: list(names)
                    for key, names in (
                        ("dropped_inputs", programs.dropped_inputs),
                        ("dropped_weights", programs.dropped_weights),
                    )
                    if names
                },
            },
        ),
        gate=bundle_gate(options.pool),
        overwrite=options.overwrite,
    )


def _check_rows(programs: Programs, keys: Sequence[int], outputs: Sequence[IOSpec]) -> None:
    """Nothing to check where nothing is ever merged or padded: one row at a time, or an output without a batch axis."""
    axes = [(output.name, output.batch_axis) for output in outputs]
    batched = [(name, axis) for name, axis in axes if axis is not None]
    index = next((i for i, key in enumerate(keys) if key > 1), None)
    if index is None or len(batched) < len(axes):
        return
    with user_code("running the function on random rows"):
        run = programs.runner(index)
        require_independent_rows(run, programs.inputs, batched, keys[index])


def _traced(model: Model, programs: Sequence[int]) -> dict[int, tuple[Trace, tuple[Output, ...]]]:
    """The function traced for every program."""
    traced: dict[int, tuple[Trace, tuple[Output, ...]]] = {}
    for key in programs:
        try:
            traced[key] = model.trace(key or None)
        except ExportError as error:
            if not traced:
                raise
            done = ", ".join(map(str, traced))
            raise ExportError(f"{error.message}\nIt can be traced at batch size {done}.", hint=_ONE_SIZE) from error
    return traced


def _output_specs(model: Model, traced: Mapping[int, tuple[Output, ...]], options: ExportOptions) -> list[IOSpec]:
    """Names, dtypes and verified batch axes of the outputs; a single batch size is compared with its double."""
    first = next(iter(traced.values()))
    known = {example.name for example in model.examples} | {output.name for output in first}
    if unknown := sorted(set(options.axis_letters) - known):
        raise ExportError(f"axis_letters names {unknown[0]!r}; the tensors are {', '.join(sorted(known))}")
    if options.batch_sizes is None:
        if options.output_batch_axes is not None:
            raise ExportError("output_batch_axes has no meaning with batch_sizes=None: nothing is batched")
        axes: list[int | None] = [None] * len(first)
    else:
        compared = dict(traced)
        if len(compared) == 1:
            double = 2 * next(iter(compared))
            try:
                compared[double] = model.trace(double)[1]
            except ExportError as error:
                raise ExportError(
                    f"the batch axes of the outputs are found by tracing at a second batch size, and {error.message}",
                    hint=_ONE_SIZE,
                ) from error
        axes = _output_axes(compared, options)
    return [
        IOSpec(output.name, output.dtype, output.shape, batch_axis=axis, letters=options.axis_letters.get(output.name))
        for output, axis in zip(first, axes, strict=True)
    ]


def _output_axes(traced: Mapping[int, tuple[Output, ...]], options: ExportOptions) -> list[int | None]:
    first = next(iter(traced.values()))
    for size, outputs in traced.items():
        if [(o.name, o.dtype) for o in outputs] != [(o.name, o.dtype) for o in first]:
            raise ExportError(
                f"the function returns other outputs at batch size {size}: "
                + ", ".join(f"{o.name} {o.dtype.value}" for o in outputs)
            )
    declared = _declared_axes([output.name for output in first], options)
    axes = [
        output_batch_axis(output.name, {size: outputs[i].shape for size, outputs in traced.items()}, declared[i])
        for i, output in enumerate(first)
    ]
    for output, axis in zip(first, axes, strict=True):
        if axis is None:
            log.warning(
                "output does not follow the batch size, so requests to this model are never merged model=%s output=%s",
                options.name,
                output.name,
            )
    return axes


def _declared_axes(names: Sequence[str], options: ExportOptions) -> list[int | Undeclared | None]:
    declared = options.output_batch_axes
    if declared is None:
        return [UNDECLARED] * len(names)
    if isinstance(declared, Mapping):
        if unknown := sorted(set(declared) - set(names)):
            raise ExportError(f"output_batch_axes names {unknown[0]!r}; the outputs are {', '.join(names)}")
        return [declared.get(name, UNDECLARED) for name in names]
    if len(declared) != len(names):
        raise ExportError(f"output_batch_axes has {len(declared)} entries for {len(names)} outputs")
    return list(declared)


def _report(name: str, programs: Programs, traces: Sequence[Trace]) -> None:
    """Log what the user may not expect."""
    if programs.dropped_weights:
        log.info("unused weights left out model=%s weights=%s", name, ",".join(programs.dropped_weights))
    if programs.lifted:
        log.info("captured arrays became weights model=%s weights=%s", name, ",".join(programs.lifted))
    if computes_in_float64(traces):
        log.warning(
            "the program computes in float64 although no input or weight is float64 model=%s: in JAX's 64-bit mode, "
            "jnp.zeros, jnp.arange and the like make 64-bit arrays, and numpy scalars such as np.sqrt(2) are 64-bit; "
            "give arrays a dtype, use math.sqrt, or export without --x64",
            name,
        )


def _refuse_wide_inputs(examples: Sequence[Example]) -> None:
    for example in examples:
        narrow = jax.dtypes.canonicalize_dtype(example.dtype.numpy)
        if narrow != example.dtype.numpy:
            raise ExportError(
                f"input {example.name!r} is {example.dtype.value}, and JAX is not in its 64-bit mode, where it would "
                f"compute with {DType.from_numpy(narrow).value} instead",
                hint=f"give an example of dtype {narrow}, or export with x64=True (--x64)",
            )


def _narrowed(params: Params, model: str) -> Params:
    """`params` with 64-bit weights as JAX narrows them outside of its 64-bit mode."""
    narrowed = []
    weights = []
    for weight in params.weights:
        dtype = jax.dtypes.canonicalize_dtype(weight.value.dtype)
        if dtype != weight.value.dtype:
            narrowed.append(weight.name)
            weight = Weight(weight.name, np.asarray(weight.value).astype(dtype))
        weights.append(weight)
    if narrowed:
        log.warning(
            "64-bit parameters are exported as 32-bit ones, as JAX computes with them here model=%s weights=%s; "
            "x64=True (--x64) keeps them",
            model,
            ",".join(narrowed),
        )
    return replace(params, weights=tuple(weights))


@cache
def _say_how_it_is_frozen(platform: str, precision: str) -> None:
    """Once per process and setting: programs keep the precision that they were exported with."""
    log.info("exporting programs platform=%s matmul_precision=%s", platform, precision)


def _require_tested_jax() -> None:
    oldest, beyond = TESTED_JAX
    if not oldest <= jax.__version_info__[:2] < beyond:
        raise ExportError(
            f"JAX {jax.__version__} is outside the tested range, {oldest[0]}.{oldest[1]} to below "
            f"{beyond[0]}.{beyond[1]}",
            hint="pip install 'rsrv[serve]'",
        )
