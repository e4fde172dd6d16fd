"""Tells which bundles something happens to, from the file system's events. They only shorten the wait: none is needed.

watchdog's observers hold moves back for half a second, to pair them; so its reader of inotify is used, below them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from watchdog.observers.inotify_c import CallbackId, InotifyConstants, InotifyEvent, InotifyFD, Mask, WatchDescriptor

from rsrv.bundle.files import is_passing
from rsrv.serve.repository.snapshot import Identity, Place

log = logging.getLogger(__name__)

# Writes are not among them: a large file that is copied would make thousands, and its end is told by the close.
_MASK = Mask(
    InotifyConstants.IN_ATTRIB
    | InotifyConstants.IN_CLOSE_WRITE
    | InotifyConstants.IN_MOVE
    | InotifyConstants.IN_CREATE
    | InotifyConstants.IN_DELETE
    | InotifyConstants.IN_DELETE_SELF
    | InotifyConstants.IN_MOVE_SELF
    | InotifyConstants.IN_ONLYDIR
)

Hint = Callable[[Collection[str] | None, bool], None]
"""Told the names of bundles that something happened to, None = perhaps all; and whether a directory or a link is new,
so that events may be missed until `follow` is told of it."""


class Observer(Protocol):
    """Where hints come from."""

    def follow(self, roots: Collection[Place], places: Mapping[str, Collection[Place]]) -> set[str]:
        """Watch `roots` and, by the names of bundles, `places`; nothing else any more.

        Returns the names with a place that was not watched before: what happened there until now was not told.
        """
        ...

    def stop(self) -> None: ...


class InotifyObserver:
    """Hints from inotify; `hint` is called on its own thread. Raises OSError when the system gives no instance."""

    def __init__(self, hint: Hint) -> None:
        self.hint = hint
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._directories: dict[Identity, _Directory] = {}
        self._is_limited = False
        self._inotify = InotifyFD()
        self._inotify.start()

    def stop(self) -> None:
        self._inotify.stop()
        self._inotify.join()

    def follow(self, roots: Collection[Place], places: Mapping[str, Collection[Place]]) -> set[str]:
        wanted: dict[Identity, _Directory] = {}
        for place in roots:
            _add(wanted, place, None)
        for name, some in places.items():
            for place in some:
                _add(wanted, place, name)
        with self._lock:
            known = dict(self._directories)
        news: set[str] = set()
        for identity, directory in wanted.items():
            if (before := known.pop(identity, None)) is not None:
                before.become(directory)
            elif self._watch(identity, directory):
                news.update(*directory.concerns.values())
        self._forget(known)
        return news

    def _watch(self, identity: Identity, directory: _Directory) -> bool:
        directory.observer, directory.identity = self, identity
        directory.id = CallbackId(next(self._ids))
        with self._lock:
            # Known before its first event.
            self._directories[identity] = directory
        try:
            directory.wd = self._inotify.add_callback(os.fsencode(directory.path), _MASK, directory, directory.id)
        except OSError as error:
            self.drop(directory)
            if not isinstance(error, FileNotFoundError | NotADirectoryError) and not self._is_limited:
                self._is_limited = True
                log.warning("watcher: some changes are found by polling only dir=%s why=%s", directory.path, error)
            return False
        return True

    def _forget(self, directories: Mapping[Identity, _Directory]) -> None:
        for directory in directories.values():
            if self.drop(directory):
                self._inotify.remove_callbacks([(directory.wd, directory.id)])

    def drop(self, directory: _Directory) -> bool:
        """`directory` is not watched any more; False when it was not."""
        with self._lock:
            if self._directories.get(directory.identity) is not directory:
                return False
            del self._directories[directory.identity]
            return True


class _Directory:
    """One watched directory; what happens to a name in it may concern bundles.

    Attributes:
        is_root: whether its entries are bundles.
        leads: entries that lead to roots.
        concerns: names of bundles, by the one entry that matters to them; None = all entries do.
    """

    observer: InotifyObserver
    identity: Identity
    id: CallbackId
    wd: WatchDescriptor

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_root = False
        self.leads: set[str] = set()
        self.concerns: dict[str | None, set[str]] = {}

    def become(self, other: _Directory) -> None:
        """The same directory, with other names."""
        self.path, self.is_root, self.leads, self.concerns = other.path, other.is_root, other.leads, other.concerns

    def on_event(self, event: InotifyEvent) -> None:
        hint, entry = self.observer.hint, os.fsdecode(event.name)
        if not entry:
            if event.is_delete_self or event.is_move_self:
                hint(None if self.is_root else self.concerns.get(None, ()), False)
            return
        if entry in self.leads:
            hint(None, True)
            return
        is_new = event.is_create or event.is_moved_to
        is_link = is_new and os.path.islink(os.path.join(self.path, entry))
        names = set(self.concerns.get(entry, ()))
        if is_passing(entry):
            if is_link:
                # Bundles may lie behind it, as behind Kubernetes' ``..data``.
                hint(None if self.is_root else names.union(*self.concerns.values()), event.is_moved_to)
            elif names:
                hint(names, False)
            return
        names |= self.concerns.get(None, set())
        if self.is_root:
            names.add(entry)
        if names:
            hint(names, is_link or (is_new and event.is_directory))

    def on_watch_deleted(self, wd: WatchDescriptor) -> None:
        self.observer.drop(self)

    def on_queue_overflow(self) -> None:
        self.observer.hint(None, True)


def _add(wanted: dict[Identity, _Directory], place: Place, name: str | None) -> None:
    """`name` is that of a bundle; None for a root, or with `only` for the link that leads to one."""
    directory = wanted.setdefault(place.identity, _Directory(place.path))
    if name is not None:
        directory.concerns.setdefault(place.only, set()).add(name)
    elif place.only is None:
        directory.is_root = True
    else:
        directory.leads.add(place.only)
