"""The PyTorch front end: export the graph, lower it at every shape, write the bundle if every program proves right."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import torch

from rsrv.audit.gate import bundle_gate
from rsrv.audit.golden import parity_provenance
from rsrv.bundle.golden import Golden
from rsrv.bundle.iospec import IOSpec
from rsrv.bundle.programs import ANY_BATCH
from rsrv.bundle.writer import write_bundle
from rsrv.core.errors import ExportError, ParityMismatch, ProgramError, SignatureMismatch
from rsrv.export.axes import Traced, output_specs
from rsrv.export.golden import SEED, Range, golden_batches, golden_files, make_goldens
from rsrv.export.inputs import Example
from rsrv.export.options import ExportOptions
from rsrv.export.provenance import export_provenance
from rsrv.export.symbolic import batch_symbol, is_symbol, symbolic_batch
from rsrv.export.torch.dtypes import as_declared, output_dtype, to_numpy, to_torch
from rsrv.export.torch.facts import module_directory, require_tested, version_facts
from rsrv.export.torch.graph import Graph
from rsrv.export.torch.lowered import Entry, outputs
from rsrv.export.torch.model import TorchModel, fitted, preserving
from rsrv.export.torch.ranges import index_ranges
from rsrv.export.torch.sources import input_specs, model_of
from rsrv.export.torch.xla.converter import Converter
from rsrv.export.torch.xla.lowered import lower_by_torch_xla
from rsrv.export.variants import Variants, resolve_variants
from rsrv.stablehlo.artifact import DEFAULT_VERSION

log = logging.getLogger(__name__)

SAMPLES = 2
"""Seeded random calls that every program has to answer as eager PyTorch does, beside the user's own example."""


def export_torch(module: Any, inputs: Any, options: ExportOptions) -> Path:
    """Export an nn.Module, a TorchScript module or an ExportedProgram; see `rsrv.export.export_bundle`."""
    require_tested()
    model = model_of(module, inputs, options.kwargs, options.output_names, options.wrap)
    with preserving(model.module), jax.enable_x64(True):
        return _Export(model, options).write()


@dataclass(frozen=True, eq=False)
class _Made:
    """Programs that were lowered and have yet to prove themselves; `converter` are facts about another lowering."""

    dynamic: bool
    graph: Graph
    entry: Entry
    served: Variants
    outputs: list[IOSpec]
    modules: dict[tuple[int, ...], dict[int, bytes]]
    converter: Mapping[str, Any] = field(default_factory=dict)


