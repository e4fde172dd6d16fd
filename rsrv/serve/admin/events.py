"""What changed, in order: a bounded log that operators follow, over whichever face. Single requests are not in it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

CAPACITY = 1024
"""Events that are kept for those who come later, or read slowly."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change.

    Attributes:
        seq: counts from 1 for the life of the process, without gaps.
        time: seconds since 1970, for people; the clock may be set back meanwhile.
        model: its name, "" for a change of the server.
        incarnation: the load of the model that it happened to, 0 for a change of the server.
        type: what changed (``registration``, ``admission``, ``parameter_operation``, ``program``, …).
        old, new: from which value to which; in messages ``from`` and ``to``.
        detail: more for people, such as the text of an error.
    """

    seq: int
    time: float
    model: str
    incarnation: int
    type: str
    old: str
    new: str
    detail: str = ""


class EventLog:
    """Thread safe. `clock` gives seconds since 1970."""

    def __init__(self, capacity: int = CAPACITY, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=capacity)
        self._next = 1
        self._subscriptions: set[Subscription] = set()

    @property
    def first_seq(self) -> int:
        """The oldest event that is kept, or the one that comes next when there is none."""
        with self._lock:
            return self._first

    @property
    def next_seq(self) -> int:
        """What the next event will have."""
        return self._next

    def append(self, model: str, incarnation: int, kind: str, old: str, new: str, detail: str = "") -> Event:
        """Note a change, and wake who waits for one."""
        with self._lock:
            event = Event(self._next, self._clock(), model, incarnation, kind, old, new, detail)
            self._next += 1
            self._events.append(event)
            woken = [each for each in self._subscriptions if each.model in ("", model)]
        # Not under the lock: a wake-up may read.
        for each in woken:
            each.wake()
        return event

    def read(self, from_seq: int = 0, model: str = "") -> tuple[list[Event], int]:
        """The kept events from `from_seq` on, of one model or ("") of all, and the number of the oldest that is kept.

        When `from_seq` is below that number, those between are lost.
        """
        with self._lock:
            return self._read(from_seq, model), self._first

    def subscribe(self, wake: Callable[[], None], *, from_seq: int = 0, model: str = "") -> Subscription:
        """Follow the log from `from_seq` on; 0 = from the next event.

        `wake` is called after each event of the model, on the thread that notes it: it must be quick and must not
        raise. A number beyond the next event is one of an earlier process, so everything that is kept comes, after a
        gap.
        """
        with self._lock:
            subscription = Subscription(self, wake, from_seq or self._next, model)
            self._subscriptions.add(subscription)
            return subscription

    @property
    def _first(self) -> int:
        return self._events[0].seq if self._events else self._next

    def _read(self, from_seq: int, model: str) -> list[Event]:
        begin = max(from_seq - self._first, 0)
        return [event for event in islice(self._events, begin, None) if model in ("", event.model)]

    def _take(self, subscription: Subscription, position: int) -> tuple[int | None, list[Event], int]:
        with self._lock:
            lost = position < self._first or position > self._next
            begin = self._first if lost else position
            return (begin if lost else None), self._read(begin, subscription.model), self._next

    def _drop(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions.discard(subscription)


class Subscription:
    """One reader of the log, at its own pace; close it. `take` is for one thread at a time."""

    def __init__(self, log: EventLog, wake: Callable[[], None], position: int, model: str) -> None:
        self.model = model
        self.wake = wake
        self._log = log
        self._position = position

    def take(self) -> tuple[int | None, Sequence[Event]]:
        """What came since the last call. The first is None; a number says that events before it are lost, when the
        reader was too slow or asked for what is not kept any more."""
        gap, events, self._position = self._log._take(self, self._position)
        return gap, events

    def close(self) -> None:
        """No more wake-ups. Idempotent."""
        self._log._drop(self)
