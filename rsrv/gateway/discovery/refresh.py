"""`Refresher` keeps what workers list and makes the routing table of it, in the prober's rounds and for requests.

Deciding what an answer means is `scan`; this holds the state and its lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rsrv.core.errors import InvalidResponse
from rsrv.gateway.discovery.scan import Listing, Presence, fold, read_listing, route
from rsrv.gateway.discovery.survey import PROBE_SECONDS, Survey
from rsrv.gateway.methods import INDEX
from rsrv.gateway.workers.outcome import Outcome

if TYPE_CHECKING:
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.timers import Timer, Timers
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.gateway.workers.worker import Worker

FRESH_SECONDS = 1.0
"""A table that is younger is not made anew for a request."""

log = logging.getLogger(__name__)


class Refresher:
    """Thread safe, and nothing waits: continuations run on any thread, each once."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        timers: Timers,
        *,
        probe_seconds: float = PROBE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._timers = timers
        self._probe_seconds = probe_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._listings: dict[str, Listing] = {}
        self._routable: dict[str, Worker] = {}
        self._silent: frozenset[str] = frozenset()
        self._garbled: set[str] = set()
        self._waiters: list[_Waiter] = []
        self._running = False
        self._ended = float("-inf")

    # --- because of a request (spec gateway-node 1.9.2) -------------------------------------------------------------

    def refresh(self, deadline_ns: int, done: Callable[[], None]) -> None:
        """Call `done` when the table is fresh: at once when it is younger than a second, else after a scan, which many
        share; at `deadline_ns` (absolute, monotonic) at the latest."""
        with self._lock:
            if not self._running and self._is_fresh():
                waiter = None
            else:
                waiter = _Waiter(done)
                self._waiters.append(waiter)
            start = waiter is not None and self._begin()
        if waiter is None:
            done()
            return
        waiter.limit(self._timers.at(deadline_ns, waiter.finish))
        if start:
            self._scan()

    def request(self) -> None:
        """Have the table made anew soon, unless it is younger than a second."""
        with self._lock:
            start = not self._is_fresh() and self._begin()
        if start:
            self._scan()

    def _is_fresh(self) -> bool:
        return self._clock() - self._ended < FRESH_SECONDS

    def _begin(self) -> bool:
        started, self._running = not self._running, True
        return started

    def _scan(self) -> None:
        # A worker that hung in the last round would let every request for an unknown model wait for five seconds.
        workers = [worker for worker in self._fleet.workers if worker.url not in self._silent]
        Survey(workers, INDEX, timers=self._timers, seconds=self._probe_seconds, on_all=self._scanned)

    def _scanned(self, outcomes: Mapping[str, Outcome]) -> None:
        try:
            self.heard(outcomes)
        finally:
            with self._lock:
                self._running = False
                self._ended = self._clock()  # also of a scan that failed: nobody hammers a fleet that is down
                waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.finish()

    # --- for the prober ---------------------------------------------------------------------------------------------

    def heard(self, outcomes: Mapping[str, Outcome]) -> frozenset[str]:
        """Take up answers to RepositoryIndex and install the table; returns the workers whose answer is one."""
        listings = {}
        for url, outcome in outcomes.items():
            if outcome.ok and (listing := self._read(url, outcome.body)) is not None:
                listings[url] = listing
        with self._lock:
            self._listings.update(listings)
            self._ended = self._clock()
            self._install()
        return frozenset(listings)

    def end_round(self, answers: Mapping[str, Presence], heard: frozenset[str]) -> None:
        """What every worker said in a round to ServerReady, and who listed its models in it."""
        with self._lock:
            fresh = {url: self._listings[url] for url in heard if url in self._listings}
            # Who joined during the round was not asked, and counts as neither lost nor silent.
            self._listings = {
                **{url: listing for url, listing in self._listings.items() if url not in answers},
                **fold(self._listings, fresh, answers),
            }
            self._silent = frozenset(url for url, answer in answers.items() if answer == "silent")
            self._install()

    def admit(self, worker: Worker) -> None:
        """Route to the worker from now on: it knows the shared memory that clients have registered."""
        with self._lock:
            self._routable[worker.url] = worker
            self._install()

    def bar(self, worker: Worker) -> None:
        """Do not route to the worker until it is admitted again."""
        with self._lock:
            if self._routable.pop(worker.url, None) is not None:
                self._install()

    def admits(self, worker: Worker) -> bool:
        return self._routable.get(worker.url) is worker

    def members_changed(self) -> None:
        """Workers joined, left, or are to be drained."""
        with self._lock:
            self._install()

    # --- the table --------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Under the lock, so that an older table never follows a newer one."""
        members = {worker.url: worker for worker in self._fleet.workers}
        self._listings = {url: listing for url, listing in self._listings.items() if url in members}
        self._routable = {url: worker for url, worker in self._routable.items() if members.get(url) is worker}
        self._garbled &= members.keys()
        routable = [url for url, worker in self._routable.items() if not worker.draining]
        self._router.install(route(self._listings, routable))

    def _read(self, url: str, body: bytes) -> Listing | None:
        try:
            listing = read_listing(body)
        except InvalidResponse as error:
            if url not in self._garbled:
                self._garbled.add(url)
                log.warning("worker=%s answers RepositoryIndex with %s", self._fleet.name_of(url), error)
            return None
        self._garbled.discard(url)
        return listing


class _Waiter:
    """A request that waits for a scan, with a deadline: whoever is first ends it."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._first = threading.Lock()
        self._timer: Timer | None = None

    def limit(self, timer: Timer) -> None:
        """The timer that calls `finish` at the deadline."""
        self._timer = timer
        if self._first.locked():  # a scan has ended meanwhile
            timer.cancel()

    def finish(self) -> None:
        if not self._first.acquire(blocking=False):
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._done()
        except Exception:
            log.exception("what follows a refresh of the routing table failed")
