"""A weights file as it was opened, and whether a later look at it finds the same bytes. Tensors are read elsewhere.

The file stays open: what replaces it under its name, or moves its directory, does not take the old bytes away.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rsrv.bundle.files import open_regular
from rsrv.bundle.safetensors import WeightEntry, WeightsHeader, read_header
from rsrv.core.errors import WeightsError

SHARED_BYTES = 64 << 10
"""Tensors below this size are never shared between models: the bookkeeping costs more than they do."""

_SETTLED_NS = 50_000_000
"""The times of a file advance in steps, of 10 ms at most on Linux: two changes within a step leave the same times."""

_HASHED_BYTES = 8 << 20
"""At a time; in between it is asked whether to go on. 100 MB take 75 ms on a processor with instructions for it;
reading them takes 25 from the page cache, 100 from a disk of 1 GB/s. So it is done once, and after a file was touched.
"""

Tensors = Callable[[], Iterable[tuple[WeightEntry, np.ndarray]]]
"""Gives tensors that were read: their bytes in C order, in one axis."""


def go_on() -> None:
    """Nobody wants to interrupt. What else is called like this, between two parts of long work, may raise."""


@dataclass(frozen=True, slots=True)
class ContentToken:
    """Which version of a file on disk this is; equal tokens mean equal bytes, once they are settled.

    There is no device number: it may differ between containers that mount the same file system.
    """

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> ContentToken:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_settled(self, now_ns: int) -> bool:
        """Whether a change after `now_ns`, in Unix time, would give another token."""
        return now_ns - self.ctime_ns > _SETTLED_NS


class WeightsFile:
    """An open weights file; `open_weights` makes them. All methods are thread safe.

    Attributes:
        path: where it was opened.
        header: what it declares.
    """

    def __init__(
        self, path: Path, header: WeightsHeader, fd: int, status: os.stat_result, clock: Callable[[], int]
    ) -> None:
        self.path = path
        self.header = header
        self._fd = fd
        self._token = ContentToken.of(status)
        # By tensor, of the bytes that a load gives. The declared ones of a column-major file are of the stored bytes.
        self._digests = {} if header.column_major else dict(header.tensor_digests)
        # Of these the digest is taken when they are loaded for the first time.
        self._undeclared = {
            entry.name for entry in header.tensors.values() if entry.nbytes and entry.name not in self._digests
        }
        self._contents: dict[str, str] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, os.close, fd)

    @property
    def token(self) -> ContentToken:
        """The version on disk that `header` belongs to."""
        return self._token

    @property
    def column_major(self) -> bool:
        return self.header.column_major

    @property
    def model(self) -> str:
        """For log lines: the name of the directory."""
        return self.path.parent.name

    def fileno(self) -> int:
        """The descriptor; -1 after `close`."""
        return self._fd

    def close(self) -> None:
        """Only when nobody reads it any more. A second call does nothing; without one it happens with the last
        reference."""
        self._fd = -1
        self._close()

    def is_shareable(self, entry: WeightEntry) -> bool:
        """Whether other models may use this tensor, too, once its bytes are known to be the same.

        Digests of a format 2.0 file are those of the stored bytes, which nobody uses as they are.
        """
        return (
            entry.nbytes >= SHARED_BYTES and entry.name in self.header.tensor_digests and not self.header.column_major
        )

    # --- what is known of the bytes -----------------------------------------------------------------------------------

    def contents(self) -> Mapping[str, str]:
        """What is known of its tensors: name to a key that stands for exactly one content in this process.

        Empty when the file was touched. Raises WeightsError when its size is another one, or it cannot be looked at.
        """
        token = ContentToken.of(self._stat())
        with self._lock:
            if token == self._token:
                return dict(self._contents)
            if token.size != self._token.size:
                raise self._changed(f"it has {token.size} bytes, not {self._token.size}")
            return {}

    def is_current(self) -> bool:
        """Whether the file still is the version `token`. Raises WeightsError when it cannot be looked at."""
        return ContentToken.of(self._stat()) == self._token

    def seen(self) -> ContentToken | None:
        """The version that is there now, which may be another one than was opened; None when it cannot be looked at."""
        try:
            return ContentToken.of(self._stat())
        except WeightsError:
            return None

    def is_settled(self) -> bool:
        """False while the file was written so short a time ago that it may change once more without a trace."""
        return self._token.is_settled(self._clock())

    def learn(self, contents: Mapping[str, str], token: ContentToken) -> bool:
        """Remember keys of tensors that were read while the file was the version `token`.

        False, and nothing is kept, when the file is another version now, or not settled yet.
        """
        with self._lock:
            if token != self._token or not self.is_settled() or not self.is_current():
                return False
            self._contents.update(contents)
            return True

    def confirm(self, tensors: Tensors, check: Callable[[], None] = go_on) -> bool:
        """After reading: raise WeightsError unless the bytes of `tensors`, all that was read, belong to `header`.

        True when the file is still the version that was opened. False when it was touched, or lost or gained a name, or
        was written again, but all that was read has the right digests; from now on that version counts as the one that
        was opened. Those are the declared ones; of tensors without one, what the first load found.

        Raises what `check` raises, too, which is called now and then.
        """
        token = ContentToken.of(self._stat())
        with self._lock:
            if token == self._token:
                self._take_digests(tensors, check)
                return True
            problem = self._difference(token, tensors, check)
            if problem is not None:
                raise self._changed(problem)
            self._token = token
            self._contents.clear()
            return False

    def remember(self, tensors: Tensors, check: Callable[[], None] = go_on) -> None:
        """`tensors` were not read here, but another worker has found them right for the version that is there now."""
        with self._lock:
            if self._undeclared and self.seen() == self._token:
                self._take_digests(tensors, check)

    def _take_digests(self, tensors: Tensors, check: Callable[[], None]) -> None:
        if not self._undeclared:
            return
        for entry, array in tensors():
            if entry.name in self._undeclared:
                self._digests[entry.name] = _sha256(array, check)
                self._undeclared.discard(entry.name)

    def _difference(self, token: ContentToken, tensors: Tensors, check: Callable[[], None]) -> str | None:
        """What is not the same in the version `token`, of which `tensors` were read. None = nothing is.

        Times prove nothing: whoever writes into a file can set its mtime back, and the ctime changes with every link.
        """
        if token.size != self._token.size:
            return f"it has {token.size} bytes, not {self._token.size}"
        try:
            if read_header(self._fd, path=self.path, column_major=self.column_major) != self.header:
                return "its header is another one"
        except WeightsError:
            return "its header is another one"
        for entry, array in tensors():
            if entry.name in self._undeclared:
                return (
                    "its times are others, and it was not loaded before, so its tensors cannot be proved to be the "
                    f"same: it declares no digest of {entry.name!r}"
                )
            if _sha256(array, check) != self._digests[entry.name]:
                return f"it was written to, tensor {entry.name!r} is not the same"
        return None

    def _stat(self) -> os.stat_result:
        try:
            return os.fstat(self._fd)
        except OSError as error:
            raise self.unreadable(error) from error

    def _changed(self, what: str) -> WeightsError:
        return WeightsError(
            f"{self.path} changed on disk since it was opened: {what}; requests that need it are refused until the "
            "model is loaded again, or the file is what it was",
            rule="B-60",
            file=self.path.name,
            hint="replace files by renaming new ones over them; a rewrite in place breaks what serves from the old one",
        )

    def unreadable(self, error: OSError) -> WeightsError:
        problem = f"{self.path} cannot be read: {error.strerror or error}"
        return WeightsError(problem, rule="B-60", file=self.path.name)


def open_weights(
    path: Path | str, *, column_major: bool = False, clock: Callable[[], int] = time.time_ns
) -> WeightsFile:
    """Open the weights file at `path` and read its header; `column_major` as for `read_header`.

    `clock` is the Unix time in ns. Raises WeightsError (B-58 … B-60), also when the file changes at this moment.
    """
    path = Path(path)
    fd = open_regular(path, error=WeightsError, rule="B-58")
    try:
        status = os.fstat(fd)
        header = read_header(fd, column_major=column_major, path=path)
        if ContentToken.of(os.fstat(fd)) != ContentToken.of(status):
            raise WeightsError(f"{path} changed while its header was read", rule="B-60", file=path.name)
        return WeightsFile(path, header, fd, status, clock)
    except BaseException:
        os.close(fd)
        raise


def _sha256(array: np.ndarray, check: Callable[[], None]) -> str:
    hasher = hashlib.sha256()
    for start in range(0, array.nbytes, _HASHED_BYTES):
        check()
        hasher.update(array[start : start + _HASHED_BYTES].data)
    return hasher.hexdigest()


def content_key(entry: WeightEntry, digest: str) -> str:
    """Stands for a tensor whose bytes have this sha256, whatever file it is in."""
    return f"{digest}:{entry.dtype.safetensors}:{'x'.join(map(str, entry.shape))}"
