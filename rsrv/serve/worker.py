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
from rsrv.core.errors import HookError, ServerStopping
from rsrv.core.shm import RegionRegistry
from rsrv.rpc import health
from rsrv.rpc.grpcio_engine import GrpcioEngine
from rsrv.rpc.health import HealthService
from rsrv.rpc.http import HttpListener, HttpRoutes
from rsrv.rpc.reflection import reflection_routes
from rsrv.rpc.routes import Route, Routes
from rsrv.runtime import CompileOptions, CompilePool, ExecutableCache, open_cache, open_device
from rsrv.runtime.backends import cuda_plugin_installed
from rsrv.runtime.fingerprint import fingerprint
from rsrv.runtime.options import compile_options
from rsrv.runtime.probe import require_usable_flags, require_usable_options
from rsrv.serve import control, observe
from rsrv.serve.control import ControlService
from rsrv.serve.counters import ServerCounters
from rsrv.serve.hook_pool import HookPool
from rsrv.serve.http import http_routes
from rsrv.serve.inference import Admission, Inference
from rsrv.serve.lifecycle import Lifecycle, Readiness
from rsrv.serve.loading import DigestWatch, Loader, LoadProgress, ProgramSource, Warmup
from rsrv.serve.loading.steps import Steps
from rsrv.serve.metrics import WorkerMetrics, gpu_label
from rsrv.serve.numerics import ServerNumerics, numerics_for, prepare_environment, probe
from rsrv.serve.registry import Registry
from rsrv.serve.residency.probe import probe_scratch
from rsrv.serve.residency.setup import open_residency
from rsrv.serve.residency.times import LoadTimes
from rsrv.serve.residency.view import residency_mode
from rsrv.serve.scheduler import Policy, Scheduler
from rsrv.serve.services import SERVICE, Services
from rsrv.serve.sources import Sources
from rsrv.serve.status import StatusReport

