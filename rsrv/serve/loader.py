"""From a bundle's directory to a model that serves. Each model fails alone, and its failure names the phase."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rsrv.audit.signature import require_signature
from rsrv.bundle.digests import read_verified_program, verify_files
from rsrv.bundle.directory import Bundle, FoundBundle, discover, open_bundle
from rsrv.bundle.hookfile import inspect_hooks
from rsrv.bundle.safetensors import WeightsHeader, read_header
from rsrv.core.errors import BundleError, DigestMismatch, ServerStopping
from rsrv.runtime.hooks import Hooks, load_hooks
from rsrv.serve.registry import Prepared
from rsrv.serve.scheduler.model import ServableModel
from rsrv.serve.validate import OutputCheck, RowCheck, RowSizes, TensorCheck
from rsrv.serve.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from rsrv.bundle.manifest import Manifest
    from rsrv.core.config import ServerConfig
    from rsrv.runtime.compile_pool import CompilePool
    from rsrv.runtime.device import Device, Executable
    from rsrv.serve.registry import Registry
    from rsrv.serve.scheduler import Scheduler
    from rsrv.serve.weights import WeightSet

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1

Programs = Mapping[tuple[int, ...], Mapping[int, bytes]]


class Loader:
    """Prepares the bundles of a server. `stopping` ends it between two steps of a model."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        registry: Registry,
        scheduler: Scheduler,
        device: Device,
        pool: CompilePool,
        stopping: threading.Event,
        on_phase: Callable[[str], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._scheduler = scheduler
        self._device = device
        self._pool = pool
        self._stopping = stopping
        self._on_phase = on_phase
        # Weights reach the device one model at a time.
        self._placing = threading.Lock()
        self._placed: list[WeightSet] = []

    def load_all(self) -> None:
        """Discover the bundles, register their names, and prepare them. Returns when every one is ready or failed."""
        self._on_phase("load")
        found = self._discover()
        # One more than compile, so that the next bundle is read and hashed meanwhile.
        workers = self._config.runtime.compile_workers + 1
        done = 0
        with ThreadPoolExecutor(workers, thread_name_prefix="rsrv-load") as threads:
            self._on_phase(f"compile 0/{len(found)}")
            for _ in threads.map(self.prepare, found):
                done += 1
                self._on_phase(f"compile {done}/{len(found)}")

    def free(self) -> None:
        """Free all weights, once nothing runs any more."""
        for weights in self._placed:
            weights.free()
        self._placed.clear()

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

    def prepare(self, found: FoundBundle) -> None:
        """Prepare one bundle; whatever goes wrong is recorded in the registry and raises nothing."""
        steps = _Steps(self._stopping)
        try:
            self._prepare(found, steps)
        except BaseException as error:
            if self._stopping.is_set():
                log.info("model not loaded name=%s phase=%s reason=stopping", found.name, steps.phase)
                return
            # Bundle errors say all there is to say; the traceback of anything else is wanted.
            log.error(
                "model failed name=%s phase=%s error=%s",
                found.name,
                steps.phase,
                error if str(error) else type(error).__name__,
                exc_info=not isinstance(error, BundleError),
            )
            self._registry.set_failed(found.name, steps.phase, error)

    def _prepare(self, found: FoundBundle, steps: _Steps) -> None:
        began = time.monotonic()
        name = found.name
        with steps("manifest"):
            bundle = open_bundle(found.path, unhooked=name in self._config.allow_unhooked)
            manifest = bundle.manifest
            for warning in bundle.warnings:
                log.warning("bundle of the older format name=%s warning=%s", name, warning.message)
            self._registry.set_manifest(name, manifest)
        with steps("hooks"):
            self._check_hooks(bundle)
        with steps("manifest"):
            _require_supported(manifest)
        with steps("digests"):
            programs = self._read_programs(bundle)
        with steps("weights"):
            if bundle.weights_path is None:
                raise BundleError(f"bundle {name!r} has no weights.safetensors", file="weights.safetensors")
            header = read_header(bundle.weights_path, column_major=manifest.column_major)
        with steps("signature"):
            self._check_signatures(manifest, programs, header)
        incarnation = self._registry.next_incarnation()
        with steps("hooks"):
            hooks = Hooks()
            if bundle.hooks_path is not None:
                hooks = self._load_hooks(bundle.hooks_path, name, incarnation)
        with steps("compile"):
            executables = {
                variant: {key: self._compile(name, key, program) for key, program in by_key.items()}
                for variant, by_key in programs.items()
            }
        with steps("weights"), self._placing:
            weights = load_weights(
                self._device, bundle.weights_path, header, map_weights=self._config.runtime.map_weights
            )
            self._placed.append(weights)
        settings = self._config.scheduler.models.get(name)
        model = ServableModel(
            name=name,
            incarnation=incarnation,
            manifest=manifest,
            programs=executables,
            weights=weights,
            max_batch_size=settings.max_batch_size if settings is not None else None,
        )
        prepared = prepare_checks(model, hooks, self._config.hooks.timeout_seconds)
        self._scheduler.add(model)
        self._registry.set_ready(name, prepared)
        log.info(
            "model loaded name=%s source=startup inputs=%s outputs=%s batch_sizes=%s weights=%d seconds=%.2f",
            name,
            _describe(manifest.wire_inputs),
            _describe(manifest.wire_outputs),
            _describe_sizes(model),
            weights.nbytes,
            time.monotonic() - began,
        )

    def _check_hooks(self, bundle: Bundle) -> None:
        """What can be said about hooks without running them."""
        if bundle.hooks_path is None:
            return
        if not self._config.hooks.allow:
            raise BundleError(
                f"{bundle.hooks_path}: the bundle has hooks, and hooks are not allowed (hooks.allow: false)",
                rule="B-71",
                file=bundle.hooks_path.name,
                hint="serve without --no-hooks if you trust this file",
            )
        for problem in inspect_hooks(bundle.hooks_path).problems(meta=bundle.manifest.is_meta):
            raise problem

    def _load_hooks(self, path: Path, name: str, incarnation: int) -> Hooks:
        """Run ``model.py`` on a daemon thread of its own, which is left behind when the server stops meanwhile.

        Nobody knows what user code waits for, and threads that it starts must not keep the process alive either.
        """
        outcome: Future[Hooks] = Future()

        def run() -> None:
            try:
                outcome.set_result(load_hooks(path, name=name, incarnation=incarnation))
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name=f"rsrv-import {name}", daemon=True).start()
        while not wait([outcome], _LOOK_SECONDS).done:
            if self._stopping.is_set():
                raise ServerStopping("the server is stopping")
        return outcome.result()

    def _read_programs(self, bundle: Bundle) -> Programs:
        mode = self._config.bundles.digests
        if mode == "strict":
            for finding in verify_files(bundle, "all"):
                raise DigestMismatch(
                    f"bundle {bundle.name!r}: {finding.message}",
                    rule="B-15a",
                    file=finding.file,
                    hint=f"'rsrv bundle seal {bundle.path}' accepts the files as they are",
                )
        return {
            variant: {key: read_verified_program(bundle, path, mode) for key, path in by_key.items()}
            for variant, by_key in bundle.programs.items()
        }

    def _check_signatures(self, manifest: Manifest, programs: Programs, header: WeightsHeader) -> None:
        """Compare every program with manifest and weights before any is compiled; they are parsed in the pool."""
        for variant, by_key in programs.items():
            for key, program in by_key.items():
                require_signature(manifest, variant, key, self._pool.inspect(program), header)

    def _compile(self, name: str, key: int, program: bytes) -> Executable:
        if self._stopping.is_set():
            raise ServerStopping("the server is stopping")
        log.info("compiling model name=%s batch_key=%d", name, key)
        compiled = self._pool.compile(program)
        if compiled.blob is None:
            # It cannot be serialised, but it has compiled once in a process that could die of it, and did not.
            return self._device.compile(program)
        return self._device.load(compiled.blob, compiled.report.signature)


