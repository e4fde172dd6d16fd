"""The shared-memory objects that this process creates and owns."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import weakref
from types import TracebackType

from rsrv.core.errors import InvalidRequest
from rsrv.core.shm.objects import DIRECTORY, OPEN_FLAGS, object_name

_log = logging.getLogger(__name__)


class OwnedRegion:
    """A shared-memory object of this process: created and mapped by `create`, unlinked by `close` or at exit."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self.name = name
        self.byte_size = len(mapping)
        self.view = memoryview(mapping)
        self._mapping = mapping
        self._unlink = weakref.finalize(self, _unlink_own, name, os.getpid())

    @classmethod
    def create(cls, prefix: str, n_bytes: int, *, key: str | None = None) -> OwnedRegion:
        """Create ``/rsrv-<prefix>-<pid>-<16 hex digits>``, or `key`, with `n_bytes` of zeros, for this user only.

        Raises ValueError for what cannot be a name, OSError when the system refuses (ENOSPC: no room, EEXIST: `key`
        is in use).
        """
        if n_bytes <= 0:
            raise ValueError(f"a shared memory region needs at least 1 byte, not {n_bytes}")
        name = key if key is not None else f"rsrv-{prefix}-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            name = object_name(name)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
        fd = os.open(DIRECTORY + name, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
        try:
            # Reserved, not only sized: on a full /dev/shm a hole would answer the first write with SIGBUS.
            os.posix_fallocate(fd, 0, n_bytes)
            return cls(name, mmap.mmap(fd, n_bytes))
        except BaseException as error:
            os.unlink(DIRECTORY + name)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                text = f"no room for {n_bytes} bytes of shared memory; free some or enlarge it (docker: --shm-size=…)"
                raise OSError(errno.ENOSPC, text, DIRECTORY) from error
            raise
        finally:
            os.close(fd)

    @property
    def key(self) -> str:
        """What a server registers."""
        return "/" + self.name

    def unlink(self) -> None:
        """Remove the name, so that nobody can open the object any more; who mapped it keeps it. Idempotent."""
        self._unlink()

    def close(self) -> None:
        """Unlink the object and unmap it, or leave the unmapping to the last array that still looks at it."""
        self._unlink()
        try:
            self.view.release()
            self._mapping.close()
        except BufferError:
            _log.debug("shared memory stays mapped until its views are gone name=%s", self.name)

    def __enter__(self) -> OwnedRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unlink_own(name: str, creator: int) -> None:
    # A forked child inherits the finalizer, not the object.
    if os.getpid() == creator:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(DIRECTORY + name)
