"""From a bundle's directory to a model that serves. Each model fails alone, and its failure names the phase."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rsrv.audit.signature import require_signature
from rsrv.bundle.directory import Bundle, FoundBundle, discover, open_bundle
from rsrv.core.errors import BundleError, HookError, ModelUnloaded
from rsrv.serve.loading.batching import program_jobs, require_choosable
from rsrv.serve.loading.checks import prepare_checks
from rsrv.serve.loading.coherence import Versions
from rsrv.serve.loading.digests import read_programs
from rsrv.serve.loading.hookfile import HookLoader, check_hooks
from rsrv.serve.loading.programs import Found, Loaded, ProgramJob, ProgramSource
from rsrv.serve.loading.steps import Steps
from rsrv.serve.registry import Entry, Prepared
from rsrv.serve.residency.setup import floor_of, scratch_of
from rsrv.serve.residency.tensors import WeightsFile, open_weights
from rsrv.serve.scheduler.model import ServableModel
from rsrv.stablehlo.policy import Policy

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest
    from rsrv.core.config import ServerConfig
    from rsrv.runtime.device import Executable
    from rsrv.runtime.hooks import Hooks
    from rsrv.serve.hook_processes.processes import HookProcesses
    from rsrv.serve.loading.progress import LoadProgress
    from rsrv.serve.registry import Registry
    from rsrv.serve.residency.floors import Floor
    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_PREPARING = 32
"""Models that are being prepared at a time. More than may read and compile: hooks that hang hold up few others."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A bundle that has been read as far as its programs; `jobs` are what has to become executables."""

    entry: Entry
    bundle: Bundle
    versions: Versions
    weights: WeightsFile
    jobs: list[ProgramJob]
    began: float


@dataclass(frozen=True, slots=True)
class Compiled:
    """An opened bundle whose hooks are loaded, and whose programs are on the device."""

    opened: Opened
    incarnation: int
    hooks: Hooks
    processes: HookProcesses | None
    loaded: list[Loaded]
    programs: dict[tuple[int, ...], dict[int, Executable]]