if TYPE_CHECKING:
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
        self.admission = Admission(config.endpoints.max_concurrent_requests)
        self.hook_pool = HookPool(hook_pool_size(os.environ, workers=workers_on_node))
        self.shm: RegionRegistry | None = None
        self.grpc_port = 0
        self.http_port: int | None = None
        self.pool: CompilePool | None = None
        self.cache: ExecutableCache | None = None
        self.numerics = ServerNumerics()
        self._options = CompileOptions()
        self._warmup: Warmup | None = None
        self._pool_platform = ""
        self._device: Device | None = None
        self._scheduler: Scheduler | None = None
        self.server: GrpcioEngine | None = None
        self.http_server: HttpListener | None = None
        self._health: HealthService | None = None
        self._residency: Residency | None = None
        self._load_times = LoadTimes()
        self._control: ControlService | None = None
        self._inference: Inference | None = None
        self._loader: Loader | None = None
        self.on_stopped: Callable[[], None] = lambda: None
        self._threads: list[threading.Thread] = []
        self._digests: threading.Thread | None = None
        self._stopping = threading.Event()
        self._stop_lock = threading.Lock()
        self._changed = threading.Condition()
        self.registry.on_change = self.lifecycle.on_change = self._on_change

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
        self.pool = self._open_pool(expected_platform(config.runtime.backend))
        require_usable_flags(self.pool)
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
        if self._device.platform != self._pool_platform:
            # CUDA was expected and the CPU came.
            self.pool.close()
            self.pool = self._open_pool(self._device.platform)
        self.numerics = numerics_for(config.runtime.numerics, self._device)
        self._open_cache(self._device)
        if self._device.platform == "cuda":
            self.numerics = probe(self.numerics, self._device, self._program_source(LoadProgress()))
        self._scheduler = Scheduler(self._device, Policy.of(config))
        self._residency = open_residency(self._device, self._scheduler, config, on_load=self._load_times.record)
        self._residency.start()
        self._scheduler.on_stuck(self._on_change)
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
        self._listen()
        if self.shm is not None:
            self._spawn("rsrv-reaper", self._reap)

    def _open_cache(self, device: Device) -> None:
        """The cache, when there is to be one, and options that XLA takes."""
        assert self.pool is not None
        runtime = self.config.runtime
        self._options = compile_options(
            runtime.xla_options,
            platform=device.platform,
            autotune=runtime.autotune,
            autotune_cache=runtime.autotune_cache,
            autotune_cache_dir=runtime.autotune_cache_dir,
        )
        if self.config.cache_dir:
            self.cache = open_cache(self.config.cache_dir, fingerprint(device), self.config.cache_max_bytes)
        if self.cache is None or self.cache.empty:
            self.pool.wake()
        require_usable_options(self.pool, self._options, self.cache)

    def _open_pool(self, platform: str) -> CompilePool:
        runtime = self.config.runtime
        self._pool_platform = platform
        return CompilePool(
            workers=runtime.compile_workers,
            timeout_seconds=runtime.compile_timeout_seconds,
            memory_bytes=runtime.compile_memory_bytes,
            platform=platform,
            cpu_threads=runtime.cpu_threads,
            ordinal=runtime.device_ordinal,
            awake=not self.config.cache_dir,
        )

    def _program_source(self, progress: LoadProgress) -> ProgramSource:
        assert self.pool is not None
        return ProgramSource(
            device=self.device,
            pool=self.pool,
            cache=self.cache,
            options=self._options,
            progress=progress,
            require_running=Steps(self._stopping).require_running,
        )

    def _listen(self) -> None:
        config = self.config
        endpoints = config.endpoints
        self.server = GrpcioEngine(
            self._routes(),
            host=endpoints.host,
            port=endpoints.grpc_port,
            threads=endpoints.max_concurrent_requests + SPARE_THREADS,
            max_recv_bytes=config.grpc.max_recv_msg_bytes,
            max_send_bytes=config.grpc.max_send_msg_bytes,
        )
        self.grpc_port = self.server.bind()
        if endpoints.http_port is not None:
            self.http_server = HttpListener(endpoints.host, endpoints.http_port, self._http_routes())
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

    def _routes(self) -> Routes:
        services = Services(
            registry=self.registry,
            lifecycle=self.lifecycle,
            scheduler=self.scheduler,
            counters=self.counters,
            regions=self.shm,
            residency=self._residency,
        )
        self._control = ControlService(
            registry=self.registry,
            lifecycle=self.lifecycle,
            scheduler=self.scheduler,
            residency=self._residency,
            on_moved=self._on_change,
        )
        self._inference = Inference(
            registry=self.registry,
            scheduler=self.scheduler,
            hook_pool=self.hook_pool,
            counters=self.counters,
            admission=self.admission,
            regions=self.shm,
            max_lost=self.config.hooks.max_lost,
            on_hooks_lost=self._fail_hooks,
        )
        self._health = HealthService(services.is_serving)
        return {
            **services.routes(),
            f"/{SERVICE}/ModelInfer": Route(self._inference.handle, "unary"),
            **self._health.routes(),
            **self._control.routes(),
            **reflection_routes([SERVICE, health.SERVICE, control.SERVICE]),
        }

    def _http_routes(self) -> HttpRoutes:
        config, platform = self.config, self.device.platform
        sources = Sources(
            registry=self.registry,
            lifecycle=self.lifecycle,
            scheduler=self.scheduler,
            counters=self.counters,
            admission=self.admission,
            hook_pool=self.hook_pool,
            hook_processes_lost=lambda: self._loader.hooks.processes_lost if self._loader is not None else 0,
            regions=self.shm,
            device=self.device,
            programs=lambda: self.progress.counts,
            cache=self.cache,
            residency=self._residency,
            load_times=self._load_times,
        )
        ordinal = config.runtime.device_ordinal
        metrics = WorkerMetrics(
            sources,
            info={
                "device_ordinal": str(ordinal),
                "platform": platform,
                "control_mode": config.model_control_mode,
                "discipline": config.scheduler.discipline,
                "residency_mode": residency_mode(self._residency),
            },
            constant_labels={"worker": self.worker or "", "gpu": gpu_label(platform, ordinal)},
            triton_compat=config.metrics.triton_compat,
        )
        status = StatusReport(sources, config, worker=self.worker, numerics=self.numerics)
        return http_routes(self.lifecycle, metrics, status)

    def load(self) -> None:
        """Discover and prepare the bundles; returns when each is ready or failed, or when the server stops."""
        source = self._program_source(self.progress)
        self._warmup = Warmup(self.scheduler, self.device, enabled=self.config.scheduler.discipline != "fifo")
        self._loader = Loader(
            config=self.config,
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
        )
        self._loader.load_all()
        self._probe_scratch(self._warmup)
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
        self._spawn("rsrv-warmup", self._warmup.run)
        if self.config.bundles.digests == "programs":
            self._digests = threading.Thread(
                target=DigestWatch(self.registry, self._stopping, allow_unhooked=self.config.allow_unhooked).run,
                name="rsrv-digests",
                daemon=True,
            )
            self._digests.start()

    def _probe_scratch(self, warmup: Warmup) -> None:
        if self.config.runtime.scratch_source == "compiled":
            return
        ready = [entry.prepared.model for entry in self.registry.entries() if entry.prepared is not None]
        with contextlib.suppress(ServerStopping):
            probe_scratch(self.device, self.residency, ready, warmup.measure, self._stopping.is_set)

    def start_loading(self) -> None:
        """`load` on a thread of its own."""
        self._spawn("rsrv-bring-up", self.load)

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
            self.admission.close()
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
        self.admission.close()
        if self._warmup is not None:
            self._warmup.stop()
        if self._residency is not None:
            self._residency.close()
        if self.pool is not None:
            self.pool.close()
        if self._scheduler is not None:
            # Queued requests are refused; the running execution ends and its requests get their answers.
            self._scheduler.stop(0.0)
        if self._residency is not None:
            self._residency.stop()
        self.admission.wait_idle(time.monotonic() + LAST_ANSWERS_SECONDS)
        if self._inference is not None:
            self._inference.reject_all(ServerStopping("the server is stopping and did not get to this request"))
        self.hook_pool.close()
        if self._control is not None:
            self._control.close()
        if self._loader is not None:
            self._loader.hooks.close()
        if self.server is not None:
            self.server.stop(LAST_ANSWERS_SECONDS)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        if self._digests is not None:
            # It only reads files, and one file of many gigabytes must not hold the stop up.
            self._digests.join(1.0)
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

    def _set_phase(self, phase: str) -> None:
        self.lifecycle.phase = phase
        self._on_change()

    def _on_change(self) -> None:
        if self._health is not None:
            self._health.notify()
        with self._changed:
            self._changed.notify_all()

    def _stuck(self) -> str:
        found = self._scheduler.stuck if self._scheduler is not None else None
        return "" if found is None else str(found)

    def _fail_hooks(self, name: str, lost: int) -> None:
        error = HookError(f"{lost} hook calls did not return in time (hooks.max_lost: {self.config.hooks.max_lost})")
        log.error("model failed name=%s phase=hooks error=%s", name, error.message)
        self.registry.set_failed(name, "hooks", error)

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


def expected_platform(backend: str) -> str:
    """Which platform `open_device` will give, unless CUDA turns out not to work."""
    if backend == "auto":
        return "cuda" if cuda_plugin_installed() else "cpu"
    return backend
