"""The workers that the gateway knows now: who joined, who is ready, who is being drained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock

from rsrv.core.errors import NameTaken, RsrvError, UnknownWorker
from rsrv.gateway.workers.worker import Worker

log = logging.getLogger(__name__)

_SHOWN = 10
"""Names of workers in an error."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker is.

    Attributes:
        url: ``host:port`` of its gRPC port.
        name: what metrics and logs call it; its url when nobody named it.
        metrics: ``host:port`` of its HTTP port, or None.
        source: who says so: config, file, dns or control.
    """

    url: str
    name: str = ""
    metrics: str | None = None
    source: str = "config"

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.url)


class Fleet:
    """Thread safe. `on_change` is called after every change of members, readiness or drains; functions must be quick.

    `connect` makes the `Worker` of an endpoint.
    """

    def __init__(self, connect: Callable[[Endpoint], Worker]) -> None:
        self._connect = connect
        self._lock = RLock()
        self._members: dict[str, Worker] = {}
        self.workers: tuple[Worker, ...] = ()
        self.ready: tuple[Worker, ...] = ()
        self._held, self._due = 0, False
        self.on_change: list[Callable[[], None]] = []

    def get(self, url: str) -> Worker | None:
        return self._members.get(url)

    def find(self, url_or_name: str) -> Worker:
        """Raises UnknownWorker."""
        for worker in self.workers:
            if url_or_name in (worker.url, worker.name):
                return worker
        names = [worker.name for worker in self.workers]
        # An error goes out as headers, of which clients take 8 KiB.
        some = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise UnknownWorker(f"the gateway has no worker {url_or_name[:100]!r}; it has {some or 'none'}")

    def name_of(self, url: str) -> str:
        """The friendly name of a worker, or its address when it has left."""
        worker = self._members.get(url)
        return url if worker is None else worker.name

    @contextmanager
    def together(self) -> Iterator[None]:
        """What changes in the block is told at its end, as one change: who follows a fleet of a thousand workers looks
        at all of them each time."""
        with self._lock:
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                due = self._due and not self._held
                self._due = self._due and not due
            if due:
                self._changed()

    # --- changes ----------------------------------------------------------------------------------------------------

    def add(self, endpoint: Endpoint) -> Worker:
        """Raises NameTaken when a worker has that address or that name."""
        with self._lock:
            for worker in self.workers:
                if endpoint.url == worker.url:
                    raise NameTaken(f"the gateway has the worker {endpoint.url} already (as {worker.name!r})")
                if endpoint.name == worker.name:
                    raise NameTaken(f"the gateway has a worker {worker.name!r} already (at {worker.url})")
            worker = self._connect(endpoint)
            self._members = {**self._members, endpoint.url: worker}
            self._refresh()
        log.info("worker joined worker=%s url=%s source=%s", worker.name, worker.url, worker.source)
        self._changed()
        return worker

    def remove(self, url: str) -> None:
        """Nothing new goes to the worker; what it works on ends, then its connections do. Raises UnknownWorker."""
        with self._lock:
            worker = self.find(url)
            self._members = {known: member for known, member in self._members.items() if known != worker.url}
            self._refresh()
        worker.close()
        log.info("worker left worker=%s url=%s", worker.name, worker.url)
        self._changed()

    def drain(self, url: str) -> None:
        """Nothing new goes to the worker; what it works on ends there. Raises UnknownWorker. Idempotent."""
        self._set_draining(url, True)

    def undrain(self, url: str) -> None:
        """Raises UnknownWorker. Idempotent."""
        self._set_draining(url, False)

    def probed(self, url: str, ready: bool) -> None:
        """What a probe has found; a worker that left meanwhile is no error."""
        with self._lock:
            worker = self._members.get(url)
            if worker is None or worker.ready == ready:
                return
            worker.ready = ready
            self._refresh()
        log.log(logging.INFO if ready else logging.WARNING, "worker=%s ready=%s", worker.name, str(ready).lower())
        self._changed()

    def close(self) -> None:
        """End every connection, and what is open on them."""
        with self._lock:
            workers, self._members = self.workers, {}
            self._refresh()
        for worker in workers:
            worker.abort()

    def _set_draining(self, url: str, draining: bool) -> None:
        with self._lock:
            worker = self.find(url)
            if worker.draining == draining:
                return
            worker.draining = draining
            self._refresh()
        log.info("worker=%s draining=%s", worker.name, str(draining).lower())
        self._changed()

    def _refresh(self) -> None:
        self.workers = tuple(self._members.values())
        self.ready = tuple(worker for worker in self.workers if worker.ready and not worker.draining)

    def _changed(self) -> None:
        with self._lock:
            if self._held:
                self._due = True
                return
        for fn in tuple(self.on_change):
            try:
                fn()
            except RsrvError as error:
                log.warning("a change of the fleet was not taken up everywhere: %s", error)