class Loader:
    """Prepares the bundles of a server. `stopping` ends it between two steps of a model.

    Attributes:
        on_loaded: told of every model that has become ready, and of the versions of the files that it was made from.
        on_idle: told of an incarnation that accepts no more requests and has none; on any thread, must be quick.

    Args:
        source: where executables come from.
        progress: counts programs.
        policy: what is done to every program before it is compiled.
        hook_processes: how many processes run the hooks of a model that has ``hooks.mode: process`` and says no number.
        on_phase: told what the server does now.
        on_ready: told of every model that has become ready, on the thread that prepared it.
        on_hooks_lost: told of an incarnation that lost too many of its hook processes.
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
        on_hooks_lost: Callable[[int, HookError], None] = lambda incarnation, error: None,
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
        self.on_loaded: Callable[[ServableModel, Versions], None] = lambda model, versions: None
        self.on_idle: Callable[[int], None] = lambda incarnation: None
        self.hooks = HookLoader(
            config.hooks, processes=hook_processes, on_failed=on_hooks_lost, on_importing=self._tell_importing
        )
        # Weights reach the device one model at a time.
        self._placing = threading.Lock()
        # Those that read and compile at a time: one more than compile, so that the next bundle is read and hashed
        # meanwhile. One whose hooks are being imported, which may hang, is not one of them.
        self._slots = threading.BoundedSemaphore(config.runtime.compile_workers + 1)
        # A name that was removed while it was prepared, and is there again, waits for the end of that.
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        # Programs of one model compile side by side, as many as there are processes for it.
        self._compiles = ThreadPoolExecutor(config.runtime.compile_workers, thread_name_prefix="rsrv-compile")

    # --- all models, at the start ---------------------------------------------------------------------------------

    def load_all(self) -> None:
        """Discover the bundles, register their names, and prepare them. Returns when every one is ready or failed.

        All bundles are opened before the first program is compiled, so it is known how many there are, and models whose
        executables are in the cache need not wait for those that have to be compiled.
        """
        self._on_phase("load")
        self._discover()
        entries = self._registry.entries()
        with ThreadPoolExecutor(MAX_PREPARING, thread_name_prefix="rsrv-load") as threads:
            opened = [one for some in threads.map(self._open_or_fail, entries) for one in some]
            self._progress.on_change = self._tell_progress
            self._progress.expect(sum(len(one.jobs) for one in opened))
            opened.sort(key=lambda one: not all(map(self._source.is_cached, one.jobs)))
            for _ in threads.map(self._finish_or_fail, opened):
                pass
        # From now on it is about single models, and no phase of the server.
        self._progress.on_change = lambda: None

    def close(self) -> None:
        """End the processes of hooks, and what compiles."""
        self.hooks.close()
        self._compiles.shutdown(cancel_futures=True)

    def _tell_importing(self, name: str, incarnation: int, since: float | None) -> None:
        self._registry.change(name, of=incarnation, importing_since=since)

    def _tell_progress(self) -> None:
        self._on_phase(str(self._progress.counts))

    def _discover(self) -> None:
        found = discover(self._config.model_dirs, self._config.models_include)
        first = [bundle for bundle in found if bundle.duplicate_of is None]
        for bundle in found:
            if bundle.duplicate_of is not None:
                _warn_of_duplicate(bundle)
        if not first:
            log.warning("no model bundles found dirs=%s", ",".join(self._config.model_dirs))
        self._registry.announce({bundle.name: bundle.path for bundle in first})

    def _open_or_fail(self, entry: Entry) -> list[Opened]:
        opened: list[Opened] = []
        # Given back by whoever ends the preparation, on whichever thread.
        self._turns[entry.name].acquire()
        with self._recorded(entry) as steps:
            opened.append(self._open(entry, entry.path, steps))
        if not opened:
            self._turns[entry.name].release()
        return opened

    def _finish_or_fail(self, opened: Opened) -> None:
        try:
            with self._recorded(opened.entry) as steps:
                self._install_first(self._compile(opened, opened.entry.incarnation, steps), steps)
        finally:
            self._turns[opened.entry.name].release()

    # --- one model ------------------------------------------------------------------------------------------------

    def load(self, entry: Entry) -> None:
        """Prepare a model that was registered while the server runs. Its failure is recorded, and raises nothing."""
        with self._turns[entry.name], self._recorded(entry) as steps:
            opened = self._open(entry, entry.path, steps)
            compiled = self._compile(opened, entry.incarnation, steps)
            self._install_first(compiled, steps)

    def reload(
        self, entry: Entry, path: Path, steps: Steps, *, make_room: Callable[[], None] | None = None
    ) -> tuple[Prepared, Compiled]:
        """Prepare another incarnation of a model that serves, from `path`, and return it; nothing else changes.

        Programs with the same bytes are the same executables, and a weights file that did not change is the same
        weights. `make_room` is called before other weights are placed. Raises what fails; `steps` says in which phase.
        """
        old = entry.prepared
        assert old is not None
        with self._turns[entry.name]:
            incarnation = self._registry.next_incarnation()
            try:
                opened = self._open(entry, path, steps)
                compiled = self._compile(opened, incarnation, steps)
                known = cast("ModelWeights", old.model.weights)
                if _same_content(known, opened.weights):
                    opened.weights.close()
                    self._residency.note_scratch(scratch_of(self._config, opened.bundle.manifest, compiled.programs))
                    return self._prepared(compiled, known), compiled
                if make_room is not None:
                    make_room()
                # The floor may have been changed since the first load.
                weights = self._place(compiled, f"{entry.name}#{incarnation}", steps, floor=known.floor)
                try:
                    return self._prepared(compiled, weights), compiled
                except BaseException:
                    self._residency.close_model(weights)
                    raise
            except BaseException:
                self.hooks.drop(incarnation)
                raise

    def renamed(self, prepared: Prepared, name: str) -> Prepared:
        """The same incarnation under another name."""
        old = prepared.model
        settings = self._config.scheduler.models.get(name)
        model = ServableModel(
            name=name,
            incarnation=old.incarnation,
            manifest=replace(old.manifest, name=name),
            programs=old.programs,
            weights=old.weights,
            max_batch_size=settings.max_batch_size if settings is not None else None,
        )
        return prepare_checks(
            model,
            prepared.hooks,
            self._config.hooks.timeout_seconds,
            split_oversize=self._config.batching.split_oversize,
            numerics=prepared.numerics,
            processes=prepared.processes,
            accepted=prepared.accepted,
        )

    @contextmanager
    def _recorded(self, entry: Entry) -> Iterator[Steps]:
        """Whatever goes wrong inside is recorded in the registry and raises nothing."""
        name = entry.name
        steps = Steps(self._stopping, entry.dropped)
        try:
            yield steps
        except BaseException as error:
            self.hooks.drop(entry.incarnation)
            if self._stopping.is_set() or entry.dropped.is_set():
                why = "stopping" if self._stopping.is_set() else "removed"
                log.info("model not loaded name=%s phase=%s reason=%s", name, steps.phase, why)
                return
            log_failure("model failed", name, steps.phase, error)
            self._registry.set_failed(name, steps.phase, error, of=entry.incarnation)

    def _open(self, entry: Entry, path: Path, steps: Steps) -> Opened:
        """Everything up to the programs, which are hashed and not parsed."""
        began = time.monotonic()
        name = entry.name
        with steps("manifest"):
            versions = Versions(path)
            bundle = open_bundle(path, unhooked=name in self._config.allow_unhooked)
            manifest = bundle.manifest
            for warning in bundle.warnings:
                log.warning("bundle of the older format name=%s warning=%s", name, warning.message)
            if entry.prepared is None:
                self._registry.change(name, of=entry.incarnation, manifest=manifest)
        with steps("hooks"):
            check_hooks(bundle, allow=self._config.hooks.allow)
        with steps("manifest"):
            _require_supported(manifest)
            settings = self._config.scheduler.models.get(name)
            chosen = settings.batch_sizes if settings is not None else None
            require_choosable(manifest, chosen)
        with steps("digests"):
            programs = read_programs(bundle, self._config.bundles.digests, steps.require_running)
        with steps("weights"):
            if bundle.weights_path is None:
                raise BundleError(f"bundle {name!r} has no weights.safetensors", file="weights.safetensors")
            weights = open_weights(bundle.weights_path, column_major=manifest.column_major)
        jobs = program_jobs(manifest, programs, self._policy, chosen)
        return Opened(entry, bundle, versions, weights, jobs, began)

    def _compile(self, opened: Opened, incarnation: int, steps: Steps) -> Compiled:
        """From an opened bundle to hooks and executables."""
        bundle = opened.bundle
        with self._slots, steps("signature"):
            # All programs are compared with manifest and weights before any is compiled.
            found = [self._source.find(job) for job in opened.jobs]
            for job, one in zip(opened.jobs, found, strict=True):
                require_signature(bundle.manifest, job.variant, job.batch_key, one.report, opened.weights.header)
        with steps("hooks"):
            hooks, processes = self.hooks.load(bundle, incarnation, steps)
            # The last that reads files by their names; the bytes of the weights come from the file that is open.
            opened.versions.require_same(bundle)
        with self._slots, steps("compile"):
            loaded = self._load_programs(opened.jobs, found)
        programs: dict[tuple[int, ...], dict[int, Executable]] = {}
        for job, program in zip(opened.jobs, loaded, strict=True):
            programs.setdefault(job.variant, {})[job.batch_key] = program.executable
        return Compiled(opened, incarnation, hooks, processes, loaded, programs)

    def _place(self, compiled: Compiled, known_as: str, steps: Steps, *, floor: Floor | None = None) -> ModelWeights:
        opened, name = compiled.opened, compiled.opened.entry.name
        settings = opened.entry.settings
        with steps("weights"), self._placing:
            return self._residency.open(
                known_as,
                opened.weights,
                model=name,
                floor=floor or settings.residency or floor_of(self._config, name),
                scratch_bytes=scratch_of(self._config, opened.bundle.manifest, compiled.programs),
                pinned=settings.pinned,
            )

    def _prepared(self, compiled: Compiled, weights: ModelWeights) -> Prepared:
        opened, name = compiled.opened, compiled.opened.entry.name
        settings = self._config.scheduler.models.get(name)
        model = ServableModel(
            name=name,
            incarnation=compiled.incarnation,
            manifest=opened.bundle.manifest,
            programs=compiled.programs,
            weights=weights,
            max_batch_size=settings.max_batch_size if settings is not None else None,
        )
        prepared = prepare_checks(
            model,
            compiled.hooks,
            self._config.hooks.timeout_seconds,
            split_oversize=self._config.batching.split_oversize,
            numerics=_describe_numerics(name, compiled.loaded),
            processes=compiled.processes,
        )
        prepared.accepted.on_idle = partial(self.on_idle, compiled.incarnation)
        return prepared

    def _install_first(self, compiled: Compiled, steps: Steps) -> None:
        entry = compiled.opened.entry
        weights = self._place(compiled, entry.name, steps)
        try:
            prepared = self._prepared(compiled, weights)
            self.add(entry, prepared)
        except BaseException:
            self._residency.close_model(weights)
            raise
        self.tell_loaded(entry, prepared, compiled)

    def add(self, entry: Entry, prepared: Prepared) -> None:
        """The model serves from now on. Raises ModelUnloaded when it is not wanted any more."""
        name, model, settings = entry.name, prepared.model, entry.settings
        with self._registry.changing:
            current = self._registry.get(name)
            if current is None or current.incarnation != entry.incarnation or current.dropped.is_set():
                raise ModelUnloaded(f"model {name!r} was removed while it was being prepared")
            if current.gate != "open":
                prepared.accepted.close()
            self._scheduler.add(model)
            if settings.weight is not None or settings.max_batch_size is not None:
                self._scheduler.set_policy(name, weight=settings.weight, max_batch_size=settings.max_batch_size)
            self._registry.set_ready(name, prepared, of=entry.incarnation)
            if current.settings.pinned != settings.pinned:
                # Said while the model was being prepared.
                (self._residency.pin if current.settings.pinned else self._residency.unpin)(name)

    def tell_loaded(self, entry: Entry, prepared: Prepared, compiled: Compiled) -> None:
        """Log what became of a bundle, and have it measured."""
        model, manifest = prepared.model, prepared.model.manifest
        log.info(
            "model loaded name=%s source=%s incarnation=%d inputs=%s outputs=%s batch_sizes=%s weights=%d programs=%s "
            "numerics=%r seconds=%.2f",
            model.name,
            entry.source,
            model.incarnation,
            _describe(manifest.wire_inputs),
            _describe(manifest.wire_outputs),
            _describe_sizes(model),
            model.weights.nbytes,
            _describe_origins(compiled.loaded),
            prepared.numerics,
            time.monotonic() - compiled.opened.began,
        )
        self._on_ready(model)
        self.on_loaded(model, compiled.opened.versions)

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


def log_failure(what: str, name: str, phase: str, error: BaseException) -> None:
    """Bundle errors say all there is to say; the traceback of anything else is wanted."""
    log.error(
        "%s name=%s phase=%s error=%s",
        what,
        name,
        phase,
        error if str(error) else type(error).__name__,
        exc_info=not isinstance(error, BundleError),
    )


def _same_content(known: ModelWeights, file: WeightsFile) -> bool:
    """Whether a file that was opened again is the one that is known, so that its bytes need not be read again."""
    return known.file.token == file.token and known.file.column_major == file.column_major


def _warn_of_duplicate(bundle: FoundBundle) -> None:
    log.error(
        "model failed name=%s reason=duplicate_name path=%s first=%s", bundle.name, bundle.path, bundle.duplicate_of
    )


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
