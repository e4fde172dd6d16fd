"""From a bundle's directory to a model that serves. Each model fails alone, and its failure names the phase."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rsrv.audit.signature import require_signature
from rsrv.bundle.directory import Bundle, FoundBundle, discover, open_bundle
from rsrv.core.errors import BundleError, HookError
from rsrv.serve.loading.batching import program_jobs, require_choosable
from rsrv.serve.loading.checks import prepare_checks
from rsrv.serve.loading.digests import read_programs
from rsrv.serve.loading.hookfile import HookLoader, check_hooks
from rsrv.serve.loading.programs import Found, Loaded, ProgramJob, ProgramSource
from rsrv.serve.loading.steps import Steps
from rsrv.serve.residency.setup import floor_of, scratch_of
from rsrv.serve.residency.tensors import WeightsFile, open_weights
from rsrv.serve.scheduler.model import ServableModel
from rsrv.stablehlo.policy import Policy

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.core.config import ServerConfig
    from rsrv.runtime.device import Executable
    from rsrv.serve.loading.progress import LoadProgress
    from rsrv.serve.registry import Registry
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A bundle that has been read as far as its programs; `jobs` are what has to become executables."""

    found: FoundBundle
    bundle: Bundle
    weights: WeightsFile
    jobs: list[ProgramJob]
    began: float


class Loader:
    """Prepares the bundles of a server. `stopping` ends it between two steps of a model.

    Args:
        source: where executables come from.
        progress: counts programs.
        policy: what is done to every program before it is compiled.
        hook_processes: how many processes run the hooks of a model that has ``hooks.mode: process`` and says no number.
        on_phase: told what the server does now.
        on_ready: told of every model that has become ready, on the thread that prepared it.
    """

    def __init__(
        self,
        *,
        config: ServerConfig,
        registry: Registry,
        scheduler: Scheduler,
        residency: Residency,
        source: ProgramSource,
        progress: LoadProgress,
        stopping: threading.Event,
        policy: Policy = Policy(),  # noqa: B008
        hook_processes: int = 1,
        on_phase: Callable[[str], None],
        on_ready: Callable[[ServableModel], None] = lambda model: None,
    ) -> None:
        self._config = config
        self._registry = registry
        self._scheduler = scheduler
        self._residency = residency
        self._source = source
        self._progress = progress
        self._stopping = stopping
        self._policy = policy
        self._on_phase = on_phase
        self._on_ready = on_ready
        self.hooks = HookLoader(config.hooks, processes=hook_processes, on_failed=self._fail_hooks)
        # Weights reach the device one model at a time.
        self._placing = threading.Lock()
        # Programs of one model compile side by side, as many as there are processes for it.
        self._compiles = ThreadPoolExecutor(config.runtime.compile_workers, thread_name_prefix="rsrv-compile")

    def load_all(self) -> None:
        """Discover the bundles, register their names, and prepare them. Returns when every one is ready or failed.

        All bundles are opened before the first program is compiled, so it is known how many there are, and models whose
        executables are in the cache need not wait for those that have to be compiled.
        """
        self._on_phase("load")
        # One more than compile, so that the next bundle is read and hashed meanwhile.
        workers = self._config.runtime.compile_workers + 1
        with ThreadPoolExecutor(workers, thread_name_prefix="rsrv-load") as threads:
            opened = [one for some in threads.map(self._open_or_fail, self._discover()) for one in some]
            self._progress.on_change = self._tell_progress
            self._progress.expect(sum(len(one.jobs) for one in opened))
            opened.sort(key=lambda one: not all(map(self._source.is_cached, one.jobs)))
            for _ in threads.map(self._finish_or_fail, opened):
                pass

    def close(self) -> None:
        """End the processes of hooks, and what compiles."""
        self.hooks.close()
        self._compiles.shutdown(cancel_futures=True)

    def _tell_progress(self) -> None:
        self._on_phase(str(self._progress.counts))

    def _discover(self) -> list[FoundBundle]:
        found = discover(self._config.model_dirs, self._config.models_include)
        first = [bundle for bundle in found if bundle.duplicate_of is None]
        for bundle in found:
            if bundle.duplicate_of is not None:
                log.error(
                    "model failed name=%s reason=duplicate_name path=%s first=%s",
                    bundle.name,
                    bundle.path,
                    bundle.duplicate_of,
                )
        if not first:
            log.warning("no model bundles found dirs=%s", ",".join(self._config.model_dirs))
        self._registry.announce({bundle.name: bundle.path for bundle in first})
        return first

    # --- one model ------------------------------------------------------------------------------------------------

    def _open_or_fail(self, found: FoundBundle) -> list[Opened]:
        opened: list[Opened] = []
        with self._recorded(found.name) as steps:
            opened.append(self._open(found, steps))
        return opened

    def _finish_or_fail(self, opened: Opened) -> None:
        with self._recorded(opened.found.name) as steps:
            self._finish(opened, steps)

    @contextmanager
    def _recorded(self, name: str) -> Iterator[Steps]:
        """Whatever goes wrong inside is recorded in the registry and raises nothing."""
        steps = Steps(self._stopping)
        try:
            yield steps
        except BaseException as error:
            self.hooks.drop(name)
            if self._stopping.is_set():
                log.info("model not loaded name=%s phase=%s reason=stopping", name, steps.phase)
                return
            # Bundle errors say all there is to say; the traceback of anything else is wanted.
            log.error(
                "model failed name=%s phase=%s error=%s",
                name,
                steps.phase,
                error if str(error) else type(error).__name__,
                exc_info=not isinstance(error, BundleError),
            )
            self._registry.set_failed(name, steps.phase, error)

    def _fail_hooks(self, name: str, error: HookError) -> None:
        log.error("model failed name=%s phase=hooks error=%s", name, error.message)
        self._registry.set_failed(name, "hooks", error)

    def _open(self, found: FoundBundle, steps: Steps) -> Opened:
        """Everything up to the programs, which are hashed and not parsed."""
        began = time.monotonic()
        name = found.name
        with steps("manifest"):
            bundle = open_bundle(found.path, unhooked=name in self._config.allow_unhooked)
            manifest = bundle.manifest
            for warning in bundle.warnings:
                log.warning("bundle of the older format name=%s warning=%s", name, warning.message)
            self._registry.set_manifest(name, manifest)
        with steps("hooks"):
            check_hooks(bundle, allow=self._config.hooks.allow)
        with steps("manifest"):
            _require_supported(manifest)
            settings = self._config.scheduler.models.get(name)
            chosen = settings.batch_sizes if settings is not None else None
            require_choosable(manifest, chosen)
        with steps("digests"):
            programs = read_programs(bundle, self._config.bundles.digests)
        with steps("weights"):
            if bundle.weights_path is None:
                raise BundleError(f"bundle {name!r} has no weights.safetensors", file="weights.safetensors")
            weights = open_weights(bundle.weights_path, column_major=manifest.column_major)
        jobs = program_jobs(manifest, programs, self._policy, chosen)
        return Opened(found, bundle, weights, jobs, began)

    def _finish(self, opened: Opened, steps: Steps) -> None:
        """From an opened bundle to a model that serves."""
        name, bundle = opened.found.name, opened.bundle
        manifest = bundle.manifest
        with steps("signature"):
            # All programs are compared with manifest and weights before any is compiled.
            found = [self._source.find(job) for job in opened.jobs]
            for job, one in zip(opened.jobs, found, strict=True):
                require_signature(manifest, job.variant, job.batch_key, one.report, opened.weights.header)
        incarnation = self._registry.next_incarnation()
        with steps("hooks"):
            hooks, processes = self.hooks.load(bundle, incarnation, steps)
        with steps("compile"):
            loaded = self._load_programs(opened.jobs, found)
        settings = self._config.scheduler.models.get(name)
        executables: dict[tuple[int, ...], dict[int, Executable]] = {}
        for job, program in zip(opened.jobs, loaded, strict=True):
            executables.setdefault(job.variant, {})[job.batch_key] = program.executable
        with steps("weights"), self._placing:
            weights = self._residency.open(
                name,
                opened.weights,
                floor=floor_of(self._config, name),
                scratch_bytes=scratch_of(self._config, manifest, executables),
            )
        model = ServableModel(
            name=name,
            incarnation=incarnation,
            manifest=manifest,
            programs=executables,
            weights=weights,
            max_batch_size=settings.max_batch_size if settings is not None else None,
        )
        prepared = prepare_checks(
            model,
            hooks,
            self._config.hooks.timeout_seconds,
            split_oversize=self._config.batching.split_oversize,
            numerics=_describe_numerics(name, loaded),
            processes=processes,
        )
        self._scheduler.add(model)
        self._registry.set_ready(name, prepared)
        log.info(
            "model loaded name=%s source=startup inputs=%s outputs=%s batch_sizes=%s weights=%d programs=%s "
            "numerics=%r seconds=%.2f",
            name,
            _describe(manifest.wire_inputs),
            _describe(manifest.wire_outputs),
            _describe_sizes(model),
            weights.nbytes,
            _describe_origins(loaded),
            prepared.numerics,
            time.monotonic() - opened.began,
        )
        self._on_ready(model)

    def _load_programs(self, jobs: Sequence[ProgramJob], found: Sequence[Found]) -> list[Loaded]:
        """Those in the cache on this thread, which takes milliseconds; the others where compilations take turns."""
        pending = {
            index: self._compiles.submit(self._source.load, job, one)
            for index, (job, one) in enumerate(zip(jobs, found, strict=True))
            if one.cached is None
        }
        try:
            return [
                pending[index].result() if index in pending else self._source.load(job, one)
                for index, (job, one) in enumerate(zip(jobs, found, strict=True))
            ]
        finally:
            for future in pending.values():
                future.cancel()