class DigestWatch:
    """Hashes weights and hooks after the server is ready, and reports what differs from the manifests.

    Such files may be replaced on their own, so a difference is a warning and the model is marked as modified.
    """

    def __init__(self, registry: Registry, stopping: threading.Event, *, allow_unhooked: Sequence[str] = ()) -> None:
        self._registry = registry
        self._stopping = stopping
        self._allow_unhooked = allow_unhooked

    def run(self) -> None:
        for entry in self._registry.entries():
            if self._stopping.is_set():
                return
            if entry.prepared is None or not entry.prepared.model.manifest.files:
                continue
            try:
                bundle = open_bundle(entry.path, unhooked=entry.name in self._allow_unhooked)
                findings = verify_files(bundle, "all")
            except (OSError, BundleError) as error:
                log.warning("digests not checked name=%s error=%s", entry.name, error)
                continue
            if findings:
                files = sorted(finding.file for finding in findings)
                log.warning("model modified name=%s files=%s", entry.name, ",".join(files))
                self._registry.set_modified(entry.name, files)


class _Steps:
    """Remembers the phase that a preparation is in, and ends it between two phases when the server stops."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self.phase = "load"

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._stopping.is_set():
            raise ServerStopping("the server is stopping")
        self.phase = phase
        yield


def _require_supported(manifest: Manifest) -> None:
    unsupported = {
        "kind: meta": manifest.is_meta,
        "batching.dynamic: true": manifest.batching.dynamic,
        "hooks.mode: process": manifest.hooks.mode == "process",
    }
    for what, present in unsupported.items():
        if present:
            raise BundleError(f"model {manifest.name!r} has {what}, which is not supported yet")


def prepare_checks(model: ServableModel, hooks: Hooks, hook_timeout: float | None) -> Prepared:
    """Everything about a model's requests that can be computed before the first one."""
    manifest, name = model.manifest, model.name
    hooked = hooks.preprocess is not None or hooks.postprocess is not None
    exact = not model.coalescable
    return Prepared(
        model=model,
        hooks=hooks,
        inputs=TensorCheck(manifest.wire_inputs, model=name),
        executable_inputs=TensorCheck(manifest.executable_inputs, model=name, what="executable input")
        if hooks.preprocess is not None
        else None,
        rows=RowCheck(
            manifest.executable_inputs,
            {variant: RowSizes(sizes, exact) for variant, sizes in model.row_sizes_by_variant.items()},
            model=name,
        ),
        outputs=OutputCheck(manifest.wire_outputs, model=name, rows_known=not hooked),
        client_outputs=TensorCheck(manifest.wire_outputs, model=name, what="output")
        if hooks.postprocess is not None
        else None,
        hook_timeout=manifest.hooks.timeout_seconds or hook_timeout,
    )


def _describe(specs: Sequence[object]) -> str:
    return ", ".join(f"{spec.name}: {spec.describe()}" for spec in specs) or "(none)"  # type: ignore[attr-defined]


def _describe_sizes(model: ServableModel) -> str:
    variants = model.batch_keys_by_variant
    keys = next(iter(variants.values()), ())
    sizes = "unbatched" if keys == (0,) else str(list(keys))
    return sizes if len(variants) == 1 else f"{len(variants)} shapes × {sizes}"
