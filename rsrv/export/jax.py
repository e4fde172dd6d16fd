"""The JAX front ends: trace a function at every batch size, make its arrays weights, lower it, write the bundle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from importlib.metadata import version as version_of
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from rsrv.audit.gate import bundle_gate
from rsrv.audit.golden import parity_provenance
from rsrv.bundle.golden import Golden
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.programs import ANY_BATCH
from rsrv.bundle.writer import write_bundle
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.axes import Output, output_specs
from rsrv.export.captures import Trace
from rsrv.export.golden import SEED, golden_batches, golden_files, make_goldens
from rsrv.export.inputs import Example
from rsrv.export.jax_ranges import index_ranges
from rsrv.export.jax_reference import jax_reference
from rsrv.export.lowering import Model, Programs, computes_in_float64
from rsrv.export.options import ExportOptions
from rsrv.export.params import Params, Weight, flatten_params, named_weights
from rsrv.export.provenance import export_provenance
from rsrv.export.rows import require_independent_rows
from rsrv.export.symbolic import batch_symbol, symbolic_batch
from rsrv.export.usercode import user_code
from rsrv.export.variants import Variants, resolve_variants
from rsrv.stablehlo.artifact import DEFAULT_VERSION, serialize

log = logging.getLogger(__name__)

TracedModel = Mapping[int, tuple[Trace, tuple[Output, ...]]]
"""Batch key → the function traced for it, and its outputs."""
_ONE_SIZE = "let the function take the batch size from its inputs (x.shape[0]), or export it with batch_sizes=None"

TESTED_JAX = ((0, 10), (0, 13))
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
    variants = resolve_variants(inputs, options)
    x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    if not x64:
        _refuse_wide_inputs(variants.inputs)
        params = _narrowed(params, options.name)
    models = [Model(fn, params, examples, options.output_names) for examples in variants.sets]
    precision = options.matmul_precision
    with jax.default_matmul_precision(precision) if precision is not None else nullcontext():
        effective = jax.config.jax_default_matmul_precision or "default"  # type: ignore[attr-defined]
        keys = options.compared if options.dynamic_batch else options.programs
        traced = [_traced(model, keys) for model in models]
        traces = [trace for variant in traced for trace, _ in variant.values()]
        # Behind the others, so that those keep their numbers.
        symbol = batch_symbol() if options.dynamic_batch else None
        first_symbolic = len(traces)
        traces += [_symbolic_trace(model, symbol) for model in models if symbol is not None]
        outputs = _output_specs(models, traced, options)
        programs = Programs.of(models[0], traces, drop_unused_inputs=options.drop_unused_inputs)
        served = variants.only({example.name for example in programs.inputs})
        if options.row_check:
            for first, examples in zip(count(step=len(keys)), served.sets, strict=False):
                _check_rows(programs, first, keys, examples, outputs)
        numbers = count(0 if symbol is None else first_symbolic)
        modules = {
            key: {
                size: serialize(
                    programs.lower(next(numbers), symbol if symbol is not None else size or None, platform, examples),
                    version,
                )
                for size in (options.programs if symbol is None else (ANY_BATCH,))
            }
            for key, examples in zip(served.keys(), served.sets, strict=True)
        }
        goldens = _goldens(variants, models, traced, {example.name for example in programs.inputs}, outputs, options)
    _say_how_it_is_frozen(platform, effective)
    _report(options.name, programs, traces)
    proof = {"parity": parity_provenance(goldens, SEED, options.tolerances)} if goldens else {}
    with golden_files(goldens) as files:
        return write_bundle(
            options.dir,
            name=options.name,
            description=options.description,
            executable_inputs=[example.io_spec(options.axis_letters.get(example.name)) for example in served.inputs],
            executable_outputs=outputs,
            modules=modules if served.input_shapes() else modules[()],
            input_shapes=served.input_shapes(),
            dynamic_batch_sizes=options.batch_sizes if options.dynamic_batch else None,
            weights=[(weight.name, weight.numpy()) for weight in programs.weights],
            client_inputs=options.client_inputs,
            client_outputs=options.client_outputs,
            hooks=options.hooks,
            extra_files={**options.extra_files, **files},
            provenance=export_provenance(
                options,
                {
                    **proof,
                    "source_framework": "jax",
                    "converter": converter,
                    "jax_version": jax.__version__,
                    "jaxlib_version": version_of("jaxlib"),
                    "stablehlo_version": version,
                    "export_platform": platform,
                    "matmul_precision": effective,
                    "x64": x64,
                    **({} if options.row_check else {"row_check": False}),
                    **({"batch_export": "symbolic"} if options.dynamic_batch else {}),
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
            gate=bundle_gate(
                options.pool,
                goldens=goldens,
                tolerances=options.tolerances,
                backend="cpu" if platform == "cpu" else "auto",
            ),
            overwrite=options.overwrite,
        )


def _check_rows(
    programs: Programs, first: int, keys: Sequence[int], examples: Sequence[Example], outputs: Sequence[IOSpec]
) -> None:
    """Check the programs of one shape variant, whose traces begin at number `first`.

    Nothing to check where nothing is ever merged or padded: one row at a time, or an output without a batch axis.
    """
    axes = [(output.name, output.batch_axis) for output in outputs]
    batched = [(name, axis) for name, axis in axes if axis is not None]
    index = next((i for i, key in enumerate(keys) if key > 1), None)
    if index is None or len(batched) < len(axes):
        return
    with user_code("running the function on random rows"):
        run = programs.runner(first + index)
        require_independent_rows(run, examples, batched, keys[index])


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


def _symbolic_trace(model: Model, symbol: Any) -> Trace:
    with symbolic_batch():
        return model.trace(symbol)[0]


def _goldens(
    variants: Variants,
    models: Sequence[Model],
    traced: Sequence[TracedModel],
    served: Collection[str],
    outputs: Sequence[IOSpec],
    options: ExportOptions,
) -> list[Golden]:
    """JAX's own answers for every shape variant, in the modes that JAX is in."""
    if not options.golden:
        return []
    coalesces = all(spec.batch_axis is not None for spec in outputs)
    batches = golden_batches(options.batch_sizes, coalesces=coalesces)
    goldens = []
    for examples, model, variant in zip(variants.sets, models, traced, strict=True):
        trace = next(iter(variant.values()))[0]
        positions = {len(trace.captured) + i: example.name for i, example in enumerate(examples)}
        ranges = {**index_ranges(trace.jaxpr, positions), **options.input_ranges}
        goldens += make_goldens(
            examples, jax_reference(model), options.golden, batches=batches, ranges=ranges, served=served
        )
    return goldens


def _output_specs(models: Sequence[Model], traced: Sequence[TracedModel], options: ExportOptions) -> list[IOSpec]:
    """Names, dtypes and verified axes of the outputs; a single batch size is compared with its double."""
    found = [{size: outputs for size, (_, outputs) in variant.items()} for variant in traced]
    first = next(iter(found[0].values()))
    known = {example.name for example in models[0].examples} | {output.name for output in first}
    if unknown := sorted(set(options.axis_letters) - known):
        raise ExportError(f"axis_letters names {unknown[0]!r}; the tensors are {', '.join(sorted(known))}")
    if options.batch_sizes is not None and len(options.batch_sizes) == 1:
        double = 2 * options.batch_sizes[0]
        for model, variant in zip(models, found, strict=True):
            try:
                variant[double] = model.trace(double)[1]
            except ExportError as error:
                raise ExportError(
                    f"the batch axes of the outputs are found by tracing at a second batch size, and {error.message}",
                    hint=_ONE_SIZE,
                ) from error
    return output_specs(found, options)


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