class _Export:
    """One export: what its steps share."""

    def __init__(self, model: TorchModel, options: ExportOptions) -> None:
        self.model = model
        self.options = options
        self.variants = resolve_variants(*input_specs(model, options))
        self.names = [example.name for example in self.variants.sets[0]]
        answer = model.run(model.call.tensors)
        for name, tensor in answer.items():
            output_dtype(f"output {name!r}", tensor.dtype)
        self.output_names = list(answer)
        self.platform = options.platform or jax.export.default_export_platform()
        self.version = options.stablehlo_version or DEFAULT_VERSION

    def write(self) -> Path:
        """One graph for all batch sizes where that works, and is right; else one for each."""
        if self.options.dynamic_batch:
            with symbolic_batch():
                made = self._dynamic()
            assert made is not None, "dynamic_batch has batch sizes"
            return self._written(made)
        made = None
        try:
            if (made := self._dynamic()) is not None:
                return self._written(made)
        except (ExportError, ParityMismatch, ProgramError, SignatureMismatch) as error:
            if made is not None and made.graph.mutated:  # it keeps state, at every batch size
                raise
            log.info("one graph does not serve all batch sizes, exporting each for itself why=%s", error.message)
        return self._written(self._retraced())

    # --- programs -------------------------------------------------------------------------------------------------

    def _dynamic(self) -> _Made | None:
        sizes = self.options.batch_sizes
        if sizes is None or self.options.lowering == "torch-xla":  # which knows static shapes only
            return None
        graphs = []
        for examples in self.variants.sets:
            axes = [example.batch_axis for example in examples if example.batch_axis is not None]
            graphs.append(self.model.export_dynamic(self._tensors(examples, 2), axes, largest=2 * max(sizes)))
        return self._make([dict.fromkeys(self.options.compared, graph) for graph in graphs], dynamic=True)

    def _retraced(self) -> _Made:
        graphs: list[dict[int, Graph]] = []
        for examples in self.variants.sets:
            found: dict[int, Graph] = {}
            for size in self.options.compared:
                try:
                    found[size] = self.model.export(self._tensors(examples, size))
                except ExportError as error:
                    if size in self.options.programs:
                        raise
                    raise ExportError(
                        "the batch axes of the outputs are found by exporting at a second batch size, and "
                        f"{error.message}",
                        hint=error.hint
                        or "a model for one batch size only is exported with batch_sizes=None (--no-batch)",
                    ) from error
            graphs.append(found)
        return self._make(graphs, dynamic=False)

    def _make(self, graphs: Sequence[Mapping[int, Graph]], *, dynamic: bool) -> _Made:
        options = self.options
        traced: list[Traced] = [
            {size: outputs(graph, self.output_names, size or None, options.int64) for size, graph in variant.items()}
            for variant in graphs
        ]
        known = [*self.names, *self.output_names]
        if unknown := sorted(set(options.axis_letters) - set(known)):
            raise ExportError(f"axis_letters names {unknown[0]!r}; the tensors are {', '.join(sorted(known))}")
        specs = output_specs(traced, options)
        every = [variant[size] for variant in graphs for size in options.programs if size in variant]
        entry = Entry.of(
            every, self.names, drop_unused_inputs=options.drop_unused_inputs, order=self.model.weight_names()
        )
        served = self.variants.only({name for name, kept in zip(self.names, entry.kept, strict=True) if kept})
        if options.torch_xla_python is not None:
            return self._converted(graphs, specs, entry, served)
        precision = options.matmul_precision
        with jax.default_matmul_precision(precision) if precision is not None else nullcontext():
            symbol = batch_symbol() if options.dynamic_batch else None
            modules = {
                key: {ANY_BATCH: self._lower(entry, variant[options.programs[0]], examples, symbol)}
                if symbol is not None
                else {size: self._lower(entry, variant[size], examples, size) for size in options.programs}
                for key, examples, variant in zip(served.keys(), served.sets, graphs, strict=True)
            }
        return _Made(dynamic, every[0], entry, served, specs, modules)

    def _lower(self, entry: Entry, graph: Graph, examples: Sequence[Example], batch: Any) -> bytes:
        """`batch`: a number, 0 for the examples' own shapes, or a symbol."""
        return entry.lower(graph, _sized(examples, batch), self.options.int64, self.platform, self.version)

    def _converted(
        self, graphs: Sequence[Mapping[int, Graph]], specs: list[IOSpec], entry: Entry, served: Variants
    ) -> _Made:
        """By torch-xla, in the environment that the user named."""
        options = self.options
        assert options.torch_xla_python is not None
        keys = [(place, size) for place in range(len(graphs)) for size in options.programs]
        converter = Converter(Path(os.path.abspath(options.torch_xla_python)), options.matmul_precision or "default")
        lowered = lower_by_torch_xla(
            entry,
            [(graphs[place][size], _sized(served.sets[place], size)) for place, size in keys],
            converter,
            int64=options.int64,
            version=self.version,
        )
        made = iter(lowered.modules)
        modules = {key: {size: next(made) for size in options.programs} for key in served.keys()}  # noqa: SIM118
        facts = {
            "torch_xla_environment": lowered.versions,
            "matmul_precision": converter.precision,
            "dropped_weights": list(lowered.dropped),
        }
        return _Made(False, graphs[0][options.programs[0]], lowered.entry, served, specs, modules, facts)

    # --- the proof ------------------------------------------------------------------------------------------------

    def _written(self, made: _Made) -> Path:
        options = self.options
        stored, proof = self._goldens(made)
        with golden_files(stored) as files:
            try:
                return write_bundle(
                    options.dir,
                    name=options.name,
                    description=options.description,
                    executable_inputs=[one.io_spec(options.axis_letters.get(one.name)) for one in made.served.inputs],
                    executable_outputs=made.outputs,
                    modules=made.modules if made.served.input_shapes() else made.modules[()],
                    input_shapes=made.served.input_shapes(),
                    dynamic_batch_sizes=options.batch_sizes if options.dynamic_batch else None,
                    weights=[(weight.name, weight.numpy()) for weight in made.entry.weights],
                    client_inputs=options.client_inputs,
                    client_outputs=options.client_outputs,
                    hooks=options.hooks,
                    extra_files={**options.extra_files, **files},
                    provenance=export_provenance(
                        options, self._facts(made, proof), repo_dir=module_directory(self.model.module)
                    ),
                    gate=bundle_gate(
                        options.pool,
                        goldens=proof,
                        tolerances=options.tolerances,
                        backend="cpu" if self.platform == "cpu" else "auto",
                    ),
                    overwrite=options.overwrite,
                )
            except ParityMismatch as error:
                if made.graph.mutated:
                    hint = (
                        f"the model changes its buffer {made.graph.mutated[0]!r} in forward, and a program keeps no "
                        "state between requests: make it an input and an output"
                    )
                elif options.lowering == "torch-xla":
                    hint = "torch-xla computes something else than PyTorch here: try --lowering torchax, the default"
                else:
                    raise
                raise ParityMismatch(error.message, rule=error.rule, file=error.file, hint=hint) from error

    def _goldens(self, made: _Made) -> tuple[list[Golden], list[Golden]]:
        """(the goldens that the bundle carries, those that its programs have to answer now)."""
        options = self.options
        batches = golden_batches(
            options.batch_sizes, coalesces=all(spec.batch_axis is not None for spec in made.outputs)
        )
        served = {example.name for example in made.served.sets[0]}
        ranges = self._ranges(made.graph)
        stored: list[Golden] = []
        proof: list[Golden] = []
        for examples in self.variants.sets:
            for batch in batches:
                proof.append(self._own_example(examples, batch, served))
                count = max(options.golden, SAMPLES)
                drawn = make_goldens(examples, self.reference, count, batches=[batch], ranges=ranges, served=served)
                stored += drawn[: options.golden]
                proof += drawn
        return stored, proof

    def _own_example(self, examples: Sequence[Example], batch: int | None, served: set[str]) -> Golden:
        tensors = self._tensors(examples, batch)
        sample = {
            one.name: to_numpy(tensor).astype(one.dtype.numpy) for one, tensor in zip(examples, tensors, strict=True)
        }
        answer = self.reference(sample)
        return Golden({name: array for name, array in sample.items() if name in served}, answer)

    def reference(self, sample: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Eager PyTorch's outputs for all inputs of the model, in the dtypes of the bundle."""
        tensors = [
            to_torch(sample[name]).to(device=example.device, dtype=example.dtype)
            for name, example in zip(self.names, self.model.call.tensors, strict=True)
        ]
        narrow = self.options.int64 == "narrow"
        return {name: as_declared(name, tensor, narrow=narrow) for name, tensor in self.model.run(tensors).items()}

    def _ranges(self, graph: Graph) -> dict[str, Range]:
        """What to draw integers from: what the user says, the table that they index, or what the example holds."""
        ranges: dict[str, Range] = dict(index_ranges(graph.module, graph.placeholders(self.names)))
        call = self.model.call
        for name, tensor, given in zip(self.names, call.tensors, call.given, strict=True):
            whole = not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
            if name not in ranges and given and whole and tensor.numel():
                ranges[name] = (int(tensor.min()), int(tensor.max()))
        return ranges | dict(self.options.input_ranges)

    def _facts(self, made: _Made, proof: Sequence[Golden]) -> dict[str, Any]:
        options = self.options
        kept = made.entry.kept
        facts = {
            "source_framework": "pytorch",
            **self.model.facts,
            "converter": "rsrv.export torch",
            "lowering": options.lowering,
            **version_facts(),
            "stablehlo_version": self.version,
            "export_platform": self.platform,
            "matmul_precision": options.matmul_precision
            or jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
            or "default",
            "int64": options.int64,
            "batch_export": None
            if options.batch_sizes is None
            else "symbolic"
            if options.dynamic_batch
            else "dynamic"
            if made.dynamic
            else "retraced",
            "parity": parity_provenance(proof, SEED, options.tolerances),
            "dropped_inputs": [name for name, used in zip(self.names, kept, strict=True) if not used],
            "dropped_weights": list(made.graph.dropped),
            "dropped_buffer_updates": list(made.graph.mutated),
            **made.converter,
        }
        return {name: value for name, value in facts.items() if value not in (None, [])}

    def _tensors(self, examples: Sequence[Example], batch: int | None) -> list[torch.Tensor]:
        return [
            fitted(tensor, example.shape_at(batch or None))
            for tensor, example in zip(self.model.call.tensors, examples, strict=True)
        ]


def _sized(examples: Sequence[Example], batch: Any) -> list[Example]:
    """The examples with `batch` rows: a number, or a symbol; 0 leaves them as they are."""
    rows = batch if is_symbol(batch) else batch or None
    return [replace(example, shape=example.shape_at(rows)) for example in examples]
