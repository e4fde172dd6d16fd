"""The numbers of a bundle on the machine where this runs: every program against goldens, or a sweep of samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.audit.findings import CheckReport, Finding, Skipped
from rsrv.audit.golden import audit_process, chosen_tolerances, golden_file, parity_findings
from rsrv.audit.packing import golden_problem
from rsrv.audit.parity import ParityReport, Tolerances, compare, merge, unanswered
from rsrv.audit.process import AuditProcess
from rsrv.audit.programs import Program, program_label, runnable_programs
from rsrv.audit.shapes import ProgramShapes, SizedInput
from rsrv.bundle.digests import read_verified_program
from rsrv.bundle.directory import Bundle, open_bundle
from rsrv.bundle.files import GOLDEN
from rsrv.bundle.golden import Golden, read_golden
from rsrv.core.errors import BundleError, RsrvError, UsageError

Sweep = Callable[[Sequence[SizedInput]], Sequence[Golden]]
"""Makes goldens for exactly these shapes."""

Ask = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Has a server answer one request. Raises RsrvError for a refusal, BundleError when there is no server any more."""

SERVER = "server"
"""Stands for a program where samples of any size were sent to a server, which chooses programs itself."""


@dataclass(frozen=True)
class VerifiedProgram:
    """One program: `samples` has the comparison of every golden that it answered, by the golden's number."""

    file: str
    variant: tuple[int, ...]
    batch_key: int
    samples: Mapping[int, ParityReport] = field(default_factory=dict)
    problem: str | None = None

    @property
    def program(self) -> Program:
        return self.file, self.variant, self.batch_key

    @property
    def label(self) -> str:
        """Its file, and the batch size when that does not say it."""
        return program_label(self.program)

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
    """What one bundle was compared with, `against`, and what came of it.

    Attributes:
        problem: why nothing was compared at all.
        hooks: the bundle's hooks were part of what was compared.
        served: a server of the bundle answered.
        sample_names: what the samples are called, when they have names.
    """

    bundle: str
    path: Path
    against: str
    programs: list[VerifiedProgram] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    problem: str | None = None
    is_meta: bool = False
    hooks: bool = False
    served: bool = False
    sample_names: Sequence[str] = ()

    @property
    def counts(self) -> tuple[int, int]:
        """How many comparisons of a sample with a program passed, and how many there were."""
        samples = [parity for program in self.programs for parity in program.samples.values()]
        return sum(parity.ok for parity in samples), len(samples)

    def sample_name(self, index: int) -> str:
        return self.sample_names[index] if index < len(self.sample_names) else str(index)

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
            "hooks": self.hooks,
            "served": self.served,
            "passed": self.counts[0],
            "compared": self.counts[1],
            "sample_names": list(self.sample_names),
            "programs": [program.to_json() for program in self.programs],
            "skipped": [{"check": skipped.check, "reason": skipped.reason} for skipped in self.skipped],
        }

    def as_check(self) -> CheckReport:
        """The same as the report of a check, for JUnit: a part per program."""
        report = CheckReport(self.bundle, self.path, skipped=list(self.skipped))
        if self.problem is not None:
            report.add("bundle", [Finding("error", "bundle", self.problem)])
        for program in self.programs:
            check = f"{program.label} against {self.against}"
            if program.problem is not None:
                report.add(check, [Finding("error", check, program.problem, file=program.file)])
            else:
                report.add(check, parity_findings(check, program.program, program.parity))
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
    hooks: bool = False,
    ask: Ask | None = None,
    sample_names: Sequence[str] = (),
) -> VerifyReport:
    """Run every program of the bundle in `directory` and compare its numbers.

    Args:
        against: what they are compared with, for the report.
        goldens: samples with answers; rows are packed as the server packs them. Default: those of the bundle.
        sweep: instead, makes goldens of exactly the shapes of each program.
        batches: only the programs for these batch sizes; default: all. A program with a symbolic batch axis is run at
            any of them.
        tolerances: before those that the bundle states.
        process: where the programs run; default: a process of its own.
        limit: only so many of the goldens.
        hooks: the way of a request, ``preprocess`` → program → ``postprocess``: goldens and sweep are of client inputs
            and outputs, where the bundle has hooks (X-52).
        ask: a server of the bundle to send the goldens to, one request for each, instead of running programs here
            (X-54). It runs the hooks.
        sample_names: what `goldens` are called.

    Raises UsageError when `directory` is not one, or has no program for one of `batches`; what is wrong with the bundle
    is in the report.
    """
    path = Path(os.path.abspath(directory))
    if not path.is_dir():
        raise UsageError(f"{directory}: no such directory", hint="name the directory of a bundle")
    report = VerifyReport(path.name, path, against, served=ask is not None, sample_names=sample_names)
    try:
        bundle = open_bundle(path)
        report.hooks = bundle.hooks_path is not None and (hooks or ask is not None)
        programs = _chosen(bundle, batches)
        if bundle.manifest.is_meta:
            report.is_meta = True
        elif sweep is not None:
            _sweep(report, bundle, programs, sweep, tolerances, process, ask)
        elif ask is not None:
            _send(report, bundle, _samples(report, bundle, goldens)[:limit], tolerances, ask)
        else:
            _replay(report, bundle, programs, _samples(report, bundle, goldens)[:limit], tolerances, process)
    except BundleError as error:
        report.problem = error.message
    return report


