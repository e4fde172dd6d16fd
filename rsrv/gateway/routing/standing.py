"""Who is asked last: workers that are not ready, that just failed, that fail again and again, and that just returned.

Pure code with the clock passed in, called under the router's lock. Nobody is ever left out for good: what stands here
is asked when there is nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from rsrv.core.config.gateway import OutliersConfig
from rsrv.core.errors import Code
from rsrv.gateway.workers.outcome import Outcome

_NOBODY: frozenset[str] = frozenset()
_SLOWEST = 0.1
"""Share of its requests that a worker gets right after it returned."""

_SLOW, _FAILS, _ABSENT = 1, 2, 3
"""Why a worker is avoided, the better ones first."""

_MODELS = 4096
"""Models of one worker that may cool down at a time."""

_MODEL_CODES = frozenset({Code.NOT_FOUND, Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.INTERNAL, Code.UNKNOWN})
"""What says that a worker does not do well with a model now; anything else is about the request."""


class _Cooldown(NamedTuple):
    """Of one model on one worker: until when, and how long it is; the next one, without a success between, is twice as
    long."""

    until: float
    seconds: float


@dataclass(slots=True)
class _Record:
    ready: bool = True
    draining: bool = False
    failures: int = 0
    ejections: int = 0
    out_until: float = -math.inf
    ejected: bool = False
    slow_since: float | None = None
    credit: float = 0.0
    models: dict[str, _Cooldown] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to tell of it."""
        return self.ready and not self.draining and self.out_until == -math.inf and self.slow_since is None

    def is_out(self, now: float) -> bool:
        """Whether it is ejected at this time."""
        return self.ejected and self.out_until > now


class Standing:
    """`clock` gives monotonic seconds."""

    def __init__(self, config: OutliersConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._special: set[str] = set()
        self._cooling = 0

    # --- what is known of workers -----------------------------------------------------------------------------------

    def joined(self, url: str, *, slowly: bool) -> None:
        """A worker is there, not ready yet; `slowly`: others serve already, so it is to start slowly."""
        record = self._records[url] = _Record(ready=False)
        if slowly:
            record.slow_since = math.inf  # begins when it is ready
        self._special.add(url)

    def left(self, url: str) -> None:
        record = self._records.pop(url, None)
        if record is not None:
            self._cooling -= len(record.models)
        self._special.discard(url)

    def probed(self, url: str, ready: bool) -> None:
        record = self._records.get(url)
        if record is None:
            return
        if ready and not record.ready:
            self._cooling -= len(record.models)
            record.models.clear()
        if ready and not record.ready and (record.slow_since is not None or record.failures or record.ejections):
            self._start_slowly(record)
        elif not ready and record.ready:
            record.slow_since = math.inf
        record.ready = ready
        self._settle(url, record)

    def drained(self, url: str, draining: bool) -> None:
        record = self._records.get(url)
        if record is not None and record.draining != draining:
            record.draining = draining
            self._settle(url, record)

    # --- what became of calls ---------------------------------------------------------------------------------------

    def succeeded(self, url: str, model: str = "") -> None:
        record = self._records.get(url)
        if record is None:
            return
        if record.failures:
            record.failures = 0
            self._settle(url, record)
        if record.models and record.models.pop(model, None) is not None:
            self._cooling -= 1

    def failed(self, url: str, model: str, outcome: Outcome) -> float:
        """A call to a worker did not end well. What the request itself is to blame for changes nothing.

        Returns for how many seconds the worker is taken out now because its calls fail; 0 = it is not.
        """
        record = self._records.get(url)
        if record is None or not outcome.sent or outcome.code not in _MODEL_CODES:
            return 0.0
        now, config = self._clock(), self._config
        own = outcome.lost or (outcome.code in (Code.INTERNAL, Code.UNKNOWN) and not outcome.reason)
        if not own and outcome.reason not in ("stopping", "shed"):
            if config.cooldown_seconds:
                self._cool_down(record, model, now, again=outcome.moves_on)
            return 0.0
        seconds = 0.0
        record.out_until = max(record.out_until, now + config.cooldown_seconds)
        if own and not record.is_out(now):  # else it was on its way before, or the last resort
            record.failures += 1
            if config.consecutive_failures and record.failures >= config.consecutive_failures and self._may_eject():
                record.failures = 0
                record.ejections += 1
                record.ejected = True
                seconds = min(config.eject_seconds * record.ejections, config.max_eject_seconds)
                record.out_until = max(record.out_until, now + seconds)
        self._special.add(url)
        return seconds

    # --- while choosing ---------------------------------------------------------------------------------------------

    def avoid(self, model: str, among: Collection[str] = ()) -> frozenset[str]:
        """The workers to ask last for a request of this model; moves the slow starts on by one request.

        When that would be all of `among`, the best of them are not avoided: one that starts slowly is better than one
        that fails, and that is better than one that is not there.
        """
        if not self._special and not self._cooling:
            return _NOBODY
        now = self._clock()
        found = {url: rank for url in tuple(self._special) if (rank := self._rank(url, now))}
        if self._cooling:
            for url, record in self._records.items():
                if record.models and self._cools(record, model, now):
                    found[url] = max(found.get(url, 0), _FAILS)
        if among and all(url in found for url in among):
            best = min(found[url] for url in among)
            return frozenset(url for url, rank in found.items() if rank > best)
        return frozenset(found)

    def is_ejected(self, url: str) -> bool:
        record = self._records.get(url)
        return record is not None and record.is_out(self._clock())

    def _rank(self, url: str, now: float) -> int:
        """How much the worker is to be avoided; 0 = it is not."""
        record = self._records[url]
        if record.out_until != -math.inf and record.out_until <= now:
            record.out_until = -math.inf
            if record.ejected:
                record.ejected = False
                self._start_slowly(record)
        self._settle(url, record)
        if not record.ready or record.draining:
            return _ABSENT
        if record.out_until > now:
            return _FAILS
        return _SLOW if record.slow_since is not None and not self._gets_one(record, now) else 0

    def _gets_one(self, record: _Record, now: float) -> bool:
        """Whether a worker that returned may be chosen for this request: a share that grows to all of them."""
        assert record.slow_since is not None
        share = (now - record.slow_since) / self._config.slow_start_seconds
        if share >= 1.0:
            record.slow_since = None
            record.ejections = 0
            return True
        record.credit += max(share, _SLOWEST)
        if record.credit < 1.0:
            return False
        record.credit -= 1.0
        return True

    def _cool_down(self, record: _Record, model: str, now: float, *, again: bool) -> None:
        """Longer each time when failures follow each other and `again` says that each costs a second attempt: a worker
        that lists what it does not serve would use up the budget of those, a little for each of its models."""
        before = record.models.get(model)
        if before is None:
            if not self._has_room(record, now):
                return
            self._cooling += 1
        elif before.until > now:
            return
        seconds = least = self._config.cooldown_seconds
        if before is not None and again:
            seconds = min(2 * before.seconds, max(least, self._config.eject_seconds))
        record.models[model] = _Cooldown(now + seconds, seconds)

    def _cools(self, record: _Record, model: str, now: float) -> bool:
        cooldown = record.models.get(model)
        if cooldown is None:
            return False
        if cooldown.until > now:
            return True
        if cooldown.until + max(cooldown.seconds, self._config.eject_seconds) <= now:
            # Nobody has asked, or it would have failed or succeeded since.
            del record.models[model]
            self._cooling -= 1
        return False

    def _has_room(self, record: _Record, now: float) -> bool:
        """For one model more; those that nobody asked for since they cooled down make place."""
        if len(record.models) >= _MODELS:
            cold = [model for model, cooldown in record.models.items() if cooldown.until <= now]
            for model in cold:
                del record.models[model]
            self._cooling -= len(cold)
        return len(record.models) < _MODELS

    def _start_slowly(self, record: _Record) -> None:
        record.slow_since = self._clock() if self._config.slow_start_seconds > 0 else None
        record.credit = 1.0 - _SLOWEST  # the next request is for it: it is there again, and that is seen at once

    def _may_eject(self) -> bool:
        now = self._clock()
        out = sum(record.is_out(now) for record in self._records.values())
        return out + 1 <= self._config.max_ejected_fraction * len(self._records)

    def _settle(self, url: str, record: _Record) -> None:
        if record.idle:
            self._special.discard(url)
        else:
            self._special.add(url)
