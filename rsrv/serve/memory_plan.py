"""What a repository needs on a device: weights, scratch and programs of each model, and what of it can be pinned.

Programs are compiled as a server would, in processes that may die of it, and found in its cache when they are there.
Nothing is loaded or run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from rsrv.audit.signature import require_signature
from rsrv.bundle.directory import FoundBundle, discover, open_bundle
from rsrv.bundle.safetensors import read_header
from rsrv.core.errors import RsrvError
from rsrv.runtime import CompilePool, open_cache, open_device
from rsrv.runtime.fingerprint import fingerprint
from rsrv.runtime.options import compile_options
from rsrv.runtime.probe import require_usable_flags, require_usable_options
from rsrv.serve.budget import GRANULE_BYTES, Budget, Placement, place, resolve_budget
from rsrv.serve.compiling import expected_platform
from rsrv.serve.loading.batching import program_jobs, require_choosable
from rsrv.serve.loading.digests import read_programs
from rsrv.serve.numerics import numerics_for, prepare_environment
from rsrv.stablehlo.signature import nbytes_of

if TYPE_CHECKING:
    from rsrv.bundle.safetensors import WeightsHeader
    from rsrv.core.config import ServerConfig
    from rsrv.runtime.cache import ExecutableCache
    from rsrv.runtime.compiled import Compiled
    from rsrv.runtime.device import CompileOptions
    from rsrv.serve.loading.programs import Identity, ProgramJob
    from rsrv.stablehlo.policy import Policy

Target = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """One program: `scratch_bytes` are its temporaries and outputs less what they share, as the compiler says;
    `input_bytes` its arguments without the weights; `code_bytes` the executable, None when it has no serialised form.
    """

    batch_key: int
    scratch_bytes: int
    input_bytes: int
    code_bytes: int | None
    cached: bool
    identity: bytes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """One model; `problem` says why it cannot be served ("" when it can), the sizes are then 0."""

    name: str
    weights_bytes: int = 0
    programs: tuple[ProgramSize, ...] = ()
    problem: str = ""

    @property
    def scratch_bytes(self) -> int:
        """What the largest of its programs needs beside the weights: one runs at a time."""
        return max((program.scratch_bytes + program.input_bytes for program in self.programs), default=0)

    @property
    def code_bytes(self) -> int:
        return sum(program.code_bytes or 0 for program in self.programs)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits.

    Attributes:
        budget: with those models pinned that `placements` pins.
        measured_on: the platform that the programs were compiled for.
        target: the platform that was asked about.
        code_bytes: all executables; one that models share counts once. They live beside the arena.
    """

    budget: Budget
    measured_on: str
    target: Target
    models: tuple[ModelSize, ...]
    placements: dict[str, Placement] = field(default_factory=dict)
    code_bytes: int = 0

    @property
    def indicative(self) -> bool:
        """Scratch and programs were compiled for another platform than the one that was asked about."""
        return self.measured_on != self.target

    @property
    def weights_bytes(self) -> int:
        return sum(model.weights_bytes for model in self.models)


def plan_memory(
    config: ServerConfig,
    device_memory: int,
    *,
    target: Target = "cuda",
    fraction: float | None = None,
    wiggle: float | None = None,
    on_program: Callable[[str], None] = lambda text: None,
) -> MemoryPlan:
    """What the bundles of `config` need on a device with that many bytes, of which a card's allocator gets
    ``runtime.mem_fraction``.

    `fraction` and `wiggle` as in `resolve_budget`, by default those of the configuration (a fraction of 0, which means
    that nothing comes and goes, counts as 1); a CPU has no slack. `on_program` is told of each compilation.
    Raises ConfigError, DeviceError, or BundleError for a directory that is not there; what is wrong with one bundle is
    in its `ModelSize.problem`.
    """
    measured_on, models = measure(config, granule=GRANULE_BYTES if target == "cuda" else 1, on_program=on_program)
    if fraction is None:
        fraction = config.runtime.weight_cache_fraction or 1.0
    if wiggle is None:
        wiggle = config.runtime.weight_cache_wiggle_fraction
    arena = int(config.runtime.mem_fraction * device_memory) if target == "cuda" else device_memory
    return plan_from(
        models,
        arena,
        measured_on=measured_on,
        target=target,
        fraction=fraction,
        wiggle=wiggle if target == "cuda" else 0,
    )


def plan_from(
    models: Sequence[ModelSize], arena: int, *, measured_on: str, target: Target, fraction: float, wiggle: float
) -> MemoryPlan:
    """The plan for models whose sizes are known."""
    usable = [model for model in models if not model.problem]
    scratch = max((model.scratch_bytes for model in usable), default=0)
    pool = resolve_budget(arena, max_scratch=scratch, fraction=fraction, wiggle=wiggle).weight_pool
    placements = place({model.name: model.weights_bytes for model in usable}, pool)
    pinned = sum(model.weights_bytes for model in usable if placements[model.name] == "pinned")
    programs = {program.identity: program.code_bytes or 0 for model in usable for program in model.programs}
    return MemoryPlan(
        budget=resolve_budget(arena, pinned=pinned, max_scratch=scratch, fraction=fraction, wiggle=wiggle),
        measured_on=measured_on,
        target=target,
        models=tuple(models),
        placements=placements,
        code_bytes=sum(programs.values()),
    )


