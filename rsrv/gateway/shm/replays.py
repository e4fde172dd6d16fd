"""Telling a worker of shared memory that it does not know: one step after the other, in the order of the changes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rsrv.gateway.faces.fanout import Done, unanswered
from rsrv.gateway.shm.regions import Regions, Step, forget
from rsrv.gateway.workers.outcome import Outcome

if TYPE_CHECKING:
    from rsrv.gateway.workers.worker import Worker

log = logging.getLogger(__name__)

STEP_SECONDS = 5.0
"""How long a worker may take for one step; after that the rest of its replay is left for later."""
QUIET_SECONDS = 1.0
"""A request that names a region nobody registered must not make the gateway register all others for each try."""

Told = Callable[[bool], object]
"""Called when a replay is over, with whether the worker took every step; on any thread."""


@dataclass(eq=False, slots=True)
class Replay:
    """The steps that one worker is still to be told. Its gate is closed meanwhile: ModelInfer waits."""

    worker: Worker
    incarnation: str
    steps: deque[Step] = field(default_factory=deque)
    whole: bool = False
    """Whether it began with everything that is registered."""
    told: list[Told] = field(default_factory=list)
    taken: int = 0
    refused: int = 0
    lost: bool = False


class Replays:
    """At most one replay per worker. `lock` is the one that guards `regions`; methods take it.

    `send` calls a worker with one step and what its end is to be told to. `on_begin` is called under the lock with the
    address of each worker whose replay begins.
    """

    def __init__(
        self,
        regions: Regions,
        lock: threading.Lock,
        send: Callable[[Worker, Step, Done], None],
        *,
        on_begin: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._regions = regions
        self._lock = lock
        self._send = send
        self._on_begin = on_begin
        self._clock = clock
        self._running: dict[str, Replay] = {}
        self._last: dict[str, tuple[str, float]] = {}

    @property
    def running(self) -> frozenset[str]:
        """Addresses of the workers that are being told. Under the lock."""
        return frozenset(self._running)

    def tell_all(self, worker: Worker, told: Told, *, needed: bool = True) -> bool:
        """Tell `worker` everything, then call `told`; without `needed` only when that may change something.

        False, without a call of `told`, when it cannot: there is nothing to tell, or it was told a moment ago.
        """
        url = worker.url
        with self._lock:
            replay = self._running.get(url)
            if replay is not None:
                if not (replay.whole and replay.incarnation == worker.incarnation):
                    replay.steps.extend(self._regions.catch_up(url))
                    replay.whole, replay.incarnation = True, worker.incarnation
                replay.told.append(told)
                return True
            if not needed and not self._regions.is_behind(url):
                incarnation, ended = self._last.get(url, ("", -QUIET_SECONDS))
                if incarnation == worker.incarnation and self._clock() - ended < QUIET_SECONDS:
                    return False
            steps = self._regions.catch_up(url)
            if not steps and not needed:
                worker.behind = False
                return False
            replay = self._begin(worker, steps)
            replay.whole = True
            replay.told.append(told)
        self.run(replay)
        return True

    def tell(self, worker: Worker, step: Step) -> Replay | None:
        """Tell `worker` one step more. Under the lock; what it returns is to be `run` without it."""
        # An older region of that name, which it may have, would stay there if it cannot take this one.
        steps = [forget(step.name), step] if step.registers else [step]
        replay = self._running.get(worker.url)
        if replay is not None:
            replay.steps.extend(steps)
            return None
        return self._begin(worker, steps)

    def run(self, replay: Replay) -> None:
        """Begin a new replay."""
        replay.worker.hold()
        self._advance(replay)

    def _begin(self, worker: Worker, steps: list[Step]) -> Replay:
        replay = self._running[worker.url] = Replay(worker, worker.incarnation, deque(steps))
        self._on_begin(worker.url)
        return replay

    def _advance(self, replay: Replay) -> None:
        """Send the next step. The last act, without any, is to take the worker out of those that are being told."""
        while True:
            with self._lock:
                step = replay.steps.popleft() if replay.steps else None
                told, replay.told = ([], replay.told) if step else (replay.told, [])
                if step is None and not told:
                    del self._running[replay.worker.url]
                    replay.worker.behind = self._regions.is_behind(replay.worker.url)
                    self._ended(replay)
                    break
            if step is not None:
                self._send(replay.worker, step, partial(self._answered, replay, step))
                return
            # Before it is taken out: a change that comes while the worker is let in again is still told to it.
            for fn in told:
                self._say(fn, not replay.lost and not replay.refused)
        self._log(replay)
        replay.worker.release()

    def _ended(self, replay: Replay) -> None:
        """Remember when that was, as long as it matters: workers come and go, and none may leave a trace. Under the
        lock."""
        now = self._clock()
        self._last = {url: last for url, last in self._last.items() if now - last[1] < QUIET_SECONDS}
        self._last[replay.worker.url] = (replay.incarnation, now)

    def _answered(self, replay: Replay, step: Step, outcome: Outcome) -> None:
        if outcome.ok:
            replay.taken += 1
        elif not unanswered(outcome):
            replay.refused += 1
            if not step.registers:
                with self._lock:
                    self._regions.misses(replay.worker.url, step)
            log.debug("a worker refused a region worker=%s region=%r %s", replay.worker.name, step.name, outcome.text)
        else:
            with self._lock:
                replay.lost = True
                self._regions.breaks_off(replay.worker.url, (step, *replay.steps))
                replay.steps.clear()
        self._advance(replay)

    @staticmethod
    def _say(fn: Told, all_well: bool) -> None:
        try:
            fn(all_well)
        except Exception:
            log.exception("what follows a replay of shared memory failed")

    @staticmethod
    def _log(replay: Replay) -> None:
        if not (replay.taken or replay.refused or replay.lost):
            return
        level = logging.WARNING if replay.lost or replay.refused else logging.INFO
        log.log(
            level,
            "shared memory replayed worker=%s taken=%d refused=%d complete=%s",
            replay.worker.name,
            replay.taken,
            replay.refused,
            str(not replay.lost).lower(),
        )
