"""Tells the router who joins, leaves, is ready or is drained, and keeps a health watch open to every member."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rsrv.gateway.workers.health_watch import HealthWatch

if TYPE_CHECKING:
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.gateway.workers.worker import Worker


@dataclass(slots=True)
class _Member:
    worker: Worker
    watch: HealthWatch
    ready: bool = False
    draining: bool = False


class Attendance:
    """Follows the fleet from when it is made. `noticed` is called, on any thread, when a worker may have changed.

    `left` is told the address of one that has left.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        noticed: Callable[[], object],
        left: Callable[[str], object] = lambda url: None,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._noticed = noticed
        self._left = left
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._closed = False
        fleet.on_change.append(self.update)

    def update(self) -> None:
        """Bring router and watches up to what the fleet is now. Quick; under one lock, so that no step is lost."""
        with self._lock:
            if self._closed:
                return
            workers = {worker.url: worker for worker in self._fleet.workers}
            for url, member in list(self._members.items()):
                if workers.get(url) is not member.worker:
                    del self._members[url]
                    self._router.left(url)
                    self._left(url)
                    # Ending it takes a moment, and whoever changed the fleet must not wait for that.
                    threading.Thread(target=member.watch.close, name="rsrv-gateway-unwatch", daemon=True).start()
            for url, worker in workers.items():
                if url not in self._members:
                    self._router.joined(url, slowly=any(other.ready for other in workers.values()))
                    self._members[url] = _Member(worker, HealthWatch(worker, self._noticed))
                    self._members[url].watch.start()
                self._compare(url, self._members[url])

    def close(self) -> None:
        """End the watches; changes are not followed any more."""
        with self._lock:
            self._closed = True
            members, self._members = list(self._members.values()), {}
        closing = [threading.Thread(target=member.watch.close, name="rsrv-gateway-unwatch") for member in members]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _compare(self, url: str, member: _Member) -> None:
        worker = member.worker
        if worker.ready != member.ready:
            member.ready = worker.ready
            self._router.probed(url, worker.ready)
        if worker.draining != member.draining:
            member.draining = worker.draining
            self._router.drained(url, worker.draining)
