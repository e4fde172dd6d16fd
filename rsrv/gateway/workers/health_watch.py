"""Hearing at once of a worker that stops, dies or comes back, between two rounds of the prober.

A ``grpc.health.v1`` Watch is open to each worker. It also keeps grpcio's thread for callbacks of that channel alive,
which would start anew for every call that finds the channel idle, and costs a fifth of a millisecond each time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from rsrv.gateway.workers.worker import Worker

WATCH = "/grpc.health.v1.Health/Watch"
_FIRST_SECONDS, _LAST_SECONDS = 0.25, 5.0
_WITHOUT_SECONDS = 60.0
"""How soon a server without that service is asked again."""

_MANY, _MANY_SECONDS = 8, 5.0
"""So many changes in that time are told of. One whose health changes more often, or who hangs up on every watch, would
keep the gateway looking at all workers; it is seen in the rounds that come anyway."""

log = logging.getLogger(__name__)


class HealthWatch:
    """One thread for one worker. `changed` is called when something happened to it, and must be quick.

    `clock` gives monotonic seconds.
    """

    def __init__(
        self, worker: Worker, changed: Callable[[], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker = worker
        self._changed = changed
        self._clock = clock
        self._told: deque[float] = deque(maxlen=_MANY)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"rsrv-gateway-watch {worker.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the watch and its thread. Idempotent; may be called on any thread but its own."""
        self._closed.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.cancel()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        pause = _FIRST_SECONDS
        while not self._closed.is_set():
            heard, without = self._listen()
            if self._closed.is_set():
                return
            if heard:
                pause = _FIRST_SECONDS
                self._tell()  # the stream was there and broke: the worker stops, or is gone
            self._closed.wait(_WITHOUT_SECONDS if without else pause)
            pause = min(pause * 2, _LAST_SECONDS)

    def _tell(self) -> None:
        now = self._clock()
        if len(self._told) < _MANY or now - self._told[0] >= _MANY_SECONDS:
            self._told.append(now)
            self._changed()

    def _listen(self) -> tuple[bool, bool]:
        """Until the stream ends: whether anything was heard, and whether the worker has no such service."""
        heard = False
        try:
            call = self._worker.watch(WATCH, b"")
            with self._lock:
                self._call = call
            if self._closed.is_set():
                call.cancel()
            last: bytes | None = None
            for message in call:
                heard = True
                if message != last:  # somebody who repeats himself starts no round
                    last = message
                    self._tell()
        except ValueError:  # the channel was closed, to be built anew or because the worker left
            pass
        except grpc.RpcError as error:
            without = error.code() is grpc.StatusCode.UNIMPLEMENTED
            log.debug("watch ended worker=%s status=%s", self._worker.name, error.code().name)
            return heard, without
        return heard, False
