"""`serve_gateway`: from a configuration to a gateway that runs until somebody stops it, signals included."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rsrv.core.config.gateway import GatewayConfig
from rsrv.core.config.gateway_file import ResolvedGateway, load_gateway, resolve_gateway
from rsrv.core.memory import tune_malloc
from rsrv.core.process import SWITCH_SECONDS, Ends, first_end, raise_file_limit, signals_into
from rsrv.gateway.gateway import GRACE_SECONDS, RunningGateway

log = logging.getLogger(__name__)


def serve_gateway(
    config: GatewayConfig | ResolvedGateway | str | Path,
    *,
    blocking: bool = True,
    on_listening: Callable[[RunningGateway], None] | None = None,
) -> RunningGateway:
    """Run a gateway.

    Args:
        config: a configuration, or the path of a gateway's file, to which environment variables are applied.
        blocking: return when the gateway has stopped; SIGTERM and SIGINT stop it gracefully when this is the main
            thread, and a second signal ends the process. When false, return as soon as it serves and install no signal
            handlers; end it with `RunningGateway.stop`.
        on_listening: called once it serves; on a thread of its own when blocking.

    Raises ConfigError, PortTaken, and NoWorkers when the workers that it needs do not answer, at the start or, where
    only another process can help, later.
    """
    tune_malloc()
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_file_limit()
    resolved = _resolve(config)
    if blocking:
        ends = Ends()
        with signals_into(ends):
            gateway = RunningGateway(resolved)
            _run(gateway, ends, on_listening)
        return gateway
    gateway = RunningGateway(resolved)
    try:
        gateway.open()
        gateway.start()
        if on_listening is not None:
            on_listening(gateway)
    except BaseException:
        gateway.stop(0.0)
        raise
    return gateway


def _resolve(config: GatewayConfig | ResolvedGateway | str | Path) -> GatewayConfig:
    if isinstance(config, GatewayConfig):
        return config
    return (config if isinstance(config, ResolvedGateway) else resolve_gateway(load_gateway(config))).config


def _run(gateway: RunningGateway, ends: Ends, on_listening: Callable[[RunningGateway], None] | None) -> None:
    """Bring the gateway up, wait for what ends it, and stop it."""

    def bring_up() -> None:
        try:
            gateway.start()
            if on_listening is not None:
                on_listening(gateway)
        except BaseException as error:
            ends.put(error)

    gateway.on_stopped = lambda: ends.put(None)
    gateway.on_lost = ends.put
    starting = threading.Thread(target=bring_up, name="rsrv-gateway-start")
    grace, end = GRACE_SECONDS, None
    try:
        gateway.open()
        starting.start()
        end = first_end(ends, on_hangup=lambda: log.info("signal received signal=SIGHUP nothing to do"))
        if isinstance(end, int):
            log.info("signal received signal=%s", signal.Signals(end).name)
        elif end is not None:
            grace = 0.0  # what is left has nobody to wait for
    finally:
        gateway.stop(grace)
        if starting.ident is not None:
            starting.join()
    if isinstance(end, BaseException):
        raise end
