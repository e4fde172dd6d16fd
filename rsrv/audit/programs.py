"""Reading the programs of a bundle for an audit: always in a process that may die, never in this one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rsrv.audit.custom_calls import custom_call_findings
from rsrv.audit.findings import Finding
from rsrv.audit.signature import check_signature
from rsrv.bundle.directory import Bundle
from rsrv.bundle.manifest import Manifest
from rsrv.bundle.safetensors import WeightsHeader
from rsrv.bundle.variants import VariantKey
from rsrv.core.errors import ProgramError
from rsrv.runtime.compile_pool import CompilePool
from rsrv.stablehlo.signature import ProgramReport

PARSE_SECONDS = 120.0
"""Wall time that parsing one program may take; the largest programs we know take a few seconds."""


Program = tuple[str, VariantKey, int]
"""File, variant and batch key of a program; key 0 has no batch size in its name."""


def programs_of(bundle: Bundle) -> list[Program]:
    """Every program once; one that is specialised at load has key 0, as it is written."""
    jobs = {}
    for variant, programs in bundle.programs.items():
        for batch_key, path in programs.items():
            jobs[path.name] = (path.name, variant, 0 if bundle.manifest.batching.dynamic else batch_key)
    return list(jobs.values())


def runnable_programs(bundle: Bundle, batches: Sequence[int] | None = None) -> list[Program]:
    """Every program as it is run: one that is specialised at load once for each size that the bundle lists.

    `batches` replaces these sizes; of programs that have theirs it chooses.
    """
    if not bundle.manifest.batching.dynamic:
        return [program for program in programs_of(bundle) if batches is None or program[2] in batches]
    sizes = bundle.manifest.batching.compiled_batch_sizes if batches is None else batches
    return [(file, variant, size) for file, variant, _ in programs_of(bundle) for size in sizes]


def program_label(program: Program) -> str:
    """What a program is called in a report: its file, and the batch size when that does not say it."""
    file, _, batch_key = program
    return file if not batch_key or f".b{batch_key}." in file else f"{file} at batch size {batch_key}"


def bindings_missing() -> str | None:
    """Why programs cannot be read on this machine, or None when they can."""
    if importlib.util.find_spec("jaxlib") is None:
        return "reading programs needs jaxlib, which is not installed (pip install 'rsrv[serve]')"
    return None


@contextmanager
def parse_pool(pool: CompilePool | None = None) -> Iterator[CompilePool]:
    """`pool`, which stays open, or one of our own for the time of the block."""
    if pool is not None:
        yield pool
        return
    with CompilePool(parse_only=True, timeout_seconds=PARSE_SECONDS) as own:
        yield own


def program_findings(
    file: str,
    data: bytes,
    pool: CompilePool,
    *,
    manifest: Manifest | None,
    variant: tuple[int, ...],
    batch_key: int,
    weights: WeightsHeader | None,
) -> list[Finding]:
    """What is wrong with one program; without a manifest only what can be said of the program alone.

    One with a symbolic batch axis is also specialised to every size that the manifest lists, up to the first that does
    not work; custom calls are those of what comes out, since assertions about sizes end there.
    """
    try:
        report = pool.inspect(data)
        problems = [] if manifest is None else check_signature(manifest, variant, batch_key, report, weights)
        if manifest is not None and manifest.batching.dynamic and not problems:
            for size in manifest.batching.compiled_batch_sizes:
                report = pool.inspect(data, batch=size)
                if found := check_signature(manifest, variant, size, report, weights):
                    problems = [f"at batch size {size} {problem}" for problem in found]
                    break
    except ProgramError as error:
        return [Finding("error", file, f"{file}: {error.message}", rule=error.rule, file=file, hint=error.hint)]
    return [
        *custom_call_findings(file, report.custom_calls),
        *_donations(file, report),
        *(Finding("error", file, f"{file} {problem}", rule="B-11", file=file) for problem in problems),
    ]


def _donations(file: str, report: ProgramReport) -> Iterator[Finding]:
    if report.donated:
        listed = ", ".join(map(str, report.donated))
        yield Finding(
            "warning",
            file,
            f"{file} asks to overwrite its arguments {listed}; servers ignore that, since weights would die with it",
            rule="B-8",
            file=file,
            hint="export again without donate_argnums",
        )
