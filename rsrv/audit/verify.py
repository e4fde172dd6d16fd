"""The numbers of a bundle on the machine where this runs: every program against goldens, or a sweep of samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rsrv.audit.findings import CheckReport, Finding, Skipped
from rsrv.audit.golden import audit_process, chosen_tolerances, golden_file, parity_findings
from rsrv.audit.packing import golden_problem
from rsrv.audit.parity import ParityReport, Tolerances, merge
from rsrv.audit.process import AuditProcess
from rsrv.audit.programs import PARSE_SECONDS, Program, programs_of
from rsrv.bundle.digests import read_verified_program
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.files import GOLDEN
from rsrv.bundle.golden import Golden, read_golden
from rsrv.core.errors import BundleError, RsrvError, UsageError
from rsrv.core.tensors import TensorSpec
from rsrv.runtime.compile_pool import CompilePool

SizedInput = tuple[TensorSpec, tuple[int, ...]]
"""An executable input, and the shape that one program takes."""

Sweep = Callable[[Sequence[SizedInput]], Sequence[Golden]]
"""Makes goldens for exactly these shapes."""


@dataclass(frozen=True)
class VerifiedProgram:
    """One program: `samples` has the comparison of every golden that it answered, by the golden's number."""

    file: str
    variant: tuple[int, ...]
    batch_key: int
    samples: Mapping[int, ParityReport] = field(default_factory=dict)
    problem: str | None = None

    @property
    def parity(self) -> ParityReport:
        """All samples together."""
        return merge(self.samples.values())

    @property
    def verdict(self) -> str:
        """``failed`` (it could not be run), ``mismatch``, ``unproven`` or ``ok``."""
        if self.problem is not None:
            return "failed"
        parity = self.parity
        return "mismatch" if not parity.ok else "unproven" if parity.unproven else "ok"

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "variant": list(self.variant),
            "batch_size": self.batch_key or None,
            "verdict": self.verdict,
            "problem": self.problem,
            "passed": sum(report.ok for report in self.samples.values()),
            "outputs": [row.to_json() for row in self.parity.rows],
            "samples": [{"sample": index, **report.to_json()} for index, report in self.samples.items()],
        }


@dataclass
class VerifyReport:
    """What one bundle was compared with, `against`, and what came of it. `problem`: why nothing was compared at all."""

    bundle: str
    path: Path
    against: str
    programs: list[VerifiedProgram] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    problem: str | None = None
    is_meta: bool = False

    def passed(self, *, strict: bool = False) -> bool:
        """Some program was compared, and none differs; with `strict` nothing is unproven or left out either.

        A meta bundle, which has no programs, passes.
        """
        verdicts = {program.verdict for program in self.programs}
        allowed = {"ok"} if strict else {"ok", "unproven"}
        compared = bool(verdicts) or self.is_meta
        return self.problem is None and compared and verdicts <= allowed and not (strict and self.skipped)

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "path": str(self.path),
            "against": self.against,
            "ok": self.passed(),
            "problem": self.problem,
            "programs": [program.to_json() for program in self.programs],
            "skipped": [{"check": skipped.check, "reason": skipped.reason} for skipped in self.skipped],
        }

    def as_check(self) -> CheckReport:
        """The same as the report of a check, for JUnit: a part per program."""
        report = CheckReport(self.bundle, self.path, skipped=list(self.skipped))
        if self.problem is not None:
            report.add("bundle", [Finding("error", "bundle", self.problem)])
        for program in self.programs:
            check = f"{program.file} against {self.against}"
            if program.problem is not None:
                report.add(check, [Finding("error", check, program.problem, file=program.file)])
            else:
                report.add(check, parity_findings(check, program.file, program.parity))
        return report


def verify_bundle(
    directory: Path | str,
    *,
    against: str = "golden",
    goldens: Sequence[Golden] | None = None,
    sweep: Sweep | None = None,
    batches: Sequence[int] | None = None,
    tolerances: Tolerances = None,
    process: AuditProcess | None = None,
    limit: int | None = None,
) -> VerifyReport:
    """Run every program of the bundle in `directory` and compare its numbers.

    Args:
        against: what they are compared with, for the report.
        goldens: samples with answers; rows are packed as the server packs them. Default: those of the bundle.
        sweep: instead, makes goldens of exactly the shapes of each program.
        batches: only the programs for these batch sizes; default: all.
        tolerances: before those that the bundle states.
        process: where the programs run; default: a process of its own.
        limit: only so many of the goldens.

    Raises UsageError when `directory` is not one, or has no program for one of `batches`; what is wrong with the bundle
    is in the report.
    """
    path = Path(os.path.abspath(directory))
    if not path.is_dir():
        raise UsageError(f"{directory}: no such directory", hint="name the directory of a bundle")
    report = VerifyReport(path.name, path, against)
    try:
        bundle = open_bundle(path)
        programs = _chosen(bundle, batches)
        if bundle.manifest.is_meta:
            report.is_meta = True
        elif bundle.manifest.batching.dynamic:
            report.problem = f"bundle {bundle.name!r}: programs with a symbolic batch axis are not run yet"
        elif sweep is None:
            samples = (_goldens(bundle) if goldens is None else goldens)[:limit]
            _replay(report, bundle, programs, samples, tolerances, process)
        else:
            _sweep(report, bundle, programs, sweep, tolerances, process)
    except BundleError as error:
        report.problem = error.message
    return report


