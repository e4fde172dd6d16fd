"""From the program files of a directory to executables: read, compared with what the model needs, compiled."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rsrv.core.errors import BundleError, RsrvError
from rsrv.serve.loading.programs import Found, Loaded, ProgramJob
from rsrv.serve.programs.contract import Key, describe, grid_problems, refusal, signature_problems
from rsrv.serve.programs.modules import read_modules
from rsrv.serve.programs.retained import Programs, keyed

if TYPE_CHECKING:
    from rsrv.bundle.digests import DigestsMode
    from rsrv.runtime.device import Executable
    from rsrv.serve.loading.programs import ProgramSource
    from rsrv.serve.scheduler import ServableModel
    from rsrv.stablehlo.policy import Policy

log = logging.getLogger(__name__)

_STOPPING = "the server is stopping"


class Checked(NamedTuple):
    """Programs that fit the model, and are not compiled."""

    jobs: list[ProgramJob]
    found: list[Found]

    @property
    def digests(self) -> dict[Key, str]:
        return {_key(job): job.identity[0].hex() for job in self.jobs}


class Compiled(NamedTuple):
    """What became of them; with a problem, not all of `executables` are there."""

    executables: Mapping[Key, Executable]
    numerics: tuple[str, ...]
    diagnostics: str
    problems: tuple[str, ...]

    def onto(self, beneath: Programs) -> dict[tuple[int, ...], dict[int, Executable]]:
        """These programs, and those of `beneath` in the places that they leave."""
        programs = {variant: dict(by_key) for variant, by_key in beneath.items()}
        for (variant, batch_key), executable in self.executables.items():
            programs[variant][batch_key] = executable
        return programs


def check_programs(
    directory: Path,
    model: ServableModel,
    source: ProgramSource,
    policy: Policy,
    *,
    sources: Sequence[str] = (),
    digests: DigestsMode = "programs",
) -> Checked:
    """Read and parse the programs of `directory`; `sources` are the files to take, empty = all.

    Raises InvalidRequest for a directory that cannot be used, and with all problems for programs that do not fit.
    """
    modules = read_modules(directory, model, sources, digests=digests)
    wanted = keyed(model.programs)
    problems = grid_problems(wanted, (module.key for module in modules), partial=bool(sources))
    inputs = [spec.name for spec in model.input_specs]
    outputs = [spec.name for spec in model.output_specs]
    jobs, found = [], []
    for module in modules:
        if module.key not in wanted:
            continue
        job = ProgramJob.of(model.name, *module.key, module.program, replace(policy, batch=module.batch))
        try:
            one = source.find(job)
        except BundleError as error:
            problems.append(f"{module.file}: {error.message}")
            continue
        signature = wanted[module.key].signature
        problems += signature_problems(module.key, signature, one.report.signature, inputs, outputs)
        jobs.append(job)
        found.append(one)
    if problems:
        raise refusal(model.name, directory, problems)
    return Checked(jobs, found)


def compile_programs(checked: Checked, source: ProgramSource, threads: Executor) -> Compiled:
    """Wait for the executables. After the first failure nothing new is begun."""
    jobs = checked.jobs
    loaded: dict[Key, Loaded] = {}
    lines: list[str] = []
    problems: list[str] = []
    futures: list[Future[Loaded]] = []
    try:
        futures += [threads.submit(source.load, job, one) for job, one in zip(jobs, checked.found, strict=True)]
    except RuntimeError:  # they are shut down
        problems.append(_STOPPING)
    for job, future in zip(jobs, futures, strict=False):
        try:
            one = loaded[_key(job)] = future.result()
        except CancelledError:
            continue
        except Exception as error:
            problems.append(f"{describe(_key(job))}: {_text(error, job)}")
            for other in futures:
                other.cancel()
            continue
        took = f" in {one.compiled.compile_seconds:.2f} s" if one.origin == "compiled" else ""
        lines += [f"{describe(_key(job))}: {text}" for text in (f"{one.origin}{took}", *one.compiled.warnings)]
    if not problems and len(loaded) < len(jobs):
        problems.append(_STOPPING)
    return Compiled(
        {key: one.executable for key, one in loaded.items()},
        tuple(dict.fromkeys(one.compiled.summary for one in loaded.values() if one.compiled.summary)),
        "\n".join([*problems, *lines]),
        tuple(problems),
    )


def _text(error: Exception, job: ProgramJob) -> str:
    if isinstance(error, RsrvError):
        return error.message
    log.error("program could not be loaded name=%s batch_key=%d", job.model, job.batch_key, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _key(job: ProgramJob) -> Key:
    return job.variant, job.batch_key
