"""`Membership`: who belongs to the fleet. Several sources list workers; what they list together is what the fleet has.

A worker that joins is probed and then routed to; one that leaves is drained, then removed. That a worker is down is no
reason to leave: sources say who is a member, the prober says who is well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rsrv.core.config.addresses import parse_host_port, parse_worker_name
from rsrv.core.config.gateway import MAX_WORKERS
from rsrv.core.errors import InvalidRequest, NameTaken, UnknownWorker, WrongState
from rsrv.gateway.discovery.dns import DnsEndpoints
from rsrv.gateway.discovery.endpoints_file import EndpointsFile
from rsrv.gateway.workers.fleet import Endpoint

if TYPE_CHECKING:
    from rsrv.core.config.gateway import GatewayConfig
    from rsrv.gateway.timers import Timers
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.gateway.workers.worker import Worker

FIRST_LOOK_SECONDS = 5.0
"""How long a start waits for the first answers of the sources."""
IDLE_LOOK_SECONDS = 0.25
"""How often a worker that is on its way out is looked at; it is removed when it is idle at two looks in a row."""
MAX_DRAIN_SECONDS = 86_400.0

log = logging.getLogger(__name__)


class Source(Protocol):
    """Somebody who lists workers."""

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float:
        """Seconds from one look to the next; 0 = what it lists never changes."""

    def look(self) -> tuple[Endpoint, ...]:
        """The workers that it lists now; when that is not known, those that it listed before. May block."""


class Configured:
    """The workers of the configuration, which stay for the life of the process."""

    name = "config"
    seconds = 0.0

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)

    def look(self) -> tuple[Endpoint, ...]:
        return self._endpoints


def sources_of(config: GatewayConfig) -> list[Source]:
    """The sources that a configuration names. Raises ConfigError when `membership.file` cannot be read."""
    members = config.membership
    found: list[Source] = [
        Configured(Endpoint(worker.url, worker.name, worker.metrics, "config") for worker in config.static_workers)
    ]
    if members.file is not None:
        found.append(EndpointsFile(members.file))
    if members.dns is not None:
        found.append(DnsEndpoints(members.dns, seconds=members.dns_seconds))
    return found


class Change(NamedTuple):
    """A worker that an operator changed, and whether that outlives a restart of the gateway."""

    worker: Worker
    persisted: bool


class Plan(NamedTuple):
    """What is to be done so that the fleet has what is listed; addresses of workers, but for `join`."""

    join: tuple[Endpoint, ...]
    leave: tuple[str, ...]
    stay: tuple[Endpoint, ...]


def union(lists: Iterable[Sequence[Endpoint]]) -> dict[str, Endpoint]:
    """The workers of several lists by address; of one that is listed more than once the first entry counts."""
    found: dict[str, Endpoint] = {}
    for endpoints in lists:
        for endpoint in endpoints:
            found.setdefault(endpoint.url, endpoint)
    return found


def plan(listed: Mapping[str, Endpoint], members: Iterable[str]) -> Plan:
    """Compare what is listed with the members that there are."""
    present = set(members)
    return Plan(
        join=tuple(endpoint for url, endpoint in listed.items() if url not in present),
        leave=tuple(sorted(present - listed.keys())),
        stay=tuple(endpoint for url, endpoint in listed.items() if url in present),
    )


class Membership:
    """Thread safe. A thread for each source that can change; the control plane calls the methods for operators.

    What operators did goes before what the sources say: a worker that was removed stays out until it is added again, or
    no source lists it any more. Across a restart only the workers that they added, and those that they drained, are
    kept, by `keep(added, drained)`, which says whether it could.
    """

    def __init__(
        self,
        fleet: Fleet,
        timers: Timers,
        sources: Sequence[Source],
        *,
        drain_seconds: float = 30.0,
        added: Iterable[Endpoint] = (),
        drained: Iterable[str] = (),
        keep: Callable[[Iterable[Endpoint], Iterable[str]], bool] | None = None,
    ) -> None:
        """`added` and `drained` are what operators did before a restart."""
        self._fleet = fleet
        self._timers = timers
        self._sources = tuple(sources)
        self._drain_seconds = drain_seconds
        self._keep = keep
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        self._lists: list[tuple[Endpoint, ...]] = [() for _ in self._sources]
        self._added = {endpoint.url: replace(endpoint, source="control") for endpoint in added}
        self._drained = set(drained)
        self._removed: set[str] = set()
        self._leaving: dict[str, _Leave] = {}
        self._renamed: set[str] = set()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    # --- sources ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask every source once, make the fleet what they say, and look again from time to time. A source that takes
        longer than `FIRST_LOOK_SECONDS` is taken up when it answers."""
        slow = [number for number, source in enumerate(self._sources) if source.seconds > 0]
        for number, source in enumerate(self._sources):
            if number not in slow:
                self._lists[number] = source.look()
        looked = [threading.Event() for _ in slow]
        for number, event in zip(slow, looked, strict=True):
            name = f"rsrv-gateway-members-{self._sources[number].name}"
            self._threads.append(threading.Thread(target=self._watch, args=(number, event), name=name, daemon=True))
            self._threads[-1].start()
        until = time.monotonic() + FIRST_LOOK_SECONDS
        for event in looked:
            event.wait(max(0.0, until - time.monotonic()))
        self._reconcile()

    def stop(self) -> None:
        """Look no more. A lookup that the system's resolver does not end is left to end by itself."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(1.0)

    def _watch(self, number: int, looked: threading.Event) -> None:
        source = self._sources[number]
        while not self._stopping.is_set():
            try:
                endpoints = source.look()
            except Exception:
                log.exception("the workers of source=%s could not be looked at", source.name)
            else:
                self.listed(number, endpoints)
            looked.set()
            self._stopping.wait(source.seconds)

    def listed(self, number: int, endpoints: tuple[Endpoint, ...]) -> None:
        """Take up what the source of that number lists now."""
        with self._lock:
            if endpoints != self._lists[number]:
                self._lists[number] = endpoints
                self._reconcile()

    def _reconcile(self) -> None:
        with self._lock, self._fleet.together():
            listed = union([*self._lists, tuple(self._added.values())])
            self._removed &= listed.keys()
            self._renamed &= listed.keys()
            wanted = {url: endpoint for url, endpoint in listed.items() if url not in self._removed}
            todo = plan(wanted, [worker.url for worker in self._fleet.workers])
            for url in todo.leave:
                if url not in self._leaving:
                    log.info("worker=%s is listed no more and leaves", self._fleet.name_of(url))
                    self._send_off(url, self._drain_seconds, by_operator=False)
            for endpoint in todo.stay:
                self._stay(endpoint)
            room = max(0, MAX_WORKERS - len(self._fleet.workers))
            for endpoint in todo.join[:room]:
                self._join(endpoint)
            for endpoint in todo.join[room:]:
                log.warning("worker %s cannot join: the gateway has %d workers already", endpoint.url, MAX_WORKERS)

    def _join(self, endpoint: Endpoint) -> None:
        try:
            self._fleet.add(endpoint)
        except NameTaken as error:
            # Two sources may use a name twice; the worker is worth more than its name.
            if endpoint.url not in self._renamed:
                self._renamed.add(endpoint.url)
                log.warning("%s; %s is called by its address", error.message, endpoint.url)
            try:
                self._fleet.add(replace(endpoint, name=endpoint.url))
            except NameTaken as taken:
                log.warning("worker %s cannot join: %s", endpoint.url, taken.message)
                return
        if endpoint.url in self._drained:
            self._fleet.drain(endpoint.url)

    def _stay(self, endpoint: Endpoint) -> None:
        """A member is still listed, or again. Where its metrics are may change; its name stays for its time here."""
        leave = self._leaving.get(endpoint.url)
        if leave is not None and not leave.by_operator:
            del self._leaving[endpoint.url]
            if endpoint.url not in self._drained:
                self._fleet.undrain(endpoint.url)
        worker = self._fleet.get(endpoint.url)
        if worker is not None and worker.metrics != endpoint.metrics:
            worker.metrics = endpoint.metrics

    # --- operators --------------------------------------------------------------------------------------------------

    def add(self, worker: str, metrics: str = "", name: str = "") -> Change:
        """Let a worker join. `worker` and `metrics` are ``host:port``, "" for metrics that nobody collects; without a
        name it is called by its address. Raises InvalidRequest and NameTaken."""
        url = _address("worker", worker)
        endpoint = Endpoint(url, _name(name), _address("metrics", metrics) if metrics else None, "control")
        with self._lock:
            if self._fleet.get(url) is None and len(self._fleet.workers) >= MAX_WORKERS:
                raise WrongState(
                    f"the gateway has {MAX_WORKERS} workers, and can have no more",
                    reason="full",
                    hint="remove one that is not needed, or put another gateway beside this one",
                )
            self._removed.discard(url)
            leave = self._leaving.pop(url, None)
            if leave is not None and self._fleet.get(url) is leave.worker:
                self._drained.discard(url)
                self._fleet.undrain(url)
                member = leave.worker
            else:
                member = self._fleet.add(endpoint)
                if url in self._drained:
                    self._fleet.drain(url)
            self._added[url] = endpoint
        return Change(member, self._persist())

    def remove(self, worker: str) -> Change:
        """Send a worker away at once; what it works on is finished. `worker` is its address or its name, here and
        below. Raises UnknownWorker."""
        with self._lock:
            member = self._fleet.find(worker)
            self._take_out(member)
        return Change(member, self._persist())

    def drain(self, worker: str, deadline_seconds: float = 0.0) -> Change:
        """Give a worker nothing new. With a deadline it is removed when it is idle, or then; 0 = it stays, drained.
        Raises UnknownWorker and InvalidRequest."""
        if not 0 <= deadline_seconds <= MAX_DRAIN_SECONDS:  # also refuses NaN
            raise InvalidRequest(
                f"deadline_seconds is {deadline_seconds:g}; wanted a number from 0 to {MAX_DRAIN_SECONDS:g}"
            )
        with self._lock:
            member = self._fleet.find(worker)
            if deadline_seconds > 0:
                self._send_off(member.url, deadline_seconds, by_operator=True)
            else:
                self._leaving.pop(member.url, None)
                self._drained.add(member.url)
                self._fleet.drain(member.url)
                self._reconcile()  # one that no source lists is on its way out, whatever an operator says
        return Change(member, self._persist())

    def undrain(self, worker: str) -> Change:
        """Give a worker new work again. Raises UnknownWorker, and WrongState for one that no source lists."""
        with self._lock:
            member = self._fleet.find(worker)
            leave = self._leaving.get(member.url)
            if leave is not None and not leave.by_operator:
                raise WrongState(
                    f"worker {member.name} is leaving: no source lists it any more",
                    reason="leaving",
                    hint="list it again where it was listed, or: rsrv ctl gateway workers add",
                )
            self._leaving.pop(member.url, None)
            self._drained.discard(member.url)
            self._fleet.undrain(member.url)
        return Change(member, self._persist())

    def _persist(self) -> bool:
        """Who is being removed is not kept, so that nothing has to be written when it is gone.

        Not under the lock, which the timers' thread takes: a slow disk must not hold up deadlines.
        """
        if self._keep is None:
            return False
        with self._writing:  # and whoever writes later looks later
            with self._lock:
                going = {url for url, leave in self._leaving.items() if leave.by_operator}
                added = tuple(endpoint for url, endpoint in self._added.items() if url not in going)
                drained = sorted(self._drained - going)
            return self._keep(added, drained)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _send_off(self, url: str, seconds: float, *, by_operator: bool) -> None:
        worker = self._fleet.find(url)
        leave = self._leaving[url] = _Leave(worker, time.monotonic() + seconds, by_operator)
        self._fleet.drain(url)
        self._look_again(leave)

    def _look_again(self, leave: _Leave) -> None:
        wait = min(IDLE_LOOK_SECONDS, max(0.0, leave.deadline - time.monotonic()))
        self._timers.after(wait, lambda: self._check(leave))

    def _check(self, leave: _Leave) -> None:
        worker = leave.worker
        with self._lock:
            if self._leaving.get(worker.url) is not leave or self._stopping.is_set():
                return
            is_idle = worker.inflight + worker.waiting == 0
            late = time.monotonic() >= leave.deadline
            if not late and not (is_idle and leave.was_idle):
                leave.was_idle = is_idle
                self._look_again(leave)
                return
            if not is_idle:
                log.warning("worker=%s is removed with %d requests in progress", worker.name, worker.inflight)
            self._take_out(worker)

    def _take_out(self, worker: Worker) -> None:
        """Out of the fleet, and out of what operators did before."""
        url = worker.url
        self._leaving.pop(url, None)
        self._added.pop(url, None)
        self._drained.discard(url)
        self._renamed.discard(url)
        if url in union(self._lists):
            self._removed.add(url)
        try:
            self._fleet.remove(url)
        except UnknownWorker:
            log.debug("worker=%s had left already", worker.name)


@dataclass(slots=True, eq=False)
class _Leave:
    """A worker on its way out; `deadline` is on the monotonic clock."""

    worker: Worker
    deadline: float
    by_operator: bool
    was_idle: bool = False


def _address(field: str, text: str) -> str:
    try:
        return str(parse_host_port(text))
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}") from None


def _name(text: str) -> str:
    """A worker's name, "" for none. Raises InvalidRequest."""
    try:
        return parse_worker_name(text) if text.strip() else ""
    except ValueError as error:
        raise InvalidRequest(f"name: {error}") from None
