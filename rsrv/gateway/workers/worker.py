"""One worker as the gateway sees it: its channels, the slots of its streams, and the gate for shared memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import Code, InvalidRequest
from rsrv.core.wire.peek import writes_shared_memory
from rsrv.gateway.methods import INFER
from rsrv.gateway.workers.channels import ChannelSettings, Stubs, outcome_of
from rsrv.gateway.workers.hops import Metadata
from rsrv.gateway.workers.outcome import Outcome

if TYPE_CHECKING:
    from rsrv.gateway.metrics.counters import GatewayCounters
    from rsrv.gateway.timers import Timer, Timers

Done = Callable[[Outcome], None]

_CANCELLED = Outcome(Code.CANCELLED, text="the client went away", sent=False)
_LATE = Outcome(Code.DEADLINE_EXCEEDED, text="deadline exceeded at gateway", sent=False)
_HUNG = Outcome(Code.UNAVAILABLE, text="it does not answer any more, not even whether it is ready")
_HANGS = replace(_HUNG, sent=False)
_AWAY = Outcome(Code.UNAVAILABLE, text="its connection broke", sent=False)
_CLOSED = Outcome(Code.UNAVAILABLE, text="its connection was closed", sent=False)
BEHIND = Outcome(Code.UNAVAILABLE, text="it has missed changes of shared memory, and is told of them first", sent=False)
"""The end of a call that uses shared memory of which the worker is to be told."""
_REGION = b"shared_memory_region"
_AWAY_NS = 1_000_000_000
"""For so long after a call was lost, what waits for a slot goes elsewhere instead of being lost call by call."""


class Worker:
    """Thread safe. At most `streams` ModelInfer calls are open at a time; more wait, first in, first out.

    Two connections: one for inference and shared memory, one for probes, so that a worker that is full can still be
    asked how it is.

    Attributes:
        ready: what the last probe found; written by `Fleet.probed`.
        draining: takes no new work; written by `Fleet`.
        incarnation: changes when the worker starts anew; "" until it has told.
        behind: it has missed changes of shared memory, so that a name may mean something else there than to clients;
            written by `SharedMemory`. Requests that use such memory are not sent meanwhile.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        metrics: str | None = None,
        source: str = "config",
        settings: ChannelSettings,
        streams: int,
        timers: Timers,
        counters: GatewayCounters,
    ) -> None:
        self.url = url
        self.name = name
        self.metrics = metrics
        self.source = source
        self.ready = False
        self.draining = False
        self.incarnation = ""
        self.behind = False
        self.discipline = ""
        self._settings = settings
        self._streams = streams
        self._timers = timers
        self._counters = counters
        self._lock = Lock()
        self._open: set[Attempt] = set()
        self._waiting: deque[Attempt] = deque()
        self._holds = 0
        self._away_until = 0
        self._closed = False
        self._stubs = Stubs(settings, url)
        self._probes = Stubs(settings, url)

    @property
    def inflight(self) -> int:
        """ModelInfer calls that were sent and are not over."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """ModelInfer calls that wait for a slot or for the gate."""
        return len(self._waiting)

    # --- calls ------------------------------------------------------------------------------------------------------

    def infer(
        self, body: bytes, *, deadline_ns: int, metadata: Metadata = (), others: bool = False, done: Done
    ) -> Attempt:
        """Send a ModelInfer request as soon as a slot is free and the gate is open, with what is left of the time.

        `deadline_ns` is absolute on ``time.monotonic_ns()``, and not 0. With `others`, workers that may be asked
        instead, a call that still waits ends when this worker breaks down. `done` is called once, on any thread,
        possibly before this returns.
        """
        attempt = Attempt(self, body, deadline_ns, metadata, done)
        attempt.others = others
        with self._lock:
            closed = self._closed
            free = not self._waiting and not self._holds and len(self._open) < self._streams
            if closed:
                pass
            elif free:
                self._open.add(attempt)
            else:
                attempt.queued_ns = time.monotonic_ns()
                self._waiting.append(attempt)
        if closed:
            attempt.conclude(_CLOSED)
        elif not free:
            attempt.timer = timer = self._timers.at(deadline_ns, lambda: self._give_up(attempt, _LATE))
            if attempt.left_queue:  # before the timer was there to be cancelled
                timer.cancel()
            self.send_waiting()  # a slot may have become free before the call stood in the queue
        elif not attempt.send(self._stubs):
            self.send_waiting()
        return attempt

    def call(
        self, path: str, body: bytes, *, timeout: float, metadata: Metadata = (), wait: bool = False, done: Done
    ) -> ControlCall:
        """Call any method on the connection of inference; takes no slot and waits for no gate.

        With `wait` a worker that cannot be reached is no error before `timeout`: it may be about to come back.
        """
        return ControlCall(self._stubs, path, body, timeout, metadata, done, wait=wait)

    def probe(self, path: str, body: bytes, *, timeout: float, done: Done) -> ControlCall:
        """Call any method on the connection that is kept for questions."""
        return ControlCall(self._probes, path, body, timeout, (), done)

    def watch(self, path: str, body: bytes) -> Any:
        """Open a server stream on the connection of inference; raises ValueError when it was closed."""
        return self._stubs.watch(path, body)

    # --- the gate of shared memory ----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Let ModelInfer calls wait from now on, until `release` was called as often."""
        with self._lock:
            self._holds += 1

    def release(self) -> None:
        with self._lock:
            self._holds -= 1
        self.send_waiting()

    # --- life -------------------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Connect anew, because the worker hangs. What it still works on moves on to others, but for requests whose
        outputs go to shared memory: it might write there after another one has answered, and the client read on."""
        with self._lock:
            if self._closed:
                return
            old = self._stubs, self._probes
            self._stubs, self._probes = Stubs(self._settings, self.url), Stubs(self._settings, self.url)
            stuck = list(self._open)
            leaving = [attempt for attempt in self._waiting if attempt.others]
        for attempt in leaving:  # they would be the next to get stuck
            self._give_up(attempt, _HANGS)
        kept = [attempt for attempt in stuck if not attempt.may_move()]
        for attempt in stuck:
            if attempt not in kept:
                attempt.conclude(_HUNG)
        old[1].close()
        _close_after(old[0], kept)

    def close(self) -> None:
        """The worker is not used any more: calls that wait fail, those that were sent end, then the connections do."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = list(self._waiting), deque()
            left = list(self._open)
        for attempt in waiting:
            attempt.leave_queue()
            attempt.conclude(Outcome(Code.UNAVAILABLE, text="it was removed from the gateway", sent=False))
        self._probes.close()
        _close_after(self._stubs, left)

    def abort(self) -> None:
        """Close the connections at once; what is open ends as cancelled."""
        self.close()
        self._stubs.close()

    # --- for attempts -----------------------------------------------------------------------------------------------

    def over(self, attempt: Attempt, *, lost: bool = False) -> Callable[[], None] | None:
        """An attempt that had a slot needs it no longer; `lost`: because nobody is there to answer. `send_waiting` has
        to follow, and what is returned to be called."""
        with self._lock:
            self._open.discard(attempt)
            attempt.is_over = True
            after, attempt.on_over = attempt.on_over, None
            if lost:
                self._away_until = time.monotonic_ns() + _AWAY_NS
            elif self._away_until and not attempt.concluded:
                self._away_until = 0
        return after

    def send_waiting(self) -> None:
        """Send what waits, as far as there are slots and the gate is open."""
        while self._waiting:
            with self._lock:
                if self._holds or not self._waiting or len(self._open) >= self._streams:
                    return
                attempt = self._waiting.popleft()
                now = time.monotonic_ns()
                leaves = attempt.others and now < self._away_until
                if not leaves:
                    self._open.add(attempt)
                stubs = self._stubs
            attempt.leave_queue()
            if leaves:
                attempt.conclude(_AWAY)
                continue
            self._counters.queue_wait(self.url, (now - attempt.queued_ns) / 1e9)
            attempt.send(stubs)

    def _give_up(self, attempt: Attempt, outcome: Outcome) -> bool:
        """End an attempt that still waits; false when it does not."""
        with self._lock:
            try:
                self._waiting.remove(attempt)
            except ValueError:
                return False
        attempt.leave_queue()
        attempt.conclude(outcome)
        return True


