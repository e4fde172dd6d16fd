"""Weight regions as they lie in a directory of shared memory: their names, header, identity and lock.

Who creates and attaches them is said in `shared_store`, who removes those left behind in `janitor`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rsrv.bundle.safetensors import WeightsHeader, ordered
from rsrv.serve.residency.content import ContentToken

DIRECTORY: Final = Path("/dev/shm")

# Versions of the layout below. A region of another version has another tag in its digest, and so another name.
# rsrvw1  2026-10  first
FORMAT: Final = "rsrvw1"

MAGIC: Final = b"RSV1"
DATA_OFFSET: Final = 256
"""Bytes before the first tensor."""
READY_OFFSET: Final = 4
READY: Final = (1).to_bytes(4, "little")
MAX_MODEL_BYTES: Final = 191

# magic, ready, digest, total bytes, tensors, creation in Unix ns, name of the model
_HEADER = struct.Struct("<4sIQQI4xQ24x192s")
_NAME = re.compile(r"rsrvw-([0-9a-f]{16})(\.lock)?")
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True)
class RegionHeader:
    """The first 256 bytes of a region.

    Attributes:
        ready: the tensors are complete; a region that is not ready and that nobody locks was left by a crash.
        digest: see `region_digest`.
        nbytes: of the whole region, this header included.
        n_tensors: how many tensors follow, in argument order, each on a 64-byte boundary.
        created_ns: Unix time.
        model: name of the model for which it was created, UTF-8; longer names are cut after 191 bytes.
    """

    ready: bool
    digest: int
    nbytes: int
    n_tensors: int
    created_ns: int
    model: bytes

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            self.ready,
            self.digest,
            self.nbytes,
            self.n_tensors,
            self.created_ns,
            self.model[:MAX_MODEL_BYTES],
        )

    @classmethod
    def read(cls, fd: int) -> RegionHeader | None:
        """Of an open region; None when it has none, or one of another format."""
        data = os.pread(fd, _HEADER.size, 0)
        if len(data) < _HEADER.size:
            return None
        magic, ready, digest, nbytes, n_tensors, created_ns, model = _HEADER.unpack(data)
        if magic != MAGIC:
            return None
        return cls(ready == 1, digest, nbytes, n_tensors, created_ns, model.rstrip(b"\0"))


def fnv1a_64(data: bytes) -> int:
    """FNV-1a: the same number in every process and version of the library, which Python's `hash` is not."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def content_token(token: ContentToken) -> int:
    """64 bits that stand for a version of a file on disk."""
    # With the ctime, which nobody can set, unlike spec 4.9: `cp -a` to another file system may give a different file
    # the same inode number, size and mtime, and a rewrite in place may restore the mtime. All containers that mount a
    # file system see the same ctime; st_dev, which would also tell file systems apart, may differ between them. A link
    # or chmod moves the ctime too: that only costs a second region.
    return fnv1a_64(f"{token.inode}:{token.size}:{token.mtime_ns}:{token.ctime_ns}".encode())


def region_digest(header: WeightsHeader, content: int) -> int:
    """Names the bytes of a region: 64 bits over what the file holds and how the tensors are laid out.

    The model's name is not part of it, so two models with one file share a region, and a renamed one keeps its own.

    Args:
        header: gives dtype, shape and declared sha256 of every argument.
        content: `content_token` of the version of the file on disk.
    """
    entries = ordered(header)
    # Declared digests, unlike spec 4.9: files of other bytes do not share even when they look alike to stat. Nothing
    # relies on them: a false one keeps files apart or leaves the decision to `content`. Hashed, since FNV is slow here.
    declared = hashlib.sha256(";".join(header.tensor_digests.get(entry.name, "") for entry in entries).encode())
    # The bytes of a format 2.0 file are transposed when they are read; the same file may be read both ways.
    parts = [FORMAT, f"{content:016x}", declared.hexdigest(), *(["column_major"] if header.column_major else [])]
    parts += (f"{e.dtype.safetensors}:{e.dtype.itemsize}:{'x'.join(map(str, e.shape))}" for e in entries)
    return fnv1a_64(";".join(parts).encode())


def region_name(digest: int) -> str:
    return f"rsrvw-{digest:016x}"


def digest_of(name: str) -> int | None:
    """The digest in the name of a region or of its lock file; None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def open_region(path: Path, access: int = os.O_RDONLY) -> int:
    """A descriptor of the region at `path`. Raises OSError, also when that is a link or no regular file."""
    fd = os.open(path, access | _OPEN_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileExistsError(f"{path} is not a regular file")
    return fd


class RegionLock:
    """The lock file of one region, held shared for as long as the region is used, exclusively to create or remove it.

    Nothing here waits. A conversion is not atomic: others may have had the lock in between, and one that fails loses
    what was held before.
    """

    def __init__(self, path: Path, mode: int) -> None:
        """Open the lock file, or create it with exactly the permissions `mode`. Raises OSError."""
        self.path = path
        self._fd = _open_or_create(path, mode)
        self.status = os.fstat(self._fd)

    @classmethod
    def of(cls, directory: Path, digest: int, mode: int) -> RegionLock:
        """The lock of the region with this digest. Raises OSError."""
        return cls(directory / f"{region_name(digest)}.lock", mode)

    def share(self) -> bool:
        """Take it shared; False when somebody has it exclusively."""
        return self._take(fcntl.LOCK_SH)

    def exclude(self) -> bool:
        """Take it exclusively; False when somebody else has it."""
        return self._take(fcntl.LOCK_EX)

    def is_current(self) -> bool:
        """Whether the lock file still is the one at its path: `rsrv shm gc` removes lock files of removed regions."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.status.st_dev, self.status.st_ino)

    def close(self) -> None:
        """Give up whatever is held. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> RegionLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # Linux has given up the old one already; say so in any case
            return False
        return True


def _open_or_create(path: Path, mode: int) -> int:
    while True:
        # Without O_CREAT first: where fs.protected_regular is on, it refuses the existing file of another user.
        with contextlib.suppress(FileNotFoundError):
            return open_region(path)
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
            try:
                os.fchmod(fd, mode)  # the mode given to open would be cut by the umask
            except BaseException:
                os.close(fd)
                raise
            return fd


def watch_for_handover(fd: int) -> None:
    """Let the owner of an open region know that somebody holds it who may only read it; see `hand_over`.

    The mark goes when all descriptors of this opening are closed; a mapping made from `fd` has one.
    """
    if os.geteuid() not in (0, os.fstat(fd).st_uid):
        with contextlib.suppress(BlockingIOError):  # the owner is looking: then it finds nobody, and keeps the region
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def hand_over(path: Path, mode: int) -> None:
    """Leave a region to those who still hold it: give it the permissions `mode` if other users are among them.

    They need the right to write for `remove_region`. Nothing happens to a region of another user. Raises OSError.
    """
    # Two owners that get here at the same moment take each other for another user: then `mode` comes back too early.
    fd = open_region(path)
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def remove_region(path: Path) -> None:
    """Remove a region under its exclusive lock; one that is not there is fine. Raises OSError.

    The directory's sticky bit keeps other users' names in place; then at least the memory is given back, if the region
    was handed over. Where its owner crashed, the memory stays until that user's next start or `rsrv shm gc`.
    """
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        fd = open_region(path, os.O_RDWR)
        try:
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
        raise
