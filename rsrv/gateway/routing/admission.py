"""How many ModelInfer calls may be inside at a time: so many for each worker that is ready."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from rsrv.core.errors import Shed


class Admission:
    """Thread safe. `ready` tells how many workers are ready; the cap is never below that of one worker.

    Health, control and shared-memory calls are not counted: they must be answered when the gateway is full.
    """

    def __init__(self, per_worker: int, ready: Callable[[], int]) -> None:
        self._per_worker = per_worker
        self._ready = ready
        self._lock = Lock()
        self.inflight = 0
        self.shed = 0

    @property
    def cap(self) -> int:
        return self._per_worker * max(self._ready(), 1)

    def enter(self) -> None:
        """Raises Shed when the gateway is full; pair with `leave`."""
        cap = self.cap
        with self._lock:
            if self.inflight < cap:
                self.inflight += 1
                return
            self.shed += 1
        raise Shed(
            f"{cap} ModelInfer calls are in progress at the gateway; more are not taken",
            hint="try again, or set grpc.max_concurrent_requests_per_worker",
        )

    def leave(self) -> None:
        with self._lock:
            self.inflight -= 1
