"""The directory of the executable cache: nobody else may write to it, files appear whole, the least used ones go first.

What the files hold is for `cache`. Several processes may use one directory at a time: a file is written under a passing
name and renamed, and one that somebody else has removed meanwhile is simply not there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rsrv.core.errors import CacheError

SUFFIX = ".executable"
_PASSING_SUFFIX = ".tmp"
_PASSING_SECONDS = 3600.0
"""A file that is this old and still has a passing name was left behind by a process that died."""


class CachedFile(NamedTuple):
    """A file's name without its suffix, its bytes, and when it was last used (seconds since the epoch)."""

    name: str
    n_bytes: int
    used: float


class CacheDirectory:
    """Opens ``path`` and holds on to it, so what takes its place later is not used; `close` it.

    Args:
        path: the directory; it is made, with mode 0700, when it is not there and `create` is set. Its last component
            must not be a symbolic link.

    Raises CacheError when it cannot be made or opened, belongs to somebody else, or others may read or write it: what
    lies there is native code that this process runs.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        try:
            if create:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            linked = path.is_symlink()
            blocked = isinstance(error, FileExistsError)
            why = f"{path.parent} is not a directory" if blocked else error.strerror or str(error)
            why = "it is a symbolic link" if linked else why
            raise CacheError(
                f"cache directory {path} cannot be opened: {why}",
                hint="give the directory that the link leads to" if linked else None,
            ) from error
        try:
            _require_private(os.fstat(self._fd), f"cache directory {path}", hint=f"chmod 700 {path}")
        except CacheError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> CacheDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def files(self) -> list[CachedFile]:
        """All entries, the least recently used first."""
        found = []
        for name, status in self._scan():
            if name.endswith(SUFFIX):
                found.append(CachedFile(name.removesuffix(SUFFIX), status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: (file.used, file.name))

    def read(self, name: str, *, touch: bool = True) -> bytes | None:
        """The bytes of an entry, which with `touch` now counts as used; None when it is not there.

        Raises CacheError when it is not a regular file of ours that only we may write, or cannot be read.
        """
        file = name + SUFFIX
        try:
            fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"{self.path / file} cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CacheError(f"{self.path / file} is not a regular file")
            _require_private(status, str(self.path / file), hint=None)
            data = _read(fd, status.st_size)
            if touch:
                with contextlib.suppress(OSError):
                    os.utime(fd)
            return data
        except OSError as error:
            raise CacheError(f"{self.path / file} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        try:
            os.stat(name + SUFFIX, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def write(self, name: str, parts: Sequence[bytes]) -> None:
        """Write an entry, or replace it, at once. Raises OSError, and leaves nothing behind."""
        passing = f".{name}.{os.getpid()}.{secrets.token_hex(4)}{_PASSING_SUFFIX}"
        fd = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            try:
                for part in parts:
                    _write(fd, part)
            finally:
                os.close(fd)
            os.rename(passing, name + SUFFIX, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self._unlink(passing)
            raise

    def remove(self, name: str) -> bool:
        """Whether there was such an entry, and it is gone. Raises OSError when it cannot be removed."""
        return self._unlink(name + SUFFIX)

    def trim(self, max_bytes: int, *, keep: str | None = None) -> int:
        """Remove the least recently used entries until all hold at most `max_bytes`; how many went. `keep` stays."""
        self._sweep()
        files = self.files()
        total = sum(file.n_bytes for file in files)
        removed = 0
        for file in files:
            if total <= max_bytes:
                break
            if file.name == keep:
                continue
            total -= file.n_bytes
            removed += self.remove(file.name)
        return removed

    def _sweep(self) -> None:
        """Remove what processes that died have left half written."""
        before = time.time() - _PASSING_SECONDS
        for name, status in self._scan():
            if name.startswith(".") and name.endswith(_PASSING_SUFFIX) and status.st_mtime < before:
                self._unlink(name)

    def _scan(self) -> Iterator[tuple[str, os.stat_result]]:
        for name in os.listdir(self._fd):
            if name.endswith((SUFFIX, _PASSING_SUFFIX)):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield name, status

    def _unlink(self, file: str) -> bool:
        try:
            os.unlink(file, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True


def _require_private(status: os.stat_result, what: str, *, hint: str | None) -> None:
    if status.st_uid != os.geteuid():
        raise CacheError(
            f"{what} belongs to user {status.st_uid}, wanted {os.geteuid()}, who runs this process",
            hint="executables are native code, so each user needs a directory of their own",
        )
    shared = 0o077 if stat.S_ISDIR(status.st_mode) else 0o022
    if status.st_mode & shared:
        wanted = "0700" if stat.S_ISDIR(status.st_mode) else "0600"
        raise CacheError(f"{what} has mode {stat.S_IMODE(status.st_mode):04o}, wanted {wanted}", hint=hint)


def _read(fd: int, size: int) -> bytes:
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def _write(fd: int, data: bytes) -> None:
    with memoryview(data) as memory:
        done = 0
        while done < len(memory):
            done += os.write(fd, memory[done:])
