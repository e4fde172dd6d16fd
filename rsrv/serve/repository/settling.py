"""When a change has settled: two looks that see the same, far enough apart. Pure: times are passed in, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rsrv.serve.repository.snapshot import Seen

COARSE_SECONDS = 2.0
"""No file system in use counts its times in longer steps."""


_FIRST = 0.4
"""When to look after an event, in settle times: a little before the half, so that a late look delays nothing."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The state that a name was seen in since `first`, None = it is gone."""

    state: Seen | None
    first: float


class Settling:
    """Names that have changed, until their change is acted on.

    Two looks half of `settle_seconds` apart have to see the same; when events tell of changes, the second look is
    `settle_seconds` after the last one. Where files have whole seconds for times, a later write within the second
    would go unnoticed, so the looks are further apart.
    """

    def __init__(self, settle_seconds: float) -> None:
        self._settle = settle_seconds
        self._first = _FIRST * settle_seconds
        self._looks: dict[str, _Look] = {}
        self._events: dict[str, float] = {}

    def event(self, names: Iterable[str], now: float) -> None:
        """Something happened to `names` just now."""
        for name in names:
            self._events[name] = now

    def look(self, states: Mapping[str, Seen | None], now: float) -> set[str]:
        """A look at `now` found that the names in `states` differ from what is served. Those that have settled."""
        self._looks = {name: look for name, look in self._looks.items() if name in states}
        settled = set()
        for name, state in states.items():
            before = self._looks.get(name)
            if before is None or not _same(before.state, state):
                self._looks[name] = _Look(state, now)
            elif now >= self._due(name):
                if self._is_stale(name):
                    self._looks[name] = _Look(state, now)
                else:
                    settled.add(name)
        # An event that a look found nothing behind is done with.
        self._events = {name: at for name, at in self._events.items() if name in self._looks or now < at + self._first}
        return settled

    def pending(self) -> set[str]:
        """Names that have to be looked at again at some time."""
        return self._looks.keys() | self._events.keys()

    def due(self, now: float) -> set[str]:
        """Names to look at now."""
        return {name for name in self.pending() if self._due(name) <= now}

    def next_due(self, after: float) -> float | None:
        """When the next look is due; names that were due at `after` wait for something else."""
        return min((due for name in self.pending() if (due := self._due(name)) > after), default=None)

    def _is_stale(self, name: str) -> bool:
        event = self._events.get(name)
        return event is not None and self._looks[name].first <= event

    def _due(self, name: str) -> float:
        half, event, look = self._settle / 2, self._events.get(name), self._looks.get(name)
        if look is None or self._is_stale(name):
            assert event is not None
            return event + self._first
        apart = half
        if look.state is not None and any(file.is_coarse for file in look.state.files.values()):
            apart = max(half, COARSE_SECONDS)
        return max(look.first + apart, event + self._settle if event is not None else 0.0)


def _same(one: Seen | None, other: Seen | None) -> bool:
    return one == other
