"""The servers that the handles of this process reach, one `Endpoint` each, counted; with the last one the pools go."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import TypeAlias

import grpc

from rsrv.client.channels import ChannelOptions
from rsrv.client.connection import Connection, Metadata
from rsrv.client.transport import pools
from rsrv.client.transport.endpoint import UNREGISTER_SECONDS, Endpoint
from rsrv.client.transport.reprobe import Reprobe

_Key: TypeAlias = tuple[ChannelOptions, tuple[tuple[str, str | bytes], ...], int | None]


class Endpoints:
    """Endpoints by what distinguishes them: channel options, metadata, and a channel of the caller's. Thread safe."""

    def __init__(self) -> None:
        self.reprobe = Reprobe(self.all)
        self._lock = threading.Lock()
        self._endpoints: dict[_Key, tuple[Endpoint, int]] = {}

    def acquire(self, options: ChannelOptions, metadata: Metadata, channel: grpc.Channel | None) -> Endpoint:
        key = (options, tuple((name, value) for name, value in metadata), None if channel is None else id(channel))
        with self._lock:
            endpoint, users = self._endpoints.get(key) or (self._make(options, metadata, channel), 0)
            self._endpoints[key] = (endpoint, users + 1)
        return endpoint

    def release(self, endpoint: Endpoint) -> None:
        with self._lock:
            key = next((key for key, (known, _) in self._endpoints.items() if known is endpoint), None)
            if key is None:  # closed by client_shutdown
                return
            _, users = self._endpoints[key]
            if users > 1:
                self._endpoints[key] = (endpoint, users - 1)
                return
            del self._endpoints[key]
        endpoint.close()
        pools.sweep()
        with self._lock:  # a new handle must not be lent a pool that is being closed
            if not self._endpoints:
                pools.close()
        self.reprobe.retire_idle()

    def all(self) -> tuple[Endpoint, ...]:
        with self._lock:
            return tuple(endpoint for endpoint, _ in self._endpoints.values())

    def reset(self, interval: float) -> None:
        """Forget all answers and latches; latched endpoints are asked again every `interval` seconds from now on."""
        self.reprobe.retire()
        self.reprobe.interval = interval
        for endpoint in self.all():
            endpoint.reset()

    def close(self) -> None:
        """Say goodbye to all servers, in `UNREGISTER_SECONDS` together, and close all connections and pools."""
        self.reprobe.retire()
        with self._lock:
            endpoints = tuple(endpoint for endpoint, _ in self._endpoints.values())
            self._endpoints.clear()
        until = time.monotonic() + UNREGISTER_SECONDS
        for endpoint in endpoints:
            for region in endpoint.close(until):
                region.unlink()
        pools.close()

    def _make(self, options: ChannelOptions, metadata: Metadata, channel: grpc.Channel | None) -> Endpoint:
        _close_at_exit_of_a_worker()
        return Endpoint(Connection(options, metadata, channel), self.reprobe.start, lambda: self.reprobe.interval)


of_this_process = Endpoints()


def acquire(options: ChannelOptions, metadata: Metadata = (), channel: grpc.Channel | None = None) -> Endpoint:
    """The endpoint of this process for these options; pair with `release`. Nothing is sent."""
    return of_this_process.acquire(options, metadata, channel)


def release(endpoint: Endpoint) -> None:
    """Give an endpoint back. The last user unregisters what was registered, for at most 5 s, and hangs up."""
    of_this_process.release(endpoint)


def close() -> None:
    """Close all endpoints and pools of this process; handles to them are closed with them. Idempotent."""
    of_this_process.close()


def _forget_parent() -> None:
    """A forked child reaches every server anew; what it inherited stays its parent's."""
    global of_this_process, _exits_with_finalizers
    interval = of_this_process.reprobe.interval
    of_this_process = Endpoints()
    of_this_process.reprobe.interval = interval
    _exits_with_finalizers = False


_exits_with_finalizers = False


def _close_at_exit_of_a_worker() -> None:
    """Children of multiprocessing end without the interpreter's exit handlers, but with handlers of their own."""
    global _exits_with_finalizers
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _exits_with_finalizers:
        _exits_with_finalizers = True
        util.Finalize(None, close, exitpriority=0)


atexit.register(close)
os.register_at_fork(after_in_child=_forget_parent)
