"""What is in the files that are served, as digests, and whether a file that seems to have changed really has.

A file counts as a sequence of parts, each with its own digest: of two large files that differ, the first parts mostly
tell. Every version of a file is hashed as a whole at most once, on a thread of low priority.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from rsrv.bundle.files import open_regular
from rsrv.core.errors import BundleError
from rsrv.core.niceness import give_way, join_polite
from rsrv.serve.repository.snapshot import FileStat, Seen

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""Takes about a millisecond."""

Digest = tuple[bytes, ...]
"""The sha256 of each part of a file."""


class _Interrupted(Exception):
    """The thread is to stop, or the file is not the version that was wanted."""


class Contents:
    """The digests of the files that are served. All methods are thread safe; `start` starts its threads."""

    def __init__(self) -> None:
        self._digests: dict[FileStat, Digest] = {}
        self._wanted: dict[str, Seen] = {}
        self._comparisons: deque[tuple[Seen, Seen, Callable[[bool], None]]] = deque()
        self._bell = threading.Condition()
        self._stopping = False
        # Somebody waits for a comparison.
        self._threads = (
            threading.Thread(target=self._run, args=(self._next_comparison,), name="rsrv-watch-compare", daemon=True),
            threading.Thread(target=self._run, args=(self._next_wanted, True), name="rsrv-watch-hash", daemon=True),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads, between two parts of a file, or leaves them behind when they get no processor for that.

        What was asked for is not answered any more.
        """
        with self._bell:
            self._stopping = True
            self._bell.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                join_polite(thread)

    def learn(self, seen: Seen) -> None:
        """`seen` is what is served: hash what is not known of it, when there is time."""
        with self._bell:
            self._wanted[seen.name] = seen
            self._bell.notify_all()

    def retain(self, served: Iterable[Seen]) -> None:
        """Forget the digests of files that are not in `served`."""
        keep = {file for seen in served for file in seen.files.values()}
        with self._bell:
            for file in self._digests.keys() - keep:
                del self._digests[file]

    def knows(self, seen: Seen) -> bool:
        """Whether the digests of all files of `seen` are known."""
        with self._bell:
            return all(file in self._digests for file in seen.files.values() if file.size >= 0)

    # --- comparing ------------------------------------------------------------------------------------------------

    def differ(self, served: Seen, now: Seen) -> bool | None:
        """Whether the files of `now` have another content than those of `served`; None when it takes long to tell.

        Reads one part of each file at most. What is not known to be equal differs.
        """
        files = self._differing(served, now)
        if files is None:
            return True
        is_decided = True
        for _, old, new, path in files:
            digest = self._digest(old)
            if digest is None:
                return True
            if (known := self._digest(new)) is not None:
                if known != digest:
                    return True
                continue
            try:
                first = next(_parts(path, new), None)
            except _Interrupted:
                return True
            if first != (digest[0] if digest else None):
                return True
            if len(digest) > 1:
                is_decided = False
            else:
                self._keep(new, digest)
        return False if is_decided else None

    def compare(self, served: Seen, now: Seen, then: Callable[[bool], None]) -> None:
        """Read all that it takes, on the other thread, and call `then` there with whether they differ."""
        with self._bell:
            self._comparisons.append((served, now, then))
            self._bell.notify_all()

    def _differing(self, served: Seen, now: Seen) -> list[tuple[int, FileStat, FileStat, Path]] | None:
        """The files with another version, small ones first; None when the content cannot be the same."""
        if served.files.keys() != now.files.keys():
            return None
        files = []
        for name, new in now.files.items():
            old = served.files[name]
            if old == new:
                continue
            if old.size != new.size or new.size < 0:
                return None
            files.append((new.size, old, new, now.path / name))
        return sorted(files, key=lambda file: file[0])

    def _compare(self, served: Seen, now: Seen) -> bool:
        files = self._differing(served, now)
        if files is None:
            return True
        for _, old, new, path in files:
            digest = self._digest(old)
            if digest is None:
                return True
            if (known := self._digest(new)) is not None:
                if known != digest:
                    return True
                continue
            wanted = iter(digest)
            for part in self._interruptible(_parts(path, new)):
                if part != next(wanted, None):
                    return True
            self._keep(new, digest)
        return False

    def _digest(self, file: FileStat) -> Digest | None:
        with self._bell:
            return self._digests.get(file)

    def _keep(self, file: FileStat, digest: Digest) -> None:
        with self._bell:
            self._digests[file] = digest

    # --- the threads ----------------------------------------------------------------------------------------------

    def _run(self, take: Callable[[], Callable[[], None] | None], in_background: bool = False) -> None:
        if in_background:
            give_way()
        while (work := self._next(take)) is not None:
            try:
                work()
            except Exception:
                log.exception("watcher: files could not be hashed")

    def _next(self, take: Callable[[], Callable[[], None] | None]) -> Callable[[], None] | None:
        with self._bell:
            while not self._stopping:
                if (work := take()) is not None:
                    return work
                self._bell.wait()
            return None

    def _next_comparison(self) -> Callable[[], None] | None:
        return partial(self._answer, *self._comparisons.popleft()) if self._comparisons else None

    def _next_wanted(self) -> Callable[[], None] | None:
        """Small bundles come first."""
        if not self._wanted:
            return None
        return partial(self._hash, self._wanted.pop(min(self._wanted, key=lambda name: _nbytes(self._wanted[name]))))

    def _answer(self, served: Seen, now: Seen, then: Callable[[bool], None]) -> None:
        try:
            differs = self._compare(served, now)
        except _Interrupted:
            # It changes right now, which the next look finds, too.
            differs = True
        if not self._stopping:
            then(differs)

    def _hash(self, seen: Seen) -> None:
        for name, file in sorted(seen.files.items(), key=lambda item: item[1].size):
            if file.size >= 0 and not self._stopping and self._digest(file) is None:
                with suppress(_Interrupted):
                    self._keep(file, tuple(self._interruptible(_parts(seen.path / name, file))))

    def _interruptible(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            if self._stopping:
                raise _Interrupted
            yield part


def _nbytes(seen: Seen) -> int:
    return sum(file.size for file in seen.files.values())


def _parts(path: Path, version: FileStat) -> Iterator[bytes]:
    """The digests of the parts of `path`. Raises _Interrupted when it is not `version`, or not any more."""
    try:
        fd = open_regular(path, error=BundleError, rule="B-79")
    except BundleError as error:
        raise _Interrupted from error
    buffer = memoryview(bytearray(PART_BYTES))
    with os.fdopen(fd, "rb", buffering=0) as file:
        try:
            while FileStat.of(os.fstat(fd)) == version:
                if not (count := _fill(file.readinto, buffer)):
                    return
                yield hashlib.sha256(buffer[:count]).digest()
            raise _Interrupted
        except OSError as error:
            raise _Interrupted from error


def _fill(readinto: Callable[[memoryview], int | None], buffer: memoryview) -> int:
    """Read until `buffer` is full or the file ends, so that parts have the same borders each time."""
    count = 0
    while count < len(buffer) and (more := readinto(buffer[count:])):
        count += more
    return count
