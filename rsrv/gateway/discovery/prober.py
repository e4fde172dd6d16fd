"""`Prober`: the thread that looks at every worker again and again: is it ready, what does it serve, what did it cost.

What an answer means is decided in `scan` and `wedge`, what becomes of it in `Fleet`, `Refresher` and the mode.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rsrv.core.errors import InvalidResponse
from rsrv.gateway.discovery.scan import Presence, presence_of, timed_out
from rsrv.gateway.discovery.survey import PROBE_SECONDS, Survey
from rsrv.gateway.discovery.wedge import WedgeRule
from rsrv.gateway.methods import INDEX, READY, STATUS
from rsrv.gateway.scheduling.modes import Note, log_notes
from rsrv.gateway.workers.outcome import Outcome
from rsrv.gateway.workers.poll import Poll, WorkerReport

if TYPE_CHECKING:
    from rsrv.gateway.discovery.refresh import Refresher
    from rsrv.gateway.routing.router import Router
    from rsrv.gateway.timers import Timer, Timers
    from rsrv.gateway.workers.fleet import Fleet
    from rsrv.gateway.workers.worker import Worker

PATIENCE_SECONDS = 1.0
"""After so long a round goes on with the workers that have answered: a hung one does not keep others from joining."""

GATHER_SECONDS = 0.05
"""From a reason to start a round to the round: reasons come in swarms, and rounds must not follow without a pause."""
SUSPICION_SECONDS = 1.0
"""Lost calls start at most one round in this time."""

_SHOWN_TEXT = 300
"""Characters in the log of what a worker says, or the transport about it."""

Proceed = Callable[[], None]

log = logging.getLogger(__name__)


class Prober:
    """One round each `interval_seconds`, the first at once, and one more whenever members change or `wake` is called.

    `on_returned(worker, proceed)` is called for a worker that has come, or come back, or started anew: requests go to
    it from the time on at which `proceed` is called, on any thread, or `return_seconds` later whatever happens.
    `on_wedged` is called on the prober's thread when only another process can help; it is the prober's last act.

    Attributes:
        poll: what the ready workers reported in the last round, in every mode.
        rounds: how many have ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        timers: Timers,
        refresher: Refresher,
        *,
        interval_seconds: float = 10.0,
        wedge_exit_rounds: int = 3,
        on_returned: Callable[[Worker, Proceed], None] = lambda worker, proceed: proceed(),
        on_wedged: Callable[[], None] = lambda: None,
        probe_seconds: float = PROBE_SECONDS,
        return_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._timers = timers
        self._refresher = refresher
        self._interval = interval_seconds
        self._wedge = WedgeRule(wedge_exit_rounds)
        self._on_returned = on_returned
        self._on_wedged = on_wedged
        self._probe_seconds = probe_seconds
        self._return_seconds = return_seconds
        self._clock = clock
        self.poll = Poll()
        self.rounds = 0
        self._ended = float("-inf")
        self._garbled: set[str] = set()
        self._told: dict[str, str] = {}
        self._twins: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()
        self._returning: dict[str, _Return] = {}
        self._members: list[tuple[Worker, bool]] = []
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._under_way: list[Survey] = []
        self._thread = threading.Thread(target=self._run, name="rsrv-gateway-prober", daemon=True)
        fleet.on_change.append(self._fleet_changed)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the round that is under way, and the thread. Idempotent; not from the prober's own thread."""
        self._stopping.set()
        self._woken.set()
        with self._lock:
            under_way = list(self._under_way)
        for survey in under_way:
            survey.give_up()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def wake(self) -> None:
        """Begin a round now, or right after the one that is under way. Quick, on any thread."""
        self._woken.set()

    def suspect(self, url: str) -> None:
        """A call to the worker was lost: look now, unless the last round is younger than a second. Quick."""
        worker = self._fleet.get(url)
        if worker is not None and worker.ready and self._clock() - self._ended >= SUSPICION_SECONDS:
            self.wake()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._woken.clear()
            try:
                if self.round():
                    self._on_wedged()
                    return
            except Exception:
                log.exception("a round of the prober failed")
            self._ended = self._clock()
            if self._woken.wait(self._interval):
                self._stopping.wait(GATHER_SECONDS)

    def _fleet_changed(self) -> None:
        """Readiness changes only in our own rounds; another set of members is what nobody has looked at yet."""
        members = [(worker, worker.draining) for worker in self._fleet.workers]
        if members != self._members:
            self._members = members
            self._refresher.members_changed()
            self.wake()

    def round(self) -> bool:
        """Look at every worker once (spec gateway-node 1.9.1); true when the process should end (1.9.3).

        Also for callers without a thread: a start looks once before it serves.
        """
        seen = _Round({worker.url: worker for worker in self._fleet.workers})
        self._garbled &= seen.workers.keys()
        self._told = {url: text for url, text in self._told.items() if url in seen.workers}
        with self._lock:
            self._under_way = []
            self._returning = {url: one for url, one in self._returning.items() if seen.workers.get(url) is one.worker}
        probes = self._ask(seen.workers.values(), READY)
        over = probes.wait(PATIENCE_SECONDS)
        while True:
            fresh = {url: each for url, each in probes.outcomes.copy().items() if url not in seen.answers}
            self._take_up({url: presence_of(outcome) for url, outcome in fresh.items()}, seen)
            for url, outcome in fresh.items():
                self._tell(seen.workers[url], outcome)
            if over or self._stopping.is_set():
                break
            over = probes.wait()
        if self._stopping.is_set():
            return False
        return self._conclude(seen)

    def _take_up(self, answers: Mapping[str, Presence], seen: _Round) -> None:
        """Go on with the workers that have answered: what do they serve, and what did it cost?"""
        seen.answers.update(answers)
        present = [seen.workers[url] for url, answer in answers.items() if answer in ("ready", "unready")]
        index = self._ask(present, INDEX)
        status = self._ask((worker for worker in present if answers[worker.url] == "ready"), STATUS)
        index.wait()
        status.wait()
        if self._stopping.is_set():
            return
        for url, answer in answers.items():
            worker = seen.workers[url]
            restarted = url in status.outcomes and self._learn(worker, status.outcomes[url], seen)
            self._judge(worker, answer, restarted)
        seen.heard |= self._refresher.heard(index.outcomes)
        for url, outcome in (*index.outcomes.items(), *status.outcomes.items()):
            if timed_out(outcome):
                seen.hung.add(url)

    def _conclude(self, seen: _Round) -> bool:
        seen.hung.update(url for url, answer in seen.answers.items() if answer == "silent")
        for url in seen.hung:
            log.debug("worker=%s hangs: its connections are built anew", seen.workers[url].name)
            seen.workers[url].rebuild()
        self._refresher.end_round(seen.answers, frozenset(seen.heard))
        self.poll = Poll(seen.reports)
        self._look_for_twins()
        inflight = sum(worker.inflight + worker.waiting for worker in seen.workers.values())
        wedged = self._wedge.round(seen.answers.values(), inflight)
        if wedged:
            log.error("every worker hung in %d rounds, also on connections that were built anew", self._wedge.rounds)
        self._tick()
        self.rounds += 1
        return wedged

    def _ask(self, workers: Iterable[Worker], path: str) -> Survey:
        survey = Survey(workers, path, timers=self._timers, seconds=self._probe_seconds)
        with self._lock:
            self._under_way.append(survey)
        if self._stopping.is_set():
            survey.give_up()
        return survey

    # --- what operators should know ---------------------------------------------------------------------------------

    def _tell(self, worker: Worker, outcome: Outcome) -> None:
        """Say once why a worker gives no answer: a name with a typo is never looked up, and looks like one that is
        about to start."""
        if outcome.ok:
            self._told.pop(worker.url, None)
            return
        why = f"{outcome.code.name} {outcome.reason}".strip()
        # One that is away times out in one round, and in the next its connection does.
        kind = "away" if presence_of(outcome) in ("silent", "refused") else why
        if self._told.get(worker.url) != kind and not self._stopping.is_set():
            self._told[worker.url] = kind
            log.warning("worker=%s does not say that it is ready: %s %s", worker.name, why, outcome.text[:_SHOWN_TEXT])

    def _look_for_twins(self) -> None:
        """Say once of addresses that lead to the same server: it gets twice its share, and is drained only half."""
        by_server: dict[str, list[str]] = {}
        for url, report in self.poll.workers.items():
            if report.incarnation:
                by_server.setdefault(report.incarnation, []).append(url)
        twins = {tuple(sorted(urls)) for urls in by_server.values() if len(urls) > 1}
        for urls in sorted(twins - self._twins):
            log.warning("these workers are one server that is listed under several addresses: %s", ", ".join(urls))
        self._twins = twins

    # --- single workers ---------------------------------------------------------------------------------------------

    def _learn(self, worker: Worker, outcome: Outcome, seen: _Round) -> bool:
        """Take up a worker's report; whether it has started anew since the last one. Not every server has reports."""
        if not outcome.ok:
            return False
        try:
            report = WorkerReport.read(worker.url, outcome.body)
        except InvalidResponse as error:
            if worker.url not in self._garbled:
                self._garbled.add(worker.url)
                log.warning("worker=%s answers ModelControlStatus with %s", worker.name, error)
            return False
        self._garbled.discard(worker.url)
        seen.reports[worker.url] = report
        worker.discipline = report.discipline
        before, worker.incarnation = worker.incarnation, report.incarnation or worker.incarnation
        return bool(before) and before != worker.incarnation

    def _judge(self, worker: Worker, answer: Presence, restarted: bool) -> None:
        if answer in ("silent", "refused"):
            with self._lock:
                given_up = self._returning.pop(worker.url, None)
            if given_up is not None:
                given_up.timer.cancel()
            if answer == "refused":
                self._refresher.bar(worker)
            self._set_ready(worker, False)
            return
        is_ready = answer == "ready"
        with self._lock:
            returning = self._returning.get(worker.url)
            if returning is not None and not restarted:
                returning.ready = is_ready
                return
        if restarted:
            log.warning("worker=%s has started anew", worker.name)
        if restarted or not self._refresher.admits(worker) or (is_ready and not worker.ready):
            self._set_ready(worker, False)
            self._return(worker, is_ready)
        else:
            self._set_ready(worker, is_ready)

    def _set_ready(self, worker: Worker, ready: bool) -> None:
        if self._fleet.get(worker.url) is worker:  # another one may have joined at the address meanwhile
            self._fleet.probed(worker.url, ready)

    def _return(self, worker: Worker, is_ready: bool) -> None:
        """Have the worker told what it has to know, then let requests go there."""
        one = _Return(worker, is_ready)

        def proceed() -> None:
            with self._lock:
                if self._returning.get(worker.url) is not one:
                    return  # it was called before, or the worker is gone again
                del self._returning[worker.url]
            one.timer.cancel()
            self._refresher.admit(worker)
            self._set_ready(worker, one.ready)
            if one.late:
                self.wake()  # the round, and with it the mode, went on without the worker

        one.timer = self._timers.after(self._return_seconds, proceed)
        with self._lock:
            self._returning[worker.url] = one
        try:
            self._on_returned(worker, proceed)
        except Exception:
            log.exception("worker=%s was not told which shared memory is registered", worker.name)
            proceed()
        one.late = True

    # --- the mode ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Give the mode what was found; without any ready worker, or any report that it needs, it stays as it is."""
        mode = self._router.mode
        notes: Iterable[Note] = ()
        try:
            with self._router.lock:
                # Read under the lock: whoever leaves is forgotten by the mode afterwards, or is not in it.
                ready = sorted(worker.url for worker in self._fleet.ready)
                reports = {url: self.poll.workers[url] for url in ready if url in self.poll.workers}
                if not ready or (mode.needs_poll and not reports):
                    return
                mode.tick(ready, Poll(reports if mode.needs_poll else {}), self._clock())
                notes = mode.take_notes()
        except Exception:
            log.exception("the scheduling mode %s failed in its tick and goes on as it was", mode.name)
        log_notes(log, notes)


@dataclass(slots=True)
class _Round:
    """What one round has found so far, by worker's address.

    `heard` are those that listed their models, `hung` those that left a question without an answer.
    """

    workers: dict[str, Worker]
    answers: dict[str, Presence] = field(default_factory=dict)
    reports: dict[str, WorkerReport] = field(default_factory=dict)
    heard: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)


class _Return:
    """A worker on its way back; `late`: the function that was told so has returned before `proceed` was called."""

    def __init__(self, worker: Worker, ready: bool) -> None:
        self.worker = worker
        self.ready = ready
        self.late = False
        self.timer: Timer