def measure(
    config: ServerConfig, *, granule: int = 1, on_program: Callable[[str], None] = lambda text: None
) -> tuple[str, list[ModelSize]]:
    """The platform of this machine, and the size of every model with its weights rounded up to `granule`, by name."""
    runtime = config.runtime
    prepare_environment(runtime.numerics)
    found = [bundle for bundle in discover(config.model_dirs, config.models_include) if bundle.duplicate_of is None]
    with ExitStack() as stack:
        pool = stack.enter_context(_pool(config, expected_platform(runtime.backend)))
        require_usable_flags(pool)
        # As little of a card as possible: a server may be using it.
        device = open_device(
            runtime.backend,
            ordinal=runtime.device_ordinal,
            mem_fraction=0.05,
            preallocate=False,
            allow_cpu_fallback=runtime.allow_cpu_fallback,
            cpu_threads=runtime.cpu_threads,
        )
        stack.callback(device.close)
        if device.platform != expected_platform(runtime.backend):
            pool = stack.enter_context(_pool(config, device.platform))
        cache = None
        if config.cache_dir:
            cache = open_cache(config.cache_dir, fingerprint(device), config.cache_max_bytes)
        if cache is not None:
            stack.callback(cache.close)
        options = compile_options(
            runtime.xla_options,
            platform=device.platform,
            autotune=runtime.autotune,
            autotune_cache=runtime.autotune_cache,
            autotune_cache_dir=runtime.autotune_cache_dir,
        )
        require_usable_options(pool, options, cache)
        source = _Compiler(pool, cache, options, on_program)
        policy = numerics_for(runtime.numerics, device).policy
        with ThreadPoolExecutor(runtime.compile_workers) as workers:
            sizes = list(workers.map(lambda one: _measure(one, config, policy, source, granule), found))
    return device.platform, sorted(sizes, key=lambda size: size.name)


def _pool(config: ServerConfig, platform: str) -> CompilePool:
    runtime = config.runtime
    return CompilePool(
        workers=runtime.compile_workers,
        timeout_seconds=runtime.compile_timeout_seconds,
        memory_bytes=runtime.compile_memory_bytes,
        platform=platform,
        cpu_threads=runtime.cpu_threads,
        ordinal=runtime.device_ordinal,
        awake=not config.cache_dir,
    )


class _Seen(NamedTuple):
    """What is kept of an executable: not the code."""

    compiled: Compiled
    code_bytes: int | None
    cached: bool


class _Compiler:
    """Compiles what the cache does not have, and leaves it there for the server."""

    def __init__(
        self,
        pool: CompilePool,
        cache: ExecutableCache | None,
        options: CompileOptions,
        on_program: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._options = options
        self._on_program = on_program
        self._seen: dict[Identity, _Seen] = {}

    def see(self, job: ProgramJob) -> _Seen:
        """What `job` compiles to. Raises ProgramError."""
        if job.identity not in self._seen:
            compiled, cached = self._compiled(job)
            n_bytes = None if compiled.blob is None else len(compiled.blob)
            self._seen[job.identity] = _Seen(replace(compiled, blob=None), n_bytes, cached)
        return self._seen[job.identity]

    def _compiled(self, job: ProgramJob) -> tuple[Compiled, bool]:
        key = ""
        if self._cache is not None:
            key = self._cache.key(job.identity[0].hex(), job.policy, self._options)
            found = self._cache.load(key)
            if found is not None:
                return found, True
        self._on_program(str(job))
        compiled = self._pool.compile(job.program, self._options, job.policy)
        if self._cache is not None:
            self._cache.store(key, compiled, label=str(job))
        return compiled, False


def _measure(found: FoundBundle, config: ServerConfig, policy: Policy, source: _Compiler, granule: int) -> ModelSize:
    try:
        bundle = open_bundle(found.path, unhooked=found.name in config.allow_unhooked)
        manifest = bundle.manifest
        if manifest.is_meta:
            return ModelSize(found.name)
        settings = config.scheduler.models.get(found.name)
        chosen = settings.batch_sizes if settings is not None else None
        require_choosable(manifest, chosen)
        programs = read_programs(bundle, config.bundles.digests)
        assert bundle.weights_path is not None  # what is no meta has the file
        header = read_header(bundle.weights_path, column_major=manifest.column_major)
        sizes = []
        for job in program_jobs(manifest, programs, policy, chosen):
            seen = source.see(job)
            report = seen.compiled.report
            require_signature(manifest, job.variant, job.batch_key, report, header)
            inputs = report.signature.arguments[: len(manifest.executable_inputs)]
            sizes.append(
                ProgramSize(
                    batch_key=job.batch_key,
                    scratch_bytes=seen.compiled.scratch_bytes,
                    input_bytes=sum(map(nbytes_of, inputs)),
                    code_bytes=seen.code_bytes,
                    cached=seen.cached,
                    identity=hashlib.sha256(repr(job.identity).encode()).digest(),
                )
            )
        return ModelSize(found.name, _weights(header, granule), tuple(sizes))
    except RsrvError as error:
        return ModelSize(found.name, problem=error.message)


def _weights(header: WeightsHeader, granule: int) -> int:
    return sum(-(-entry.nbytes // granule) * granule for entry in header.tensors.values())
