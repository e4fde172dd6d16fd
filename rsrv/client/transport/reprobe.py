"""The background task that tries shared memory again with servers for which it was given up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from rsrv.client.transport.endpoint import Endpoint
from rsrv.client.transport.probe import sees_our_memory
from rsrv.core.errors import RsrvError

log = logging.getLogger(__name__)

DEFAULT_INTERVAL = 60.0
_PROBE_SECONDS = 3.0
_SLICE_SECONDS = 0.5


class Reprobe:
    """One daemon thread while endpoints are latched: every `interval` seconds it asks each of them once.

    Nobody ever waits for it: a thread that is retired does nothing more when it comes back from a slow server.

    Args:
        endpoints: those of this process.
        interval: seconds; 0 or less for never.
        clock: seconds, monotonic.
        sleep: waits for an event, at most so many seconds.
    """

    def __init__(
        self,
        endpoints: Callable[[], Iterable[Endpoint]],
        *,
        interval: float = DEFAULT_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self.interval = interval
        self._endpoints = endpoints
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._running = False
        self._retired = threading.Event()  # of the task that runs, or of the next

    def start(self) -> None:
        """Make sure that the task runs. Called after an endpoint was latched."""
        with self._lock:
            if self._running or self.interval <= 0 or not self._needed():
                return
            self._running = True
            retired = self._retired
        threading.Thread(target=self._run, args=(retired,), name="rsrv-reprobe", daemon=True).start()

    def retire(self) -> None:
        """End the task, without waiting: it notices at once, or after the probe that it is in."""
        with self._lock:
            self._end()

    def retire_idle(self) -> None:
        """End the task if no endpoint is latched any more."""
        with self._lock:
            if self._running and not self._needed():
                self._end()

    def _end(self) -> None:
        self._running = False
        self._retired.set()
        self._retired = threading.Event()

    def _needed(self) -> bool:
        return any(endpoint.latched for endpoint in self._endpoints())

    def _run(self, retired: threading.Event) -> None:
        while self._wait(retired):
            self.probe_latched(lambda: not retired.is_set())
            with self._lock:
                if retired.is_set():
                    return
                if not self._needed():
                    self._running = False
                    return

    def _wait(self, retired: threading.Event) -> bool:
        end = self._clock() + self.interval
        while not retired.is_set():
            left = end - self._clock()
            if left <= 0:
                return True
            self._sleep(retired, min(left, _SLICE_SECONDS))
        return False

    def probe_latched(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Ask each latched endpoint once, as long as that is `wanted`; those that see our memory are unlatched.

        All that an endpoint was told of is registered afresh before.
        """
        for endpoint in self._endpoints():
            if not endpoint.latched or not wanted():
                continue
            try:
                same = sees_our_memory(endpoint.connection, _PROBE_SECONDS)
                if same and wanted():
                    endpoint.renew_all(_PROBE_SECONDS)
                    endpoint.unlatch()
                else:
                    log.debug("target=%s event=still_without_shm same=%s", endpoint.target, same)
            except RsrvError as error:
                log.debug("target=%s event=still_without_shm %s", endpoint.target, error)
