"""`RunningGateway`: makes the parts of a gateway, connects them, and brings them up and down in the right order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from rsrv.core.config.gateway import GatewayConfig
from rsrv.core.errors import NoWorkers, RsrvError, ServerStopping
from rsrv.gateway.admin.compaction import CompactionCalls
from rsrv.gateway.admin.scheduling_control import ControlGate, SchedulingControl
from rsrv.gateway.admin.state import StateFile
from rsrv.gateway.admin.workers_control import WorkersControl
from rsrv.gateway.discovery.membership import Membership, sources_of
from rsrv.gateway.discovery.prober import Prober, Proceed
from rsrv.gateway.discovery.refresh import Refresher
from rsrv.gateway.discovery.startup import ROUND_SECONDS, wait_for_workers
from rsrv.gateway.faces.http import http_routes
from rsrv.gateway.faces.overview import overview
from rsrv.gateway.faces.services import GatewayServices
from rsrv.gateway.methods import CONTROL, GATEWAY_CONTROL, INFER, INFERENCE
from rsrv.gateway.metrics.counters import GatewayCounters
from rsrv.gateway.metrics.exposition import GatewayMetrics
from rsrv.gateway.metrics.scrape import WorkerScrape
from rsrv.gateway.routing.admission import Admission
from rsrv.gateway.routing.proxy import Proxy
from rsrv.gateway.routing.retries import RetryBudget
from rsrv.gateway.routing.router import Router
from rsrv.gateway.routing.standing import Standing
from rsrv.gateway.scheduling.knobs import Knobs
from rsrv.gateway.scheduling.modes import Mode, log_notes
from rsrv.gateway.scheduling.packing import LptPacking
from rsrv.gateway.scheduling.simple import LeastOutstanding, RoundRobin
from rsrv.gateway.shm.shared_memory import SharedMemory
from rsrv.gateway.timers import Timers
from rsrv.gateway.workers.attendance import Attendance
from rsrv.gateway.workers.channels import ChannelSettings
from rsrv.gateway.workers.fleet import Endpoint, Fleet
from rsrv.gateway.workers.hops import GATEWAY_KEY, Hops
from rsrv.gateway.workers.poll import Poll
from rsrv.gateway.workers.worker import Worker
from rsrv.rpc import health
from rsrv.rpc.call import Call
from rsrv.rpc.grpcio_engine import GrpcioEngine
from rsrv.rpc.http import HttpListener
from rsrv.rpc.listen import is_loopback, open_sockets
from rsrv.rpc.reflection import reflection_routes
from rsrv.rpc.routes import Route, Routes

GRACE_SECONDS = 8.0
WELCOME_SECONDS = 2.0
"""How long a start waits until the workers that answered know what they have to."""
SPARE_THREADS = 32
"""Threads beyond those for the requests of all workers: health, control and shared memory are answered when it is
full."""

log = logging.getLogger(__name__)


class RunningGateway:
    """One gateway. `open`, then `start`, then `stop`; ``serve_gateway`` does that.

    Attributes:
        grpc_port, http_port: the ports in use; None for HTTP without a listener, and before they are known.
        on_lost: called, on any thread, when only another process can help; who runs the gateway then stops it.
        on_stopped: called when it has stopped, whoever stopped it.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """Connects to nobody yet. Raises ConfigError when a file that the configuration names does not hold."""
        self.config = config
        self.grpc_port: int | None = None
        self.http_port: int | None = None
        self.on_lost: Callable[[RsrvError], object] = lambda error: None
        self.on_stopped: Callable[[], object] = lambda: None
        self._serving = False
        self._stopping = threading.Event()
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._arrivals_lock = threading.Lock()
        self._arrivals: list[tuple[Worker, Proceed]] | None = []
        self._engine: GrpcioEngine | None = None
        self._http: HttpListener | None = None
        self._state = StateFile(config.state_file) if config.state_file is not None else None
        self._sources = sources_of(config)
        self._configured = Knobs.from_config(config.scheduling)
        self.mode = self._make_mode()
        self._packing = self.mode if isinstance(self.mode, LptPacking) else None
        self.timers = Timers()
        try:
            self._make()
        except BaseException:
            self.timers.close()
            raise

    # --- parts ------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        config, timeout = self.config, float(self.config.worker_client.request_timeout_seconds)
        self.counters = GatewayCounters()
        self._hops = Hops()
        self._settings = ChannelSettings(config.grpc.max_send_msg_bytes, config.grpc.max_recv_msg_bytes, self._hops)
        self.fleet = Fleet(self._connect)
        self.router = Router(self.mode, Standing(config.outliers, time.monotonic))
        self.retries = RetryBudget(config.retries, time.monotonic)
        self.admission = Admission(config.grpc.max_concurrent_requests_per_worker, lambda: len(self.fleet.ready))
        self.refresher = Refresher(self.fleet, self.router, self.timers)
        self.shared_memory = SharedMemory(self.fleet, self.counters, timeout=timeout)
        # First of those that follow the fleet: the standing of a worker is settled before others hear of it.
        self._attendance = Attendance(self.fleet, self.router, self._noticed, self.counters.forget)
        self.prober = Prober(
            self.fleet,
            self.router,
            self.timers,
            self.refresher,
            interval_seconds=config.health_interval_seconds,
            wedge_exit_rounds=config.wedge_exit_rounds,
            on_returned=self._returned,
            on_wedged=self._wedged,
        )
        self.compaction = CompactionCalls(self.fleet, self.timers, self.counters, timeout=timeout)
        self.services = GatewayServices(
            self.fleet, self.router, self.counters, self.refresher, ready=self.is_ready, timeout=timeout
        )
        self.membership = Membership(
            self.fleet,
            self.timers,
            self._sources,
            drain_seconds=config.membership.drain_seconds,
            added=self._state.added if self._state is not None else (),
            drained=self._state.drained if self._state is not None else (),
            keep=self._state.save_workers if self._state is not None else None,
        )
        self.proxy = Proxy(
            fleet=self.fleet,
            router=self.router,
            admission=self.admission,
            counters=self.counters,
            retries=self.retries,
            refresh=self.refresher,
            regions=self.shared_memory,
            timers=self.timers,
            timeout_ns=int(timeout * 1e9),
            hedge_ns=int((config.retries.hedge_after_seconds or 0.0) * 1e9),
            spreads=self.mode.spreads,
            hops=self._hops,
            on_lost=self.prober.suspect,
        )
        if self._packing is not None:
            self._packing.wake = self.prober.wake
            self._packing.compact = self.compaction.after_repack
        scrape = WorkerScrape(
            lambda: self.fleet.workers,
            total_seconds=config.scrape.total_seconds,
            retry_after_seconds=config.scrape.retry_after_seconds,
        )
        self.metrics = GatewayMetrics(
            self.fleet, self.router, self.counters, scrape, admission=self.admission, retries=self.retries
        )
        self.fleet.on_change += [self._members_changed, self.services.changed]
        self.router.on_install.append(self.services.changed)

    def _make_mode(self) -> Mode:
        scheduling = self.config.scheduling
        if scheduling.mode == "lpt_packing":
            knobs = self._state.restore(self._configured) if self._state is not None else self._configured
            return LptPacking(knobs)
        if scheduling.mode == "least_outstanding":
            return LeastOutstanding(scheduling.work_basis, halflife=scheduling.ema_halflife)
        return RoundRobin()

    def _connect(self, endpoint: Endpoint) -> Worker:
        return Worker(
            endpoint.url,
            endpoint.name,
            metrics=endpoint.metrics,
            source=endpoint.source,
            settings=self._settings,
            streams=self.config.worker_client.max_concurrent_streams,
            timers=self.timers,
            counters=self.counters,
        )

    def _grpc_routes(self) -> Routes:
        gate = ControlGate(self.config.control, self.config.listen.grpc_address.host)
        state = self._state
        keep = (lambda knobs: state.save_knobs(knobs, self._configured)) if state is not None else None
        scheduling = SchedulingControl(self.router, self.fleet, self.timers, gate, keep=keep)
        asks_workers = {
            **self.services.routes(),
            **self.shared_memory.routes(),
            **self.compaction.routes(),
        }
        return {
            **{path: Route(self._in_no_circle(route.handler), route.kind) for path, route in asks_workers.items()},
            INFER: Route(self.proxy.handle),
            **scheduling.routes(),
            **WorkersControl(self.membership, self.fleet, self.router, gate).routes(),
            **reflection_routes([INFERENCE, health.SERVICE, CONTROL, GATEWAY_CONTROL]),
        }

    def _in_no_circle(self, handler: Callable[[Call], None]) -> Callable[[Call], None]:
        """`handler`, but not for calls that were here before: each would become further ones, of which each does
        again."""

        def handle(call: Call) -> None:
            passed = call.metadata.get(GATEWAY_KEY)
            if passed is not None:
                self._hops.after(passed)  # raises GatewayLoop
            handler(call)

        return handle

    # --- bring-up ---------------------------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether clients should come: it answers, a worker is ready, and nobody has told it to stop."""
        return self._serving and not self._stopping.is_set() and bool(self.fleet.ready)

    def open(self) -> None:
        """Answer over HTTP: alive, not ready. Raises PortTaken when a port is taken, ConfigError when it is no good."""
        where, http = self.config.listen.grpc_address, self.config.listen.http_address
        if self._state is not None:
            self._state.own()
        if where.port:  # it is bound when there is something to answer with, but one that is taken is known at once
            for listener in open_sockets(where.host, where.port, what="gRPC"):
                listener.close()
        if http is not None:
            routes = http_routes(self.metrics, ready=self.is_ready, overview=self._overview, host=http.host)
            self._http = HttpListener(http.host, http.port, routes)
            self.http_port = self._http.bind()
            self._http.start()

    def start(self, *, round_seconds: float = ROUND_SECONDS) -> None:
        """Find the workers, place models if that is the mode, look at all workers once, and serve.

        Raises NoWorkers when fewer answer than `lpt_packing` begins with, PortTaken, and ServerStopping when it is
        stopped meanwhile. After any of these `stop` takes down what is up.
        """
        for text in self.config.warnings:
            log.warning("%s", text)
        self.membership.start()
        reported = self._wait(round_seconds) if self._packing is not None else None
        self._look_once()
        self._require_running()
        if self._packing is not None and reported is not None:
            self._place(self._packing, reported)
        if isinstance(self.mode, RoundRobin):
            log.info("mode=%s", self.mode.name)
        else:
            log.info("mode=%s work_basis=%s", self.mode.name, self.config.scheduling.work_basis)
        self.prober.start()
        self._listen()

    def _wait(self, round_seconds: float) -> Poll:
        return wait_for_workers(
            self.fleet,
            self.timers,
            least=self.config.lpt_min_workers,
            limit=self.config.startup.limit,
            stopping=self._stopping,
            round_seconds=round_seconds,
        )

    def _look_once(self) -> None:
        """Discovery before anything is served. Workers are let in together at its end: otherwise the mode would place
        models on the first of them alone, and again only half a minute later."""
        try:
            self.prober.round()
        except Exception:
            log.exception("the first look at the workers failed; the next one comes by itself")
        with self._arrivals_lock:
            arrivals, self._arrivals = self._arrivals or [], None
        welcomed = threading.Semaphore(0)

        def let_in(proceed: Proceed) -> None:
            proceed()
            welcomed.release()

        for worker, proceed in arrivals:
            self.shared_memory.welcome(worker, partial(let_in, proceed))
        ends = time.monotonic() + WELCOME_SECONDS
        for _ in arrivals:
            welcomed.acquire(timeout=max(0.0, ends - time.monotonic()))

    def _returned(self, worker: Worker, proceed: Proceed) -> None:
        with self._arrivals_lock:
            if self._arrivals is not None:
                self._arrivals.append((worker, proceed))
                return
        self.shared_memory.welcome(worker, proceed)

    def _place(self, mode: LptPacking, reported: Poll) -> None:
        """The first placement, on the workers that have reported."""
        with self.router.lock:
            mode.start(reported.polled, reported, time.monotonic())
            notes = mode.take_notes()
        log_notes(log, notes)

    def _listen(self) -> None:
        where, listen, limits = self.config.listen.grpc_address, self.config.listen, self.config.grpc
        engine = GrpcioEngine(
            self._grpc_routes(),
            host=where.host,
            port=where.port,
            threads=self._threads(),
            max_recv_bytes=limits.max_recv_msg_bytes,
            max_send_bytes=limits.max_send_msg_bytes,
            max_connection_age_seconds=listen.max_connection_age_seconds,
            max_connection_age_grace_seconds=listen.max_connection_age_grace_seconds,
        )
        with self._stop_lock:
            self._require_running()
            self.grpc_port = engine.bind()
            self._engine = engine
            engine.start()
            self._serving = True
        self._members_changed()
        self.services.changed()
        http = self.config.listen.http_address
        log.info(
            "gateway serves grpc=%s:%d http=%s workers=%s requests_per_worker=%d streams_per_worker=%d",
            where.host,
            self.grpc_port,
            f"{http.host}:{self.http_port}" if http is not None else "off",
            ",".join(worker.url for worker in self.fleet.workers) or "none",
            limits.max_concurrent_requests_per_worker,
            self.config.worker_client.max_concurrent_streams,
        )
        if not is_loopback(where.host) and self.config.control:
            log.warning("whoever reaches %s may change this gateway: control is true", self.config.listen.grpc)
        if http is not None and not is_loopback(http.host):
            log.warning(
                "whoever reaches %s reads its metrics and the addresses of its workers", self.config.listen.http
            )

    def _require_running(self) -> None:
        if self._stopping.is_set():
            raise ServerStopping("the gateway was stopped while it started")

    # --- stop -------------------------------------------------------------------------------------------------------

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Stop gracefully; idempotent, a second caller waits for the first.

        Ready turns false; for `lame_duck_seconds` requests are still accepted; then new ones are refused and those in
        progress have `grace` seconds to finish before they are cancelled.
        """
        self._stopping.set()
        with self._stop_lock:
            if self._stopped:
                return
            engine = self._engine
            if engine is not None:
                self.services.changed()
                log.info("stopping lame_duck=%g grace=%g", self.config.lame_duck_seconds, grace)
                time.sleep(self.config.lame_duck_seconds)
                engine.stop(grace)
            self._serving = False
            self.membership.stop()
            self.prober.stop()
            self._attendance.close()
            self.fleet.close()
            self.timers.close()
            if self._http is not None:
                self._http.stop()
            if self._state is not None:
                self._state.disown()
            self._stopped = True
            log.info("stopped")
        self.on_stopped()

    # --- small parts ------------------------------------------------------------------------------------------------

    def _overview(self) -> dict[str, object]:
        return overview(
            self.fleet,
            self.router,
            self.counters,
            admission=self.admission,
            retries=self.retries,
            ready=self.is_ready(),
        )

    def _threads(self) -> int:
        workers = max(len(self.fleet.workers), 1)
        return self.config.grpc.max_concurrent_requests_per_worker * workers + SPARE_THREADS

    def _members_changed(self) -> None:
        """An open request holds a thread of the engine, and each worker that joins raises how many may be open."""
        if self._engine is not None:
            self._engine.threads.grow(self._threads())

    def _noticed(self) -> None:
        if not self._stopping.is_set():
            self.prober.wake()

    def _wedged(self) -> None:
        self.on_lost(
            NoWorkers(
                f"every worker hung in {self.config.wedge_exit_rounds} rounds of looking at them, also on new "
                "connections",
                hint="the process ends so that its supervisor starts it anew; wedge_exit_rounds: 0 keeps it",
            )
        )
