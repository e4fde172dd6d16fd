"""The regions that clients register with a server.

A region is held by file descriptor and copied with preadv/pwrite, never mapped: a client that truncates its file gets
an error and cannot kill the server with SIGBUS.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType

import numpy as np

from rsrv.core.errors import InvalidRequest, RegionLimit, UnregisteredRegion
from rsrv.core.memory import aligned_empty
from rsrv.core.shm.copiers import Copiers
from rsrv.core.shm.objects import alive, object_name, open_object, owner_pid

_log = logging.getLogger(__name__)

_INT64_MAX = 2**63 - 1
_REGION_NAME_MAX = 1024
# One preadv or pwrite moves at most 2 GiB less a page; the loops below need no larger step.
_STEP = 1 << 30


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """One registered region, as the client described it."""

    name: str
    key: str
    offset: int
    byte_size: int


class Region:
    """A registered window of a shared-memory object. Reached through a `Lease`, so its descriptor is open."""

    __slots__ = (
        "_copiers",
        "base",
        "dead",
        "fd",
        "key",
        "last_used",
        "leases",
        "name",
        "owner_pid",
        "owner_unseen",
        "size",
    )

    def __init__(self, name: str, key: str, base: int, size: int, fd: int, copiers: Copiers, now: float) -> None:
        self.name = name
        self.key = key
        self.base = base
        self.size = size
        self.fd = fd
        self._copiers = copiers
        self.leases = 0
        self.dead = False
        self.last_used = now
        self.owner_pid = owner_pid(key)
        self.owner_unseen = self.owner_pid is not None and not alive(self.owner_pid)

    def check(self, offset: int, n: int) -> None:
        """Raise InvalidRequest unless [offset, offset + n) is inside the region and its file still reaches that far."""
        # The subtraction form, as for fixed-width integers: no sum of two claimed numbers is ever trusted.
        if not (0 <= offset <= _INT64_MAX and 0 <= n <= self.size and offset <= self.size - n):
            raise InvalidRequest(
                f"{n} bytes at offset {offset} are outside shared memory region {self.name!r} of {self.size} bytes"
            )
        file_size = os.fstat(self.fd).st_size
        if self.base + offset + n > file_size:
            raise self._truncated(file_size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable, contiguous) from `offset` on."""
        target = _flat(buffer)
        self.check(offset, len(target))
        self._fill(offset, target)

    def read(self, offset: int, n: int) -> np.ndarray:
        """A copy of `n` bytes from `offset` on: uint8, 64-byte aligned. Nothing is allocated for a window outside."""
        self.check(offset, n)
        try:
            block = aligned_empty(n, np.uint8)
        except (MemoryError, ValueError):
            raise RegionLimit(f"no memory for {n} bytes of shared memory region {self.name!r}") from None
        self._fill(offset, _flat(block.data))
        return block

    def _fill(self, offset: int, target: memoryview) -> None:
        first = self.base + offset

        def fill(start: int, part: memoryview) -> None:
            done = 0
            while done < len(part):
                got = os.preadv(self.fd, [part[done : done + _STEP]], first + start + done)
                if got == 0:
                    raise self._truncated(first + start + done)
                done += got

        self._copiers.copy(fill, target)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` (contiguous) to `offset`. Never makes the file longer."""
        source = _flat(data)
        # pwrite past the end would silently grow a truncated file, hence the size check of every write.
        self.check(offset, len(source))
        start, done = self.base + offset, 0
        try:
            while done < len(source):
                done += os.pwrite(self.fd, source[done : done + _STEP], start + done)
        except OSError as error:
            kind = RegionLimit if error.errno == errno.ENOSPC else InvalidRequest
            raise kind(f"cannot write to shared memory region {self.name!r}: {error.strerror}") from error

    def abandoned(self) -> bool:
        """Whether nobody can use the region any more, or its owner is gone."""
        return os.fstat(self.fd).st_nlink == 0 or (self.owner_pid is not None and not alive(self.owner_pid))

    def _truncated(self, file_size: int) -> InvalidRequest:
        return InvalidRequest(
            f"shared memory region {self.name!r} was truncated after it was registered: its object {self.key!r} holds "
            f"{file_size} bytes, the region needs {self.base + self.size}"
        )


def _flat(buffer: memoryview) -> memoryview:
    """The bytes of a contiguous view of any shape; cast() itself refuses an extent of zero."""
    return buffer.cast("B") if buffer.nbytes else memoryview(b"")


class Lease:
    """Keeps a region's descriptor open while it is used, whatever `unregister` does meanwhile. A context manager."""

    __slots__ = ("_registry", "region")

    def __init__(self, registry: RegionRegistry, region: Region) -> None:
        self._registry = registry
        self.region = region

    def __enter__(self) -> Region:
        return self.region

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._registry._give_back(self.region)


class RegionRegistry:
    """The shared-memory regions that clients have registered, by name. Thread safe; copies run in parallel.

    Args:
        max_regions: most regions at a time.
        max_total_bytes: most bytes of all regions together, None = any.
        reap_seconds: how long an abandoned region stays after its last use.
        allow_keys: glob patterns of keys (without the leading slash) that may be registered; none = all.
        deny_keys: the same for keys that may not; the defaults are where servers keep weights. Wins over `allow_keys`.
        require_same_uid: accept only objects that belong to this process's user.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        max_regions: int = 1024,
        max_total_bytes: int | None = None,
        reap_seconds: float = 60.0,
        allow_keys: Sequence[str] = (),
        deny_keys: Sequence[str] = ("rsw-*", "rsrvw-*"),
        require_same_uid: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_regions = max_regions
        self._max_total_bytes = max_total_bytes
        self._reap_seconds = reap_seconds
        self._allow_keys = tuple(pattern.lstrip("/") for pattern in allow_keys)
        self._deny_keys = tuple(pattern.lstrip("/") for pattern in deny_keys)
        self._require_same_uid = require_same_uid
        self._copiers = Copiers()
        self._clock = clock
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._total_bytes = 0

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def total_bytes(self) -> int:
        """Bytes of all registered regions."""
        return self._total_bytes

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register `byte_size` bytes at `offset` of the object `key` as the region `name`, replacing one of that name.

        Raises InvalidRequest when the object cannot be used as asked, RegionLimit past the limits of this registry; a
        region of that name then stays as it was.
        """
        if not name or len(name) > _REGION_NAME_MAX:
            raise InvalidRequest(
                f"the name of a shared memory region has 1 to {_REGION_NAME_MAX} characters, not {len(name)}"
            )
        if not 0 <= offset <= _INT64_MAX:
            raise InvalidRequest(f"offset {offset} of shared memory region {name!r} is not within 0 to 2^63-1")
        if not 0 < byte_size <= _INT64_MAX:
            raise InvalidRequest(f"byte_size {byte_size} of shared memory region {name!r} is not within 1 to 2^63-1")
        file_name = object_name(key)
        self._admit(file_name)
        fd = open_object(file_name, os.O_RDWR)
        try:
            self._inspect(fd, name, key, offset, byte_size)
            region = Region(name, key, offset, byte_size, fd, self._copiers, self._clock())
            with self._lock:
                replaced = self._insert(region)
        except BaseException:
            os.close(fd)
            raise
        if replaced is not None:
            os.close(replaced)

    def unregister(self, name: str) -> None:
        """Forget the region `name`, or all regions for "". An unknown name is no error."""
        with self._lock:
            names = [name] if name else list(self._regions)
            idle = [fd for each in names if (fd := self._remove(each)) is not None]
        for fd in idle:
            os.close(fd)

    def status(self, name: str = "") -> list[RegionStatus]:
        """The region `name`, or all regions for "", sorted by name. Nothing for an unknown name."""
        with self._lock:
            regions = [self._regions[name]] if name in self._regions else [] if name else list(self._regions.values())
        return sorted((RegionStatus(r.name, r.key, r.base, r.size) for r in regions), key=lambda status: status.name)

    def lease(self, name: str) -> Lease:
        """Borrow a region for several steps: ``with registry.lease("x") as region``. Raises UnregisteredRegion."""
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                raise UnregisteredRegion(name)
            region.leases += 1
            if region.owner_unseen:
                region.owner_pid, region.owner_unseen = None, False
        return Lease(self, region)

    def check(self, name: str, offset: int, n: int) -> None:
        """Raise unless `n` bytes at `offset` of the region can be read or written now.

        Raises UnregisteredRegion, or InvalidRequest for a window outside the region or past the end of its file.
        """
        with self.lease(name) as region:
            region.check(offset, n)

    def read(self, name: str, offset: int, n: int) -> np.ndarray:
        """A copy of `n` bytes at `offset` of the region: uint8, 64-byte aligned. Raises as `check`, and RegionLimit."""
        with self.lease(name) as region:
            return region.read(offset, n)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the region on. Raises as `check`."""
        with self.lease(name) as region:
            region.read_into(offset, buffer)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Copy `data` to `offset` of the region, never making its file longer. Raises as `check`."""
        with self.lease(name) as region:
            region.write(offset, data)

    def reap(self) -> list[str]:
        """Drop the abandoned regions that have been idle for `reap_seconds`; returns their names, sorted.

        Abandoned: the object was unlinked, or its key carries the pid of a process that is gone. The pid rule needs the
        pid to mean something here: it is not applied to a region that was used although its pid was already unknown
        when it was registered (a client in another pid namespace).
        """
        deadline = self._clock() - self._reap_seconds
        with self._lock:
            gone = [
                region.name
                for region in self._regions.values()
                if region.leases == 0 and region.last_used <= deadline and region.abandoned()
            ]
            idle = [fd for name in gone if (fd := self._remove(name)) is not None]
        for fd in idle:
            os.close(fd)
        if gone:
            _log.info("shared memory regions reaped count=%d names=%s", len(gone), ",".join(sorted(gone)))
        return sorted(gone)

    def close(self) -> None:
        """Forget all regions, and end the threads that help with copies."""
        self.unregister("")
        self._copiers.close()

    def _admit(self, file_name: str) -> None:
        if any(fnmatchcase(file_name, pattern) for pattern in self._deny_keys):
            raise InvalidRequest(f"shared memory key {file_name!r} is denied by this server (shm.deny_keys)")
        if self._allow_keys and not any(fnmatchcase(file_name, pattern) for pattern in self._allow_keys):
            raise InvalidRequest(f"shared memory key {file_name!r} is not among those allowed here (shm.allow_keys)")

    def _inspect(self, fd: int, name: str, key: str, offset: int, byte_size: int) -> None:
        status = os.fstat(fd)
        if self._require_same_uid and status.st_uid != os.geteuid():
            raise InvalidRequest(
                f"shared memory object {key!r} belongs to uid {status.st_uid}, this server accepts those of uid "
                f"{os.geteuid()} only (shm.require_same_uid)"
            )
        if byte_size > status.st_size or offset > status.st_size - byte_size:
            raise InvalidRequest(
                f"shared memory region {name!r}: {byte_size} bytes at offset {offset} do not fit into object {key!r} "
                f"of {status.st_size} bytes"
            )

    def _insert(self, region: Region) -> int | None:
        """Under the lock. Returns the descriptor of the region that was replaced, if it is now free to close."""
        before = self._regions.get(region.name)
        if before is None and len(self._regions) >= self._max_regions:
            raise RegionLimit(
                f"cannot register shared memory region {region.name!r}: {len(self._regions)} regions are registered, "
                f"the most allowed (shm.max_regions)"
            )
        total = self._total_bytes + region.size - (before.size if before is not None else 0)
        if self._max_total_bytes is not None and total > self._max_total_bytes:
            raise RegionLimit(
                f"cannot register shared memory region {region.name!r}: all regions would hold {total} bytes, at most "
                f"{self._max_total_bytes} are allowed (shm.max_total_bytes)"
            )
        idle = self._remove(region.name)
        self._regions[region.name] = region
        self._total_bytes += region.size
        return idle

    def _remove(self, name: str) -> int | None:
        """Under the lock. Returns the descriptor for the caller to close, or None while a lease still needs it."""
        region = self._regions.pop(name, None)
        if region is None:
            return None
        self._total_bytes -= region.size
        region.dead = True
        return region.fd if region.leases == 0 else None

    def _give_back(self, region: Region) -> None:
        with self._lock:
            region.leases -= 1
            region.last_used = self._clock()
            last = region.dead and region.leases == 0
        if last:
            os.close(region.fd)
