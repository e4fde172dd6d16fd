"""`Triggers`: when models are placed anew (spec gateway-node 2.6.4). The clock is device time, but for changes."""

from __future__ import annotations

from collections.abc import Mapping

from rsrv.gateway.scheduling.knobs import Knobs
from rsrv.gateway.scheduling.reports import Trigger
from rsrv.gateway.workers.poll import Poll

CHANGE_SECONDS = 30.0
"""Time from one repack because workers or models came or went to the next, on average."""
CHANGE_BURST = 3
"""So many of them may follow one another at once: a worker that dies and comes back is not to wait for its share."""


class Triggers:
    """What has come together since the last repack, and which workers and models that was for.

    Attributes:
        accumulated: device seconds that the fleet has used since the last repack; whoever polls the workers adds.
        first_done: whether the budget of the first repack is used up.
    """

    def __init__(self) -> None:
        self.accumulated = 0.0
        self.first_done = False
        self._workers: tuple[str, ...] | None = None
        self._hosts: Mapping[str, tuple[str, ...]] = {}
        self._allowed = float(CHANGE_BURST)
        self._allowed_at = 0.0

    def threshold(self, knobs: Knobs) -> float:
        """Device seconds from one repack to the next."""
        return knobs.repack_budget(first_done=self.first_done)

    def due(self, members: Poll, knobs: Knobs, now: float, *, forced: bool) -> Trigger | None:
        """Why models are to be placed anew on `members` now; None when they are not."""
        if self._workers is None:
            return "startup"
        if forced:
            return "operator"
        if self.accumulated >= self.threshold(knobs):
            return "compute"
        self._allowed = min(CHANGE_BURST, self._allowed + (now - self._allowed_at) / CHANGE_SECONDS)
        self._allowed_at = now
        if self._allowed < 1.0:
            return None
        if members.polled != self._workers:
            return "membership"
        return "models" if members.hosts != self._hosts else None

    def done(self, trigger: Trigger, members: Poll, now: float) -> None:
        """Models have been placed on `members`."""
        self.accumulated = 0.0
        self.first_done |= trigger == "compute"
        self._workers, self._hosts = members.polled, members.hosts
        if trigger in ("membership", "models"):
            self._allowed -= 1.0
