"""`rsrv bundle verify` as a function: bundles against their originals, on random inputs or samples, hooks included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from rsrv.audit.golden import stated_ranges
from rsrv.audit.parity import ParityRow, Tolerances, compare
from rsrv.audit.process import AuditProcess
from rsrv.audit.programs import runnable_programs
from rsrv.audit.samples import Sample, read_samples
from rsrv.audit.shapes import ProgramShapes
from rsrv.audit.verify import Ask, VerifyReport, verify_bundle
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.golden import Golden
from rsrv.core.errors import BundleError, ExportError, RsrvError, UsageError
from rsrv.core.tensors import TensorSpec
from rsrv.export.golden import Range, Reference
from rsrv.export.reference import (
    Side,
    find_source,
    load_original,
    load_source,
    random_samples,
    reference_on,
    side_of,
    sweep,
)

HookMode = Literal["auto", "off", "bundle", "both"]


@dataclass(frozen=True)
class OriginalOutputs:
    """What the original returned for one sample: a row per output with dtype, shape and range."""

    batch_size: int
    sample: str
    rows: tuple[ParityRow, ...]


@dataclass(frozen=True)
class Verification:
    """What bundles are compared with, and how.

    Attributes:
        against: ``golden``, ``jax:SPEC`` or ``torch:SPEC``.
        sources: instead, directories of models as Triton lays them out; the original of a bundle has its name.
        samples: a directory of samples in place of random ones (`read_samples`), with an original only.
        limit: only so many samples, or goldens.
        count: how many random samples for each program.
        ranges: of random inputs, before those that the bundle states.
        hooks: ``bundle``: the answers of the bundle go through its hooks, and the original takes what clients send;
            ``both``: the hooks are around the original, too, which takes the program's place; ``off``: the program
            alone. ``auto``: what fits the inputs of the original; ``both`` where a server is asked and the original is
            the program.
        device: where the original computes, ``cpu`` or ``cuda``.
    """

    against: str = "golden"
    sources: Sequence[Path] = ()
    samples: Path | None = None
    limit: int | None = None
    count: int = 1
    ranges: Mapping[str, Range] = field(default_factory=dict)
    hooks: HookMode = "auto"
    device: str = "cpu"

    @property
    def label(self) -> str:
        return "sources" if self.sources else self.against

    def verify(
        self,
        directory: Path,
        *,
        process: AuditProcess,
        batches: Sequence[int] | None = None,
        tolerances: Tolerances = None,
        ask: Ask | None = None,
    ) -> VerifyReport:
        """Compare the bundle in `directory`.

        `ask` sends the samples to a server of it; else its programs run in `process`. Raises UsageError; what is wrong
        with the bundle or with its original is in the report.
        """
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
        if self.label == "golden":
            return verify_bundle(
                directory, batches=batches, tolerances=tolerances, process=process, limit=self.limit, ask=ask
            )
        try:
            bundle = open_bundle(directory)
            if bundle.manifest.is_meta:
                return verify_bundle(directory, against=self.label)
            reference, hooks = self._reference(bundle, process, served=ask is not None)
            inputs = bundle.manifest.wire_inputs if hooks else bundle.manifest.executable_inputs
            samples = {} if self.samples is None else read_samples(self.samples, inputs, self.limit)
            goldens = [_answered(reference, name, sample) for name, sample in samples.items()]
        except (BundleError, ExportError) as error:
            return VerifyReport(directory.absolute().name, directory, self.label, problem=error.message)
        made = sweep(reference, count=self.count, ranges=self._ranges(bundle, inputs))
        return verify_bundle(
            directory,
            against=self.label,
            goldens=goldens,
            sample_names=list(samples),
            sweep=made if self.samples is None else None,
            batches=batches,
            tolerances=tolerances,
            process=process,
            hooks=hooks,
            ask=ask,
        )

    def outputs_of_original(
        self, directory: Path, *, process: AuditProcess, batches: Sequence[int] | None = None
    ) -> Iterator[OriginalOutputs]:
        """What the original alone returns for the samples, or for random inputs of each program's size (X-50).

        Raises UsageError, BundleError, or ExportError when the original fails.
        """
        bundle = open_bundle(directory)
        reference, hooks = self._reference(bundle, process, served=False)
        specs = bundle.manifest.wire_inputs if hooks else bundle.manifest.executable_inputs
        for rows, name, sample in self._samples(bundle, specs, batches, hooks=hooks):
            outputs = reference(sample)
            yield OriginalOutputs(rows, name, compare(outputs, outputs).rows)

    def _samples(
        self, bundle: Bundle, specs: Sequence[TensorSpec], batches: Sequence[int] | None, *, hooks: bool
    ) -> Iterator[tuple[int, str, Sample]]:
        if self.samples is not None:
            for name, sample in read_samples(self.samples, specs, self.limit).items():
                yield _rows(specs, sample), name, sample
            return
        ranges = self._ranges(bundle, specs)
        with ProgramShapes(bundle) as shapes:
            for program in runnable_programs(bundle, batches):
                inputs = shapes.of_clients(program) if hooks else shapes.of(program)
                for index, sample in enumerate(random_samples(inputs, count=self.count, ranges=ranges)):
                    yield _rows(specs, sample), str(index), sample

    def _reference(self, bundle: Bundle, process: AuditProcess, *, served: bool) -> tuple[Reference, bool]:
        """The original, and whether it is compared with what comes through the hooks of the bundle."""
        manifest = bundle.manifest
        if self.sources:
            original = load_source(find_source(self.sources, bundle.name), manifest, device=self.device)
        else:
            original = load_original(self.against, manifest, device=self.device)
        if bundle.hooks_path is None:
            return reference_on("program", original, manifest), False
        side, hooks = self._path(side_of(original, manifest), served=served)
        reference = reference_on(side, original, manifest)
        if hooks and side == "program":
            return _hooked(reference, bundle, process), True
        return reference, hooks

    def _path(self, side: Side, *, served: bool) -> tuple[Side, bool]:
        if self.hooks == "off":
            if served:
                raise UsageError("--hooks off: a server runs the hooks of its bundles", hint="leave --served out")
            return "program", False
        if self.hooks == "auto":
            return side, served or side == "client"
        return ("client" if self.hooks == "bundle" else "program"), True

    def _ranges(self, bundle: Bundle, inputs: Sequence[TensorSpec]) -> dict[str, Range]:
        """What the bundle states of its program's inputs holds for clients' inputs of the same name and dtype."""
        same = {(spec.name, spec.dtype) for spec in bundle.manifest.executable_inputs}
        taken = {spec.name for spec in inputs if (spec.name, spec.dtype) in same}
        return {**{name: pair for name, pair in stated_ranges(bundle).items() if name in taken}, **self.ranges}


def _hooked(reference: Reference, bundle: Bundle, process: AuditProcess) -> Reference:
    """The original in the place of the program, between the hooks of the bundle."""

    def answer(inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        given = process.call_hook(bundle, "preprocess", inputs)
        return process.call_hook(bundle, "postprocess", reference(given))

    return answer


def _answered(reference: Reference, name: str, sample: Sample) -> Golden:
    try:
        return Golden(sample, reference(sample))
    except RsrvError as error:
        raise ExportError(f"sample {name}: {error.message}", hint=error.hint) from error


def _rows(specs: Sequence[TensorSpec], sample: Mapping[str, np.ndarray]) -> int:
    return next((sample[spec.name].shape[spec.batch_axis] for spec in specs if spec.batch_axis is not None), 1)
