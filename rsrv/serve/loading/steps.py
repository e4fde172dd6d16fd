"""The steps of one model's preparation: which one it is in, for its error, and the way out when the server stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rsrv.core.errors import ModelUnloaded, ServerStopping


class Steps:
    """Remembers the phase that a preparation is in, and ends it between two phases when the server stops, or when the
    model is not wanted any more (`dropped`)."""

    def __init__(self, stopping: threading.Event, dropped: threading.Event | None = None) -> None:
        self._stopping = stopping
        self._dropped = dropped
        self.phase = "load"

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.require_running()
        self.phase = phase
        yield

    def require_running(self) -> None:
        if self._stopping.is_set():
            raise ServerStopping("the server is stopping")
        if self._dropped is not None and self._dropped.is_set():
            raise ModelUnloaded("the model was removed while it was being prepared")