def _require_supported(manifest: Manifest) -> None:
    if manifest.is_meta:
        raise BundleError(f"model {manifest.name!r} has kind: meta, which is not supported yet")


def _describe(specs: Sequence[object]) -> str:
    return ", ".join(f"{spec.name}: {spec.describe()}" for spec in specs) or "(none)"  # type: ignore[attr-defined]


def _describe_sizes(model: ServableModel) -> str:
    variants = model.batch_keys_by_variant
    keys = next(iter(variants.values()), ())
    sizes = "unbatched" if keys == (0,) else str(list(keys))
    return sizes if len(variants) == 1 else f"{len(variants)} shapes × {sizes}"


def _describe_numerics(name: str, loaded: Sequence[Loaded]) -> str:
    """What the rewrites of the programs did, which is nearly always the same for all of them."""
    for warning in dict.fromkeys(text for one in loaded for text in one.compiled.warnings):
        log.warning("numerics of a program name=%s why=%s", name, warning)
    return "; ".join(dict.fromkeys(one.compiled.summary for one in loaded if one.compiled.summary))


def _describe_origins(loaded: Sequence[Loaded]) -> str:
    counts: dict[str, int] = {}
    for one in loaded:
        counts[one.origin] = counts.get(one.origin, 0) + 1
    return ",".join(f"{origin}:{count}" for origin, count in sorted(counts.items())) or "none"
