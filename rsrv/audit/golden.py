"""Goldens under audit: every program has to answer them as the framework did. They run in a process that may die."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rsrv.audit.findings import Finding
from rsrv.audit.packing import golden_problem
from rsrv.audit.parity import ParityReport, Tolerances, merge, tolerance_of
from rsrv.audit.process import AuditProcess
from rsrv.audit.programs import Program, program_label
from rsrv.bundle.directory import Bundle
from rsrv.bundle.files import GOLDEN
from rsrv.bundle.golden import Golden, read_golden, write_golden
from rsrv.core.dtypes import DType
from rsrv.core.errors import BundleError, ParityMismatch, ProgramError

log = logging.getLogger(__name__)


@contextmanager
def audit_process(process: AuditProcess | None = None) -> Iterator[AuditProcess]:
    """`process`, which stays open, or one of our own for the time of the block."""
    if process is not None:
        yield process
        return
    with AuditProcess() as own:
        yield own


def stated_tolerances(bundle: Bundle) -> dict[str, float] | None:
    """The tolerances that the exporter was content with, from ``provenance.parity``; None when it does not say."""
    parity = bundle.manifest.provenance.get("parity")
    stated = parity.get("tolerances") if isinstance(parity, Mapping) else None
    if not isinstance(stated, Mapping):
        return None
    return {
        str(name): float(value)
        for name, value in stated.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    }


def stated_ranges(bundle: Bundle) -> dict[str, tuple[float, float]]:
    """Lowest and highest values of integer inputs in the exporter's samples, from ``provenance.parity``."""
    parity = bundle.manifest.provenance.get("parity")
    stated = parity.get("ranges") if isinstance(parity, Mapping) else None
    known = {spec.name for spec in bundle.manifest.executable_inputs}
    found: dict[str, tuple[float, float]] = {}
    for name, bounds in stated.items() if isinstance(stated, Mapping) else ():
        if name in known and isinstance(bounds, list) and [type(bound) for bound in bounds] == [int, int]:
            found[name] = (bounds[0], bounds[1])
    return found


def chosen_tolerances(bundle: Bundle, tolerances: Tolerances) -> Tolerances:
    """`tolerances` of the caller before those that the bundle states before the general ones."""
    if isinstance(tolerances, int | float):
        return tolerances
    stated, given = stated_tolerances(bundle) or {}, tolerances or {}
    for spec in bundle.manifest.executable_outputs:
        if spec.dtype.value in given:  # said of the dtype now beats said of the output then
            stated.pop(spec.name, None)
    return {**stated, **given} or None


def golden_file_findings(bundle: Bundle) -> tuple[list[Golden], list[Finding]]:
    """The goldens of the bundle that some program can be given, and what is wrong with the others, or with the file."""
    try:
        goldens = read_golden(bundle.path / GOLDEN)
    except BundleError as error:
        return [], [Finding("error", "goldens", error.message, rule=error.rule, file=GOLDEN, hint=error.hint)]
    if not goldens:
        return [], [Finding("warning", "goldens", f"{GOLDEN} holds no golden", rule="X-58", file=GOLDEN)]
    problems = [golden_problem(bundle.manifest, golden) for golden in goldens]
    return (
        [golden for golden, problem in zip(goldens, problems, strict=True) if problem is None],
        [
            Finding("error", "goldens", f"golden {index} {problem}", rule="X-58", file=GOLDEN)
            for index, problem in enumerate(problems)
            if problem is not None
        ],
    )


def replay_findings(
    bundle: Bundle, program: Program, process: AuditProcess, tolerances: Tolerances = None
) -> list[Finding] | None:
    """What comes out when one program answers the goldens of its bundle; None when it takes none of them."""
    file, variant, batch_key = program
    check = f"{program_label(program)} goldens"
    try:
        reports = process.replay(
            bundle, file, variant, batch_key, bundle.path / GOLDEN, chosen_tolerances(bundle, tolerances)
        )
    except ProgramError as error:
        return [Finding("error", check, error.message, rule=error.rule or "X-58", file=file, hint=error.hint)]
    return parity_findings(check, program, merge(reports.values())) if reports else None


def parity_findings(check: str, program: Program, report: ParityReport) -> list[Finding]:
    """An error per output that differs, a warning per output whose agreement proves little."""
    return [
        Finding(
            "error" if row.verdict == "mismatch" else "warning",
            check,
            f"{program_label(program)}: output {row.name!r}: {row.note}"
            + (", so agreement proves little" if row.verdict == "unproven" else ""),
            rule="X-58",
            file=program[0],
        )
        for row in report.rows
        if row.note is not None
    ]


def require_parity(
    bundle: Bundle,
    programs: Sequence[Program],
    goldens: Sequence[Golden],
    process: AuditProcess,
    tolerances: Tolerances = None,
) -> ParityReport:
    """Replay `goldens`, which need not be in the bundle, on `programs`; the numbers of all of them together.

    Raises ParityMismatch when a program differs or takes none of the goldens, ProgramError when one cannot run.
    """
    for index, golden in enumerate(goldens):
        if (problem := golden_problem(bundle.manifest, golden)) is not None:
            raise ParityMismatch(f"golden {index} {problem}", rule="X-58", file=GOLDEN)
    with golden_file(goldens) as path:
        reports = []
        for file, variant, batch_key in programs:
            label = program_label((file, variant, batch_key))
            found = process.replay(bundle, file, variant, batch_key, path, chosen_tolerances(bundle, tolerances))
            if not found:
                raise ParityMismatch(f"{label}: no golden has its shapes, so it is unproven", rule="X-58", file=file)
            report = merge(found.values())
            if not report.ok:
                raise ParityMismatch(
                    f"{label} does not compute what the framework computed: {report}",
                    rule="X-58",
                    file=file,
                    hint="a tolerance can be given where the model itself loses precision; a wrong lowering is a fault",
                )
            reports.append(report)
    whole = merge(reports)
    for row in whole.rows:
        if row.verdict == "unproven":
            log.warning("parity is unproven bundle=%s output=%s: %s", bundle.name, row.name, row.note)
    return whole


@contextmanager
def golden_file(goldens: Sequence[Golden]) -> Iterator[Path]:
    """`goldens` in a file that another process can read, for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="rsrv-golden-") as directory:
        path = Path(directory) / GOLDEN
        write_golden(path, [golden.inputs for golden in goldens], [golden.outputs for golden in goldens])
        yield path


def parity_provenance(goldens: Sequence[Golden], seed: int, tolerances: Tolerances = None) -> dict[str, object]:
    """What an export states about its proof, as ``provenance.parity``: how many samples, their seed, the tolerances.

    The tolerances are those of the output dtypes at hand, and of the outputs that have one of their own; `check` and
    `verify` go by them. ``ranges`` has the lowest and the highest value of every integer input.
    """
    stated: dict[str, float] = {}
    for golden in goldens:
        for name, array in golden.outputs.items():
            limit = tolerance_of(name, array.dtype, tolerances)
            own = isinstance(tolerances, Mapping) and name in tolerances
            if limit or own:
                stated[name if own else DType.from_numpy(array.dtype).value] = limit
    facts: dict[str, object] = {"samples": len(goldens), "seed": seed, "tolerances": dict(sorted(stated.items()))}
    ranges: dict[str, list[int]] = {}
    for golden in goldens:
        for name, array in golden.inputs.items():
            if array.dtype.kind in "iu" and array.size:
                low, high = int(array.min()), int(array.max())
                known = ranges.setdefault(name, [low, high])
                known[:] = [min(low, known[0]), max(high, known[1])]
    if ranges:
        facts["ranges"] = ranges
    return facts
