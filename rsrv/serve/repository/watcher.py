"""The thread that follows the model directories: it polls them, and looks sooner where events tell of changes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.serve.repository.diff import Change
from rsrv.serve.repository.events import Hint, InotifyObserver, Observer
from rsrv.serve.repository.follower import Follower
from rsrv.serve.repository.memory import Tombstone
from rsrv.serve.repository.snapshot import Place, Snapshot
from rsrv.serve.repository.target import Target

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig

log = logging.getLogger(__name__)

_MIN_GAP_SECONDS, _MAX_GAP_SECONDS = 0.02, 0.05
"""Between two looks, in between as long as the last one took, so that many events do not make for nothing but looks."""


@dataclass(slots=True, eq=False)
class _Poll:
    """Somebody waits for a round; `until` is when it ends at the latest, None = it has not begun."""

    until: float | None = None
    changes: list[Change] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


class Watcher:
    """Keeps `target` at what the model directories of `config` hold, from `start` to `stop`.

    Args:
        clock: monotonic seconds.
        observer: makes what gives hints of changes; it may raise OSError, then there are only polls.
    """

    def __init__(
        self,
        config: ServerConfig,
        target: Target,
        *,
        clock: Callable[[], float] = time.monotonic,
        observer: Callable[[Hint], Observer] | None = InotifyObserver,
    ) -> None:
        self._poll_seconds = config.model_poll_seconds
        self._settle_seconds = config.model_settle_seconds
        self._roots = [Path(os.path.abspath(root)) for root in config.model_dirs]
        self._clock = clock
        self._make_observer = observer
        self._observer: Observer | None = None
        self._bell = threading.Condition()
        self._stopping = False
        self._polls: list[_Poll] = []
        self._follower = Follower(
            target,
            roots=config.model_dirs,
            include=config.models_include,
            settle_seconds=config.model_settle_seconds,
            clock=clock,
            wake=self._ring,
        )
        self._thread = threading.Thread(target=self._run, name="rsrv-watcher", daemon=True)

    def seed(self, snapshot: Snapshot) -> None:
        """What `scan` found before the server loaded it, so that a change made meanwhile is found. Before `start`."""
        self._follower.seed(snapshot)

    def start(self) -> None:
        self._follower.contents.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the threads; changes under way go on without the watcher. A second call does nothing."""
        with self._bell:
            self._stopping = True
            self._bell.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._follower.contents.stop()

    def poll_now(self, timeout: float | None = None) -> list[Change]:
        """Look at everything now. Returns the changes that were begun by the time that they had settled.

        One look when nothing has changed, else another one at most `model_settle_seconds` after it; what keeps changing
        is not waited for. `timeout` seconds in any case. Whether the changes succeed is told elsewhere.
        """
        poll = _Poll()
        with self._bell:
            if self._stopping or not self._thread.is_alive():
                return []
            self._polls.append(poll)
            self._bell.notify_all()
        poll.done.wait(timeout)
        return list(poll.changes)

    def request_poll(self) -> None:
        """As `poll_now`, without waiting; for signal handlers' threads."""
        with self._bell:
            self._polls.append(_Poll())
            self._bell.notify_all()

    def tombstone(self, name: str) -> None:
        """`name` was unregistered: the watcher does not load it again before the files change that it has now."""
        self._follower.tombstone(name)

    def adopt(self, name: str, path: Path) -> bool:
        """The bundle in `path` is about to be registered by somebody else; see `Follower.adopt`."""
        return self._follower.adopt(name, path)

    def abandon(self, name: str) -> None:
        """It was not registered after all."""
        self._follower.abandon(name)

    def clear_tombstone(self, name: str) -> None:
        """`name` was registered again, by somebody else: its directory is followed as before."""
        self._follower.clear_tombstone(name)

    def tombstones(self) -> list[Tombstone]:
        return self._follower.tombstones()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._observer = self._observe()
        try:
            self._loop()
        finally:
            if self._observer is not None:
                self._observer.stop()
            with self._bell:
                polls, self._polls = self._polls, []
            for poll in polls:
                poll.done.set()

    def _observe(self) -> Observer | None:
        if self._make_observer is None:
            return None
        try:
            return self._make_observer(self._on_hint)
        except OSError as error:
            log.warning("watcher: changes are found by polling only why=%s", error)
            return None

    def _loop(self) -> None:
        next_poll, looked, not_before = self._clock(), self._clock(), self._clock()
        while True:
            with self._bell:
                while not self._stopping and not self._is_due(next_poll, looked, not_before):
                    self._bell.wait(self._seconds_left(next_poll, looked, not_before))
                if self._stopping:
                    return
                asked = [poll for poll in self._polls if poll.until is None]
            looked = self._clock()
            is_poll = bool(asked) or looked >= next_poll
            if is_poll:
                next_poll = looked + self._poll_seconds
            self._look(looked, is_poll, asked)
            took = self._clock() - looked
            not_before = self._clock() + min(_MAX_GAP_SECONDS, max(_MIN_GAP_SECONDS, took))

    def _look(self, began: float, is_poll: bool, asked: list[_Poll]) -> None:
        changes: list[Change] = []
        try:
            changes = self._follower.look(poll=is_poll)
            self._watch_places()
        except Exception:
            log.warning("watcher: a round failed", exc_info=True)
        with self._bell:
            # From its end, however long it took: what it saw has then settled at the look that ends the poll.
            for poll in asked:
                poll.until = self._clock() + self._settle_seconds
            for poll in self._polls:
                if poll.until is not None:
                    poll.changes += changes
            ended = [
                poll
                for poll in self._polls
                if poll.until is not None and (began >= poll.until or not self._follower.is_waiting)
            ]
            self._polls = [poll for poll in self._polls if poll not in ended]
        for poll in ended:
            poll.done.set()

    def _watch_places(self) -> None:
        if self._observer is None:
            return
        snapshot = self._follower.snapshot
        places: dict[str, Collection[Place]] = {path.name: (place,) for path, place in snapshot.bare.items()}
        places.update({name: seen.places for name, seen in snapshot.items()})
        roots = [Place(str(root), identity) for root, identity in snapshot.roots.items()]
        roots += [link for root in self._roots if (link := _link_to(root, snapshot)) is not None]
        if news := self._observer.follow(roots, places):
            self._follower.event(news, self._clock())

    def _is_due(self, next_poll: float, looked: float, not_before: float) -> bool:
        if any(poll.until is None for poll in self._polls):
            return True
        return self._seconds_left(next_poll, looked, not_before) <= 0

    def _seconds_left(self, next_poll: float, looked: float, not_before: float) -> float:
        due = self._follower.next_due(looked)
        ends = min((poll.until for poll in self._polls if poll.until is not None), default=next_poll)
        at = min(next_poll, ends, next_poll if due is None else max(due, not_before))
        return at - self._clock()

    def _on_hint(self, names: Collection[str] | None, is_new: bool) -> None:
        self._follower.event(names, self._clock())
        if is_new:
            self._follower.touch(names)
        self._ring()

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()


def _link_to(root: Path, snapshot: Snapshot) -> Place | None:
    """Where it can be seen that `root`, a link, leads elsewhere, or that one that is away comes back."""
    if root not in snapshot.unreadable and not root.is_symlink():
        return None
    try:
        parent = os.stat(root.parent)
    except OSError:
        return None
    return Place(str(root.parent), (parent.st_dev, parent.st_ino), root.name)
