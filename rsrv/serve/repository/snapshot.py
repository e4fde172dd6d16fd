"""One look at the model directories: which bundles are there and which version of each file. No file is read here."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rsrv.bundle.files import MANIFEST, is_passing

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_SECOND_NS = 1_000_000_000

BROKEN_LINK, DIRECTORY_LINK = -1, -2
"""In the place of the size of what has none."""

Identity = tuple[int, int]
"""Device and inode of a directory."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """Which version of a file this is; the times are in nanoseconds of the file system's clock.

    There is no device number: it may change when a file system is mounted again.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStat:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    @property
    def is_coarse(self) -> bool:
        """Whether its file system seems to count whole seconds: two writes within one leave the same tuple.

        That the time of the last status change is a whole second by chance happens once in millions.
        """
        return self.size >= 0 and self.ctime_ns % _SECOND_NS == 0


@dataclass(frozen=True, slots=True)
class Place:
    """A directory in which a change may concern a bundle; with `only`, a change of this one name in it."""

    path: str
    identity: Identity
    only: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A bundle as it was found.

    Attributes:
        path: root and name; the bundle may lie elsewhere, behind a symbolic link.
        identity: of the directory that `path` leads to.
        files: every file of the bundle, by its name relative to the directory, at any depth. Files behind links are
            those they lead to; of links to directories, which directory it is counts. Hidden files, editors' swap files
            and files still being written are left out.
        places: where changes may happen. They do not count in comparisons.
    """

    name: str
    path: Path
    identity: Identity
    files: Mapping[str, FileStat]
    places: tuple[Place, ...] = field(default=(), compare=False)

    @property
    def root(self) -> Path:
        return self.path.parent

    @property
    def signature(self) -> str:
        """Stands for the versions of all files, for people and documents."""
        hasher = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            hasher.update(
                f"{name}\0{file.size} {file.mtime_ns} {file.ctime_ns} {file.inode}\0".encode(errors="replace")
            )
        return hasher.hexdigest()[:16]

    def is_like(self, other: Seen | None) -> bool:
        """Whether nothing has changed between the two. That the directory is another one does not matter by itself."""
        return other is not None and self.path == other.path and self.files == other.files


class Snapshot(dict[str, Seen]):
    """The bundles that were found, by name; of two with one name the one in the earlier root.

    Attributes:
        roots: those that could be read, and which directory each was.
        bare: directories, in a root, that have no manifest.
        unreadable: roots and directories of bundles that could not be looked at, though they may exist.
    """

    def __init__(self) -> None:
        super().__init__()
        self.roots: dict[Path, Identity] = {}
        self.bare: dict[Path, Place] = {}
        self.unreadable: set[Path] = set()


def scan(
    roots: Sequence[Path | str], include: Collection[str] = (), keep: Mapping[str, Seen] | None = None
) -> Snapshot:
    """What is in `roots` now; with `include`, only those names.

    The bundles in `keep` are not looked at when they are still in their place: they come back as they are. A root or a
    bundle that cannot be read is left out, and in `unreadable`; nothing is raised.
    """
    snapshot, distinct = Snapshot(), set()
    for given in roots:
        root = Path(os.path.abspath(given))
        try:
            identity = _identity(os.stat(root))
            names = sorted(name for name in os.listdir(root) if not is_passing(name))
        except OSError:
            snapshot.unreadable.add(root)
            continue
        if identity in distinct:
            continue
        distinct.add(identity)
        snapshot.roots[root] = identity
        for name in names:
            if name not in snapshot and (not include or name in include):
                kept = (keep or {}).get(name)
                if kept is not None and str(kept.path) == f"{root}/{name}":
                    snapshot[name] = kept
                else:
                    _add(snapshot, name, root / name)
    return snapshot


def versions_of(directory: Path) -> Mapping[str, FileStat]:
    """The version of every file of the bundle in `directory`; empty when that cannot be looked at."""
    files: dict[str, FileStat] = {}
    try:
        for _ in _walk(str(directory), files):
            pass
    except OSError:
        return {}
    return files


def _add(snapshot: Snapshot, name: str, path: Path) -> None:
    try:
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            return
        if not os.path.lexists(path / MANIFEST):
            snapshot.bare[path] = Place(str(path), _identity(status))
            return
        files: dict[str, FileStat] = {}
        places = tuple(dict.fromkeys(_walk(str(path), files)))
    except OSError as error:
        if error.errno not in _GONE:
            snapshot.unreadable.add(path)
        return
    snapshot[name] = Seen(name, path, _identity(status), files, places)


def _walk(top: str, files: dict[str, FileStat]) -> Iterator[Place]:
    """Fill `files` with those below `top`, and yield where they lie. What vanishes meanwhile is left out."""
    yield Place(top, _identity(os.stat(top)))
    pending = [(top, "")]
    while pending:
        directory, prefix = pending.pop()
        try:
            entries = os.scandir(directory)
        except FileNotFoundError:
            continue
        with entries:
            for entry in entries:
                if is_passing(entry.name):
                    continue
                name = prefix + entry.name
                try:
                    if entry.is_symlink():
                        yield from _follow(entry, name, files)
                    elif entry.is_dir(follow_symlinks=False):
                        yield Place(entry.path, _identity(os.stat(entry.path)))
                        pending.append((entry.path, f"{name}/"))
                    elif entry.is_file(follow_symlinks=False):
                        files[name] = FileStat.of(entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue


def _follow(entry: os.DirEntry[str], name: str, files: dict[str, FileStat]) -> Iterator[Place]:
    try:
        status = os.stat(entry.path)
    except OSError:
        files[name] = FileStat(BROKEN_LINK, 0, 0, os.lstat(entry.path).st_ino)
        return
    parent, only = os.path.split(os.path.realpath(entry.path))
    if stat.S_ISDIR(status.st_mode):
        files[name] = FileStat(DIRECTORY_LINK, 0, 0, status.st_ino)
    elif stat.S_ISREG(status.st_mode):
        files[name] = FileStat.of(status)
    yield Place(parent, _identity(os.stat(parent)), only)


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino
