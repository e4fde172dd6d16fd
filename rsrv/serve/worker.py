"""One server from bring-up to stop: the order in which its parts come up and go down is this module's subject."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rsrv.core.config import ServerConfig, hook_pool_size
from rsrv.core.errors import DeviceLost, HookError, ServerStopping
from rsrv.core.shm import RegionRegistry
from rsrv.rpc.grpcio_engine import GrpcioEngine
from rsrv.rpc.http import HttpListener
from rsrv.runtime import open_device
from rsrv.serve import observe
from rsrv.serve.admin.http import listener_threads
from rsrv.serve.admission import Admission
from rsrv.serve.compiling import Compiling
from rsrv.serve.counters import ServerCounters
from rsrv.serve.faces import Faces, make_faces
from rsrv.serve.hook_pool import HookPool
from rsrv.serve.inference import Inference
from rsrv.serve.lifecycle import Lifecycle, Readiness
from rsrv.serve.live import Live
from rsrv.serve.loading import DigestWatch, Loader, LoadProgress, ProgramSource, Warmup
from rsrv.serve.loading.steps import Steps
from rsrv.serve.numerics import ServerNumerics, numerics_for, prepare_environment, probe
from rsrv.serve.registry import Registry
from rsrv.serve.repository.snapshot import scan
from rsrv.serve.request import Request
from rsrv.serve.residency.probe import probe_scratch
from rsrv.serve.residency.setup import open_residency
from rsrv.serve.residency.times import LoadTimes
from rsrv.serve.scheduler import Policy, Scheduler
from rsrv.serve.sources import Sources

if TYPE_CHECKING:
    from rsrv.runtime import CompilePool, ExecutableCache
    from rsrv.runtime.device import Device
    from rsrv.serve.residency.manager import Residency

log = logging.getLogger(__name__)

SPARE_THREADS = 32
"""Engine threads beyond the ModelInfer calls, so that health, metadata and shared memory always find one."""
LAST_ANSWERS_SECONDS = 2.0
"""How long answers that are on their way may take once the grace is over."""


class RunningServer:
    """A server; `open` and `load` bring it up, `stop` takes it down.

    Attributes:
        config: its configuration.
        registry, scheduler, shm: its models, its queues, its shared-memory regions (None when off).
        device, pool: where programs run, and the processes that compile them.
        numerics: the arithmetic of its programs.
        on_stopped: called when it has stopped.
        on_lost: called when its device is gone, on a thread of its own; requests are refused by then.
        server, http_server: the listeners (`http_server` is None when HTTP is off).
        grpc_port, http_port: the ports it is bound to; `http_port` is None when HTTP is off.
    """

    def __init__(self, config: ServerConfig, *, worker: str | None = None, workers_on_node: int = 1) -> None:
        self.config = config
        self.worker = worker
        self.registry = Registry()
        self.progress = LoadProgress()
        self.lifecycle = Lifecycle(self.registry, config.startup.ready_when, self._stuck, lambda: self.progress.counts)
        self.counters = ServerCounters()
        self.admission: Admission[Request] = Admission(config.endpoints.max_concurrent_requests, config.held_requests)
        self.hook_pool = HookPool(hook_pool_size(os.environ, workers=workers_on_node))
        self.shm: RegionRegistry | None = None
        self.grpc_port = 0
        self.http_port: int | None = None
        self.numerics = ServerNumerics()
        self._compiling: Compiling | None = None
        self._warmup: Warmup | None = None
        self._device: Device | None = None
        self._scheduler: Scheduler | None = None
        self.server: GrpcioEngine | None = None
        self.http_server: HttpListener | None = None
        self._faces: Faces | None = None
        self._live: Live | None = None
        self._residency: Residency | None = None
        self._load_times = LoadTimes()
        self._inference: Inference | None = None
        self._loader: Loader | None = None
        self.on_stopped: Callable[[], None] = lambda: None
        self.on_lost: Callable[[DeviceLost], None] = lambda error: None
        self._lost: DeviceLost | None = None
        self._threads: list[threading.Thread] = []
        self._digests: DigestWatch | None = None
        self._hashing: threading.Thread | None = None
        self._stopping = threading.Event()
        self._stop_lock = threading.Lock()
        self._changed = threading.Condition()
        self.registry.on_change = self._on_entry
        self.lifecycle.on_change = self._on_change

    @property
    def pool(self) -> CompilePool | None:
        return None if self._compiling is None else self._compiling.pool

    @property
    def cache(self) -> ExecutableCache | None:
        return None if self._compiling is None else self._compiling.cache

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "the server is not open"
        return self._scheduler

    @property
    def device(self) -> Device:
        assert self._device is not None, "the server is not open"
        return self._device

    @property
    def residency(self) -> Residency:
        assert self._residency is not None, "the server is not open"
        return self._residency

    @property
    def live(self) -> Live:
        """What changes its models while it runs."""
        assert self._live is not None, "the server is not open"
        return self._live

    @property
    def faces(self) -> Faces:
        assert self._faces is not None, "the server is not open"
        return self._faces

    # --- bring-up -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Bring up everything to both ports bound and answering. Raises what failed, and leaves nothing behind."""
        try:
            self._open()
        except BaseException:
            self.lifecycle.enter("failed")
            self._close()
            raise

    def _open(self) -> None:
        config = self.config
        prepare_environment(config.runtime.numerics)
        self._compiling = compiling = Compiling(config)
        runtime = config.runtime
        self._device = open_device(
            runtime.backend,
            ordinal=runtime.device_ordinal,
            mem_fraction=runtime.mem_fraction,
            preallocate=runtime.preallocate,
            allow_cpu_fallback=runtime.allow_cpu_fallback,
            cpu_threads=runtime.cpu_threads,
            fake_seconds_per_row=runtime.fake.seconds_per_row,
            fake_memory_bytes=runtime.fake.memory_bytes,
        )
        self.numerics = numerics_for(config.runtime.numerics, self._device)
        compiling.follow(self._device)
        if self._device.platform == "cuda":
            self.numerics = probe(self.numerics, self._device, self._program_source(LoadProgress()))
        self._scheduler = Scheduler(self._device, Policy.of(config))
        self._residency = open_residency(self._device, self._scheduler, config, on_load=self._load_times.record)
        self._residency.start()
        self._scheduler.on_stuck(self._on_change)
        self._scheduler.on_lost(self._lose)
        self._scheduler.start()
        if config.shm.enabled:
            self.shm = RegionRegistry(
                max_regions=config.shm.max_regions,
                max_total_bytes=config.shm.max_total_bytes,
                reap_seconds=config.shm.reap_seconds,
                allow_keys=config.shm.allow_keys,
                deny_keys=config.shm.deny_keys,
                require_same_uid=config.shm.require_same_uid,
            )
        self._open_models()
        self._listen()
        if self.shm is not None:
            self._spawn("rsrv-reaper", self._reap)

    def _program_source(self, progress: LoadProgress) -> ProgramSource:
        assert self._compiling is not None
        return self._compiling.source(self.device, progress, Steps(self._stopping).require_running)

    def _listen(self) -> None:
        config = self.config
        endpoints = config.endpoints
        self.server = GrpcioEngine(
            self.faces.grpc,
            host=endpoints.host,
            port=endpoints.grpc_port,
            threads=endpoints.max_concurrent_requests + config.held_requests + SPARE_THREADS,
            max_recv_bytes=config.grpc.max_recv_msg_bytes,
            max_send_bytes=config.grpc.max_send_msg_bytes,
        )
        self.grpc_port = self.server.bind()
        if endpoints.http_port is not None:
            self.http_server = HttpListener(
                endpoints.host, endpoints.http_port, self.faces.http, threads=listener_threads(config)
            )
            self.http_port = self.http_server.bind()
        self.server.start()
        if self.http_server is not None:
            self.http_server.start()
        log.info(
            "listening host=%s grpc_port=%d http_port=%s cap=%d",
            endpoints.host,
            self.grpc_port,
            self.http_port if self.http_port is not None else "off",
            endpoints.max_concurrent_requests,
        )

    def _open_models(self) -> None:
        """Everything about models and requests; nothing is read yet."""
        config = self.config
        self._inference = Inference(
            registry=self.registry,
            scheduler=self.scheduler,
            hook_pool=self.hook_pool,
            counters=self.counters,
            admission=self.admission,
            regions=self.shm,
            max_lost=config.hooks.max_lost,
            on_hooks_lost=self._fail_hooks,
            hold_unprepared=config.admission.hold == "always",
        )
        source = self._program_source(self.progress)
        self._warmup = Warmup(self.scheduler, self.device, enabled=config.scheduler.discipline != "fifo")
        self._loader = Loader(
            config=config,
            registry=self.registry,
            scheduler=self.scheduler,
            residency=self.residency,
            source=source,
            progress=self.progress,
            stopping=self._stopping,
            policy=self.numerics.policy,
            on_phase=self._set_phase,
            hook_processes=self.hook_pool.size,
            on_ready=self._warmup.add,
            on_hooks_lost=lambda incarnation, error: self.live.registrations.fail_hooks(incarnation, error),
        )
        if config.bundles.digests == "programs":
            self._digests = DigestWatch(self.registry, self._stopping, allow_unhooked=config.allow_unhooked)
            self._loader.on_loaded = self._digests.add
        self._live = Live(
            config,
            registry=self.registry,
            scheduler=self.scheduler,
            residency=self.residency,
            loader=self._loader,
            source=source,
            policy=self.numerics.policy,
            warmup=self._warmup,
            inference=self._inference,
            admission=self.admission,
            counters=self.counters,
            stopping=self._stopping,
        )
        self._faces = make_faces(
            self._sources(self._live),
            self._live,
            self._inference,
            config,
            worker=self.worker,
            numerics=self.numerics,
            on_moved=self._on_change,
        )
        self._live.start()

    def _sources(self, live: Live) -> Sources:
        loader = self._loader
        assert loader is not None
        return Sources(
            registry=self.registry,
            lifecycle=self.lifecycle,
            scheduler=self.scheduler,
            counters=self.counters,
            admission=self.admission,
            hook_pool=self.hook_pool,
            hook_processes_lost=lambda: loader.hooks.processes_lost,
            regions=self.shm,
            device=self.device,
            programs=lambda: self.progress.counts,
            cache=self.cache,
            residency=self._residency,
            load_times=self._load_times,
            registrations=live.registrations,
            operations=live.operations,
            program_sets=live.programs,
            reclaimer=live.reclaimer,
            watcher=live.watcher,
        )

    def load(self) -> None:
        """Discover and prepare the bundles; returns when each is ready or failed, or when the server stops."""
        if self._stopping.is_set():
            return
        live, loader, warmup = self.live, self._loader, self._warmup
        assert loader is not None
        assert warmup is not None
        if live.watcher is not None:
            # Before anything is read: what changes meanwhile is a change.
            live.watcher.seed(scan(self.config.model_dirs, self.config.models_include))
        loader.load_all()
        live.registrations.tell_started()
        self._probe_scratch(warmup)
        self.residency.report_budget()
        if not self.lifecycle.enter("serving", only_from=("starting",)):
            return
        progress = self.registry.progress()
        log.info(
            "models ready count=%d failed=%d programs=%r control_mode=%s device=%s",
            progress.prepared,
            progress.failed,
            str(self.progress.counts),
            self.config.model_control_mode,
            self.device.kind,
        )
        observe.beat("up", self.config)
        # Only now: the runs take the processor that loading needs, and what they measure is not missed before.
        self._spawn("rsrv-warmup", warmup.run)
        if live.watcher is not None:
            live.watcher.start()
        if self._digests is not None:
            self._hashing = threading.Thread(target=self._digests.run, name="rsrv-digests", daemon=True)
            self._hashing.start()

    def _probe_scratch(self, warmup: Warmup) -> None:
        if self.config.runtime.scratch_source == "compiled":
            return
        ready = [entry.prepared.model for entry in self.registry.entries() if entry.prepared is not None]
        with contextlib.suppress(ServerStopping):
            probe_scratch(self.device, self.residency, ready, warmup.measure, self._stopping.is_set)

    def start_loading(self, load: Callable[[], None] | None = None) -> None:
        """`load`, this server's own by default, on a thread of its own. A stop frees nothing before it has ended."""
        self._spawn("rsrv-bring-up", load or self.load)

    def wait_ready(self, timeout: float | None = None) -> Readiness:
        """Wait until the server is ready, or cannot become it without help, or `timeout` seconds have passed."""

        def settled() -> bool:
            return self.lifecycle.readiness().ready or self.lifecycle.state not in ("starting",)

        with self._changed:
            self._changed.wait_for(settled, timeout)
        return self.lifecycle.readiness()

    # --- stop -----------------------------------------------------------------------------------------------------

    def stop(self, grace_seconds: float | None = None) -> None:
        """Stop gracefully; idempotent, a second caller waits for the first.

        Ready turns false; for `shutdown.pause_seconds` requests are still accepted; then new ones are refused and
        accepted ones have `grace_seconds` (default: `shutdown.grace_seconds`) to finish before they are refused too.
        """
        with self._stop_lock:
            if self.lifecycle.state in ("stopped", "failed"):
                return
            self.lifecycle.enter("stopping")
            self._stopping.set()
            grace = self.config.shutdown.grace_seconds if grace_seconds is None else grace_seconds
            log.info("stopping pause=%g grace=%g", self.config.shutdown.pause_seconds, grace)
            time.sleep(self.config.shutdown.pause_seconds)
            self._close_admission()
            if self._scheduler is not None:
                self._scheduler.hurry()
            if not self.admission.wait_idle(time.monotonic() + grace):
                log.warning("requests refused after the grace count=%d", self.admission.in_flight)
            self._close()
            self.lifecycle.enter("stopped")
            log.info("stopped")
            observe.beat("down", self.config)
        self.on_stopped()

    def _close(self) -> None:
        """Take down what is up, in the order in which nothing hangs. Also after a bring-up that failed half-way."""
        self._stopping.set()
        self._close_admission()
        if self.pool is not None:
            # First: what is being compiled is waited for.
            self.pool.close()
        if self._live is not None:
            self._live.close()
        if self._warmup is not None:
            self._warmup.stop()
        if self._residency is not None:
            self._residency.close()
        if self._scheduler is not None:
            # Queued requests are refused; the running execution ends and its requests get their answers.
            self._scheduler.stop(0.0)
        if self._residency is not None:
            self._residency.stop()
        self.admission.wait_idle(time.monotonic() + LAST_ANSWERS_SECONDS)
        if self._inference is not None:
            self._inference.reject_all(ServerStopping("the server is stopping and did not get to this request"))
        self.hook_pool.close()
        if self._live is not None:
            self._live.join()
        if self._faces is not None:
            self._faces.close()
        if self._loader is not None:
            self._loader.hooks.close()
        if self.server is not None:
            self.server.stop(LAST_ANSWERS_SECONDS)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        if self._digests is not None:
            self._digests.close()
        if self._hashing is not None:
            # It only reads files, and one file of many gigabytes must not hold the stop up.
            self._hashing.join(1.0)
        if self._loader is not None:
            self._loader.close()
        if self._residency is not None:
            self._residency.free()
        if self.cache is not None:
            self.cache.close()
        if self._device is not None:
            self._device.close()
        if self.shm is not None:
            self.shm.close()
        if self.http_server is not None:
            self.http_server.stop()

    # --- small parts ----------------------------------------------------------------------------------------------

    def _close_admission(self) -> None:
        self.admission.close()
        if self._inference is not None:
            self._inference.reject_waiting(ServerStopping("the server is stopping, and its models take no requests"))

    def _on_entry(self, name: str) -> None:
        """An entry of the registry changed."""
        if self._live is not None:
            self._live.registrations.on_change(name)
        self._on_change()

    def _set_phase(self, phase: str) -> None:
        self.lifecycle.phase = phase
        self._on_change()

    def _on_change(self) -> None:
        if self._faces is not None:
            self._faces.health.notify()
        with self._changed:
            self._changed.notify_all()

    def _lose(self, error: DeviceLost) -> None:
        """The device is gone, on the dispatch thread: whatever comes now can only fail, and only a restart helps."""
        if self._lost is None:
            self._lost = error
            threading.Thread(target=self._refuse_all, args=(error,), name="rsrv-lost", daemon=True).start()

    def _refuse_all(self, error: DeviceLost) -> None:
        log.critical("device lost; no more requests are taken error=%s", error.message)
        self.admission.close()
        if self._inference is not None:
            self._inference.reject_all(error)
        self._on_change()
        self.on_lost(error)

    def _stuck(self) -> str:
        if self._lost is not None:
            return f"the device is lost: {self._lost.message}"
        found = self._scheduler.stuck if self._scheduler is not None else None
        return "" if found is None else str(found)

    def _fail_hooks(self, name: str, incarnation: int, lost: int) -> None:
        error = HookError(f"{lost} hook calls did not return in time (hooks.max_lost: {self.config.hooks.max_lost})")
        self.live.registrations.fail_hooks(incarnation, error)

    def _reap(self) -> None:
        assert self.shm is not None
        period = max(0.1, min(2.0, self.config.shm.reap_seconds / 4))
        while not self._stopping.wait(period):
            try:
                for name in self.shm.reap():
                    log.info("shared memory region dropped name=%s", name)
            except Exception:
                log.exception("shared memory regions could not be looked through")

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name)
        self._threads.append(thread)
        thread.start()