def _goldens(bundle: Bundle) -> list[Golden]:
    file = bundle.path / GOLDEN
    if not file.exists():
        raise BundleError(f"bundle {bundle.name!r} has no {GOLDEN}; rsrv export … --golden N writes one", rule="X-58")
    found = read_golden(file)
    if not found:
        raise BundleError(f"{file} holds no golden", rule="X-58", file=GOLDEN)
    return found


def _chosen(bundle: Bundle, batches: Sequence[int] | None) -> list[Program]:
    programs = programs_of(bundle)
    if bundle.manifest.is_meta:
        return programs
    there = sorted({batch_key for _, _, batch_key in programs})
    for batch in batches or ():
        if batch not in there:
            sizes = ", ".join(str(size) for size in there if size) or "none"
            raise UsageError(f"bundle {bundle.name!r} has no program for batch size {batch}; sizes: {sizes}")
    return [program for program in programs if batches is None or program[2] in batches]


def _replay(
    report: VerifyReport,
    bundle: Bundle,
    programs: Sequence[Program],
    goldens: Sequence[Golden],
    tolerances: Tolerances,
    process: AuditProcess | None,
) -> None:
    for index, golden in enumerate(goldens):
        if (problem := golden_problem(bundle.manifest, golden)) is not None:
            raise BundleError(f"sample {index} {problem}", rule="X-58")
    with audit_process(process) as runner, golden_file(goldens) as path:
        for program in programs:
            result = _run(bundle, program, path, tolerances, runner)
            if result.samples or result.problem:
                report.programs.append(result)
            else:
                report.skipped.append(Skipped(program[0], "no sample has the shapes of this program"))


def _sweep(
    report: VerifyReport,
    bundle: Bundle,
    programs: Sequence[Program],
    sweep: Sweep,
    tolerances: Tolerances,
    process: AuditProcess | None,
) -> None:
    with audit_process(process) as runner, ExitStack() as stack:
        shapes = _Shapes(bundle, stack)
        for program in programs:
            try:
                goldens = sweep(shapes.of(program))
            except RsrvError as error:
                result = VerifiedProgram(*program, problem=error.message)
            else:
                with golden_file(goldens) as path:
                    result = _run(bundle, program, path, tolerances, runner)
                if not result.samples and result.problem is None:
                    result = VerifiedProgram(*program, problem=f"{program[0]} does not take the samples made for it")
            report.programs.append(result)


def _run(
    bundle: Bundle, program: Program, goldens: Path, tolerances: Tolerances, process: AuditProcess
) -> VerifiedProgram:
    file, variant, batch_key = program
    try:
        read_verified_program(bundle, bundle.path / file, "programs")
        samples = process.replay(bundle, file, variant, batch_key, goldens, chosen_tolerances(bundle, tolerances))
    except BundleError as error:
        return VerifiedProgram(file, variant, batch_key, problem=error.message)
    return VerifiedProgram(file, variant, batch_key, samples)


class _Shapes:
    """The input shapes of programs: from the manifest, or from the program where only it knows its batch extent."""

    def __init__(self, bundle: Bundle, stack: ExitStack) -> None:
        self._bundle = bundle
        self._stack = stack
        self._pool: CompilePool | None = None

    def of(self, program: Program) -> list[SizedInput]:
        file, variant, batch_key = program
        specs = self._bundle.manifest.executable_inputs
        batch = batch_key
        if not batch and any(spec.batch_axis is not None for spec in specs):
            if self._pool is None:
                self._pool = self._stack.enter_context(CompilePool(parse_only=True, timeout_seconds=PARSE_SECONDS))
            data = read_verified_program(self._bundle, self._bundle.path / file, "programs")
            arguments = self._pool.inspect(data).signature.arguments
            return [(spec, argument.shape) for spec, argument in zip(specs, arguments, strict=False)]
        sizes = iter(variant)
        return [(spec, spec.concrete_shape(batch, [next(sizes) for _ in spec.variable_axes])) for spec in specs]
