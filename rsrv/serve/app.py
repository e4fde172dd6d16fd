"""`serve`: from a configuration to a server that runs until somebody stops it, signals included."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.core.config import ResolvedConfig, ServerConfig, load_node, resolve, worker_name
from rsrv.core.memory import tune_malloc
from rsrv.core.process import SWITCH_SECONDS, Ends, first_end, raise_file_limit, signals_into
from rsrv.rpc.listen import open_sockets
from rsrv.serve import observe

if TYPE_CHECKING:
    from rsrv.core.config import EndpointsConfig
    from rsrv.serve.worker import RunningServer

log = logging.getLogger(__name__)


def serve(
    config: ServerConfig | ResolvedConfig | str | Path,
    *,
    worker: str | None = None,
    blocking: bool = True,
    on_listening: Callable[[RunningServer], None] | None = None,
) -> RunningServer:
    """Serve the bundles of one worker.

    Args:
        config: a resolved configuration, or the path of a node file; environment variables are applied to a node file.
        worker: which worker of the node file; may be None when there is one only, or when RSRV_WORKER_NAME says it.
        blocking: return when the server has stopped; SIGTERM and SIGINT stop it gracefully when this is the main
            thread, and a second signal ends the process. When false, return as soon as every model is ready or failed
            and install no signal handlers; end it with `RunningServer.stop`.
        on_listening: called once both ports answer, before any bundle is opened.

    Raises ConfigError, PortTaken, DeviceError (DeviceLost when the device goes while it serves), or whatever a serve
    guard raises. A model that fails raises nothing.
    """
    tune_malloc()
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_file_limit()
    resolved = _resolve(config, worker)
    observe.check_guards(resolved.config)
    # The worker takes a second to import and its device more to come up, and a taken port has to be found at once. The
    # ports are bound for good, and checked again, when there is something that answers on them.
    _require_free_ports(resolved.config.endpoints)
    if blocking:
        ends = Ends()
        with signals_into(ends):
            server = _server(resolved)
            _run(server, ends, on_listening)
        return server
    server = _server(resolved)
    server.open()
    try:
        if on_listening is not None:
            on_listening(server)
        server.load()
    except BaseException:
        server.stop(0.0)
        raise
    return server


def serve_worker(node_file: str | Path, worker: str, *, blocking: bool = True) -> RunningServer:
    """`serve` for one named worker of a node file."""
    return serve(node_file, worker=worker, blocking=blocking)


def _resolve(config: ServerConfig | ResolvedConfig | str | Path, worker: str | None) -> ResolvedConfig:
    if isinstance(config, ResolvedConfig):
        return config
    if isinstance(config, ServerConfig):
        return ResolvedConfig(config, {}, [], worker)
    return resolve(load_node(config).worker(worker or worker_name()))


def _require_free_ports(endpoints: EndpointsConfig) -> None:
    """Raises PortTaken when somebody listens there already; nothing stays bound."""
    for what, port in (("gRPC", endpoints.grpc_port), ("HTTP", endpoints.http_port)):
        if port:
            for listener in open_sockets(endpoints.host, port, what=what):
                listener.close()


def _server(resolved: ResolvedConfig) -> RunningServer:
    from rsrv.serve.worker import RunningServer

    return RunningServer(resolved.config, worker=resolved.worker, workers_on_node=resolved.workers_on_node)


def _run(server: RunningServer, ends: Ends, on_listening: Callable[[RunningServer], None] | None) -> None:
    """Bring the server up, wait for what ends it, and stop it."""

    def bring_up() -> None:
        try:
            server.load()
        except BaseException as error:
            ends.put(error)

    server.open()
    server.on_stopped = lambda: ends.put(None)
    server.on_lost = ends.put
    try:
        if on_listening is not None:
            on_listening(server)
        server.start_loading(bring_up)
        end = first_end(ends, on_hangup=lambda: _look_at_repository(server))
        if isinstance(end, int):
            log.info("signal received signal=%s", signal.Signals(end).name)
    finally:
        server.stop()
    if isinstance(end, BaseException):
        raise end


def _look_at_repository(server: RunningServer) -> None:
    watcher = server.live.watcher
    if watcher is None:
        mode = server.config.model_control_mode
        log.info("signal received signal=SIGHUP nothing to do: models follow no directories control_mode=%s", mode)
        return
    log.info("signal received signal=SIGHUP the model directories are looked through")
    watcher.request_poll()