class Attempt:
    """One ModelInfer call to one worker, waiting or sent. `conclude` runs `done` once, whoever is first."""

    __slots__ = (
        "_body",
        "_concluded",
        "_deadline_ns",
        "_done",
        "_future",
        "_metadata",
        "_sent_ns",
        "_worker",
        "is_over",
        "left_queue",
        "on_over",
        "others",
        "queued_ns",
        "timer",
    )

    def __init__(self, worker: Worker, body: bytes, deadline_ns: int, metadata: Metadata, done: Done) -> None:
        self._worker = worker
        self._body = body
        self._deadline_ns = deadline_ns
        self._metadata = metadata
        self._done = done
        self._concluded = Lock()
        self._future: Any = None
        self.on_over: Callable[[], None] | None = None
        self.is_over = False
        self._sent_ns = 0
        self.others = False
        self.left_queue = False
        self.queued_ns = 0
        self.timer: Timer | None = None

    def send(self, stubs: Stubs) -> bool:
        """Send it now; it has a slot. False when it ended at once, which freed the slot without a look at the queue."""
        now = time.monotonic_ns()
        left = (self._deadline_ns - now) / 1e9
        if self._concluded.locked() or left <= 0:
            self._unsent()
            self.conclude(_LATE)
            return False
        if self._worker.behind and _REGION in self._body:  # which may find too much, and is seldom asked
            self._unsent()
            self.conclude(BEHIND)
            return False
        self._sent_ns = now
        try:
            self._future = future = stubs.start(INFER, self._body, left, self._metadata)
        except ValueError:  # grpcio's word for a channel that was closed
            self._unsent()
            self.conclude(_CLOSED)
            return False
        future.add_done_callback(self._finished)
        if self._concluded.locked():  # it was cancelled between the look and the send
            future.cancel()
        return True

    def cancel(self) -> None:
        """Nobody waits for the answer: the worker is told so. Nothing happens when it is over."""
        if self._concluded.locked() or self._worker._give_up(self, _CANCELLED):
            return
        self.conclude(_CANCELLED)

    def conclude(self, outcome: Outcome) -> None:
        """End it, if it has not ended; a call that was sent is cancelled unless it is what ends it."""
        if not self._concluded.acquire(blocking=False):
            return
        future = self._future
        if future is not None:
            future.cancel()
        self._done(outcome)

    def may_move(self) -> bool:
        """Whether it does no harm when a second worker gets the request while the first one still has it."""
        try:
            return not writes_shared_memory(self._body)
        except InvalidRequest:
            return True

    @property
    def concluded(self) -> bool:
        return self._concluded.locked()

    def leave_queue(self) -> None:
        """It waits no longer: the timer would keep it, and with it the request's bytes, until the deadline."""
        self.left_queue = True
        if self.timer is not None:
            self.timer.cancel()

    def when_over(self, fn: Callable[[], None]) -> None:
        """Run `fn` when the call is off the wire; at once when it is. One that is just being sent is not."""
        with self._worker._lock:
            if not self.is_over:
                self.on_over = fn
                return
        fn()

    def _unsent(self) -> None:
        after = self._worker.over(self)
        if after is not None:
            after()

    def _finished(self, future: Any) -> None:
        seconds = (time.monotonic_ns() - self._sent_ns) / 1e9
        outcome = outcome_of(future, seconds)
        if outcome.code is Code.CANCELLED and not outcome.reason:
            # Unless it was us: the connection was closed, or reset by a worker that may still be at it.
            outcome = replace(outcome, code=Code.UNAVAILABLE, unsure=True)
        after = self._worker.over(self, lost=outcome.lost and not self.concluded)
        self._worker.send_waiting()
        if self._concluded.acquire(blocking=False):
            if not self._worker._closed:  # else it has left, and its series with it
                self._worker._counters.worker_call("ModelInfer", self._worker.url, seconds)
            self._done(outcome)
        # The answer's bytes hang on the one and the request's on the other, and whoever waited may still know of us.
        self._future, self._body = None, b""
        if after is not None:
            after()


class ControlCall:
    """A call beside inference. `done` is called once, on any thread."""

    __slots__ = ("_done", "_future", "_sent_ns")

    def __init__(
        self,
        stubs: Stubs,
        path: str,
        body: bytes,
        timeout: float,
        metadata: Metadata,
        done: Done,
        *,
        wait: bool = False,
    ) -> None:
        self._done = done
        self._sent_ns = time.monotonic_ns()
        self._future: Any = None
        try:
            self._future = stubs.start(path, body, timeout, metadata, wait=wait)
        except ValueError:
            done(_CLOSED)
            return
        self._future.add_done_callback(self._finished)

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()

    def _finished(self, future: Any) -> None:
        self._done(outcome_of(future, (time.monotonic_ns() - self._sent_ns) / 1e9))


def _close_after(stubs: Stubs, attempts: list[Attempt]) -> None:
    """Close when all of `attempts` are off the wire."""
    if not attempts:
        stubs.close()
        return
    lock, left = Lock(), len(attempts)

    def one_less() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            stubs.close()

    for attempt in attempts:
        attempt.when_over(one_less)