def _samples(report: VerifyReport, bundle: Bundle, goldens: Sequence[Golden] | None) -> Sequence[Golden]:
    if goldens is not None:
        return goldens
    if report.hooks:
        raise BundleError(
            f"bundle {bundle.name!r}: its goldens are of the program alone, and hooks come with it here: "
            "the original model is needed",
            rule="X-58",
        )
    return _goldens(bundle)


def _goldens(bundle: Bundle) -> list[Golden]:
    file = bundle.path / GOLDEN
    if not file.exists():
        raise BundleError(f"bundle {bundle.name!r} has no {GOLDEN}; rsrv export … --golden N writes one", rule="X-58")
    found = read_golden(file)
    if not found:
        raise BundleError(f"{file} holds no golden", rule="X-58", file=GOLDEN)
    return found


def _chosen(bundle: Bundle, batches: Sequence[int] | None) -> list[Program]:
    there = sorted({batch_key for _, _, batch_key in runnable_programs(bundle)})
    if not bundle.manifest.is_meta and not bundle.manifest.batching.dynamic:
        for batch in batches or ():
            if batch not in there:
                sizes = ", ".join(str(size) for size in there if size) or "none"
                raise UsageError(f"bundle {bundle.name!r} has no program for batch size {batch}; sizes: {sizes}")
    return runnable_programs(bundle, batches)


def _replay(
    report: VerifyReport,
    bundle: Bundle,
    programs: Sequence[Program],
    goldens: Sequence[Golden],
    tolerances: Tolerances,
    process: AuditProcess | None,
) -> None:
    if not report.hooks:
        for index, golden in enumerate(goldens):
            if (problem := golden_problem(bundle.manifest, golden)) is not None:
                raise BundleError(f"sample {report.sample_name(index)} {problem}", rule="X-58")
    with audit_process(process) as runner, golden_file(goldens) as path:
        for program in programs:
            result = _run(bundle, program, path, tolerances, runner, hooks=report.hooks)
            if result.samples or result.problem:
                report.programs.append(result)
            else:
                report.skipped.append(Skipped(program_label(program), "no sample has the shapes of this program"))


def _send(report: VerifyReport, bundle: Bundle, goldens: Sequence[Golden], tolerances: Tolerances, ask: Ask) -> None:
    """Samples as they are, a request for each; together by their number of rows, which is what the server goes by."""
    by_rows: dict[int, dict[int, Golden]] = {}
    for index, golden in enumerate(goldens):
        rows = next(
            (
                golden.inputs[spec.name].shape[spec.batch_axis]
                for spec in bundle.manifest.wire_inputs
                if spec.batch_axis is not None and spec.name in golden.inputs
            ),
            0,
        )
        by_rows.setdefault(rows, {})[index] = golden
    for rows, samples in sorted(by_rows.items()):
        report.programs.append(_asked(bundle, (SERVER, (), rows), samples, tolerances, ask))


def _sweep(
    report: VerifyReport,
    bundle: Bundle,
    programs: Sequence[Program],
    sweep: Sweep,
    tolerances: Tolerances,
    process: AuditProcess | None,
    ask: Ask | None,
) -> None:
    with audit_process(process) as runner, ProgramShapes(bundle) as shapes:
        for program in programs:
            try:
                goldens = sweep(shapes.of_clients(program) if report.hooks else shapes.of(program))
            except RsrvError as error:
                result = VerifiedProgram(*program, problem=error.message)
            else:
                if ask is not None:
                    result = _asked(bundle, program, dict(enumerate(goldens)), tolerances, ask)
                else:
                    with golden_file(goldens) as path:
                        result = _run(bundle, program, path, tolerances, runner, hooks=report.hooks)
                if not result.samples and result.problem is None:
                    result = VerifiedProgram(*program, problem=f"{program[0]} does not take the samples made for it")
            report.programs.append(result)


def _run(
    bundle: Bundle,
    program: Program,
    goldens: Path,
    tolerances: Tolerances,
    process: AuditProcess,
    *,
    hooks: bool,
) -> VerifiedProgram:
    file, variant, batch_key = program
    chosen = chosen_tolerances(bundle, tolerances)
    try:
        read_verified_program(bundle, bundle.path / file, "programs")
        samples = process.replay(bundle, file, variant, batch_key, goldens, chosen, hooks=hooks)
    except BundleError as error:
        return VerifiedProgram(file, variant, batch_key, problem=error.message)
    return VerifiedProgram(file, variant, batch_key, samples)


def _asked(
    bundle: Bundle, program: Program, goldens: Mapping[int, Golden], tolerances: Tolerances, ask: Ask
) -> VerifiedProgram:
    chosen = chosen_tolerances(bundle, tolerances)
    samples: dict[int, ParityReport] = {}
    for index, golden in goldens.items():
        try:
            samples[index] = compare(golden.outputs, ask(golden.inputs), chosen)
        except BundleError as error:
            return VerifiedProgram(*program, samples, problem=error.message)
        except RsrvError as error:
            samples[index] = unanswered(golden.outputs, f"the server refused it: {error.message}")
    return VerifiedProgram(*program, samples)
