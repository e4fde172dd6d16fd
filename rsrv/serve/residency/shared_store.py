"""Host copies of weights in shared memory: one region for each version of a file and node, whoever serves it.

Every worker that uses a region holds the shared lock of its lock file for that long. Who can take the lock exclusively
is therefore alone: it may create the region, or remove one that a crash left. Nobody waits for an exclusive lock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rsrv.bundle.safetensors import WeightsHeader, ordered
from rsrv.core.errors import ServerStopping
from rsrv.serve.residency.content import ContentToken
from rsrv.serve.residency.janitor import sweep_versions
from rsrv.serve.residency.regions import (
    DATA_OFFSET,
    DIRECTORY,
    READY,
    READY_OFFSET,
    RegionHeader,
    RegionLock,
    content_token,
    hand_over,
    open_region,
    region_digest,
    region_name,
    remove_region,
    watch_for_handover,
)
from rsrv.serve.residency.store import Fill, HostCopy, PrivateWeightStore, Source, fill_views, layout

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.005
_REFUSED_TRIES = 20
"""How often one tries to replace a region that must not be used, while somebody holds it."""
_SETTLE_SECONDS = 0.06
_SLOW_BYTES_PER_SECOND = 20e6
"""A disk or network file system slower than this is not waited for."""
_READ_BITS = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class _CannotShare(Exception):
    """Why a copy has to be private."""


class _Refused(_CannotShare):
    """A region is complete, but not one to use; it may be replaced when nobody holds it."""


class _Overdue(_CannotShare):
    """The creator of a region does not get done; said once for each region, whatever was said before."""


def patience_seconds(nbytes: int) -> float:
    """How long another worker may take to create a region, at most two minutes.

    It may have been stopped, which nothing shows, and the thread that waits is the one that loads all other models.
    """
    return min(5.0 + nbytes / _SLOW_BYTES_PER_SECOND, 120.0)


@dataclass(frozen=True)
class _Wanted:
    """The region that a file needs."""

    path: Path
    model: str
    header: WeightsHeader
    token: ContentToken
    digest: int
    starts: list[int]
    nbytes: int


class SharedWeightStore:
    """Copies live in regions that all workers with the same directory and file share; the last holder removes them.

    Where a region cannot be had (no room, no such directory, permissions, somebody else's object of that name, a
    creator that does not get done) the copy is private instead, with one warning for the whole store, and one for each
    region that was waited for in vain.

    Attributes:
        sharing: False once a copy had to be private.
    """

    def __init__(
        self,
        mode: int,
        directory: Path | str = DIRECTORY,
        *,
        patience: Callable[[int], float] = patience_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            mode: permissions of regions and lock files, whatever the umask is; regions have only its read bits while
                their creator's user holds them. Regions are accepted from those who may write by it: this user and
                root, with 0o020 this process's group, with 0o002 everybody.
            patience: longest wait, in seconds, for another worker that creates a region of so many bytes.
        """
        self.sharing = True
        self._mode = mode
        self._directory = Path(directory)
        self._patience = patience
        self._clock = clock
        self._private = PrivateWeightStore()
        self._stop = threading.Event()
        self._given_up: set[int] = set()

    def acquire(self, name: str, file: Source, fill: Fill) -> HostCopy:
        """As `WeightStore.acquire`; `fill` is called only by the worker that creates the region.

        Regions of other versions of the model `name` that a crash left are removed. Raises ServerStopping when `close`
        was called while another worker's region was waited for.
        """
        starts, nbytes = layout(ordered(file.header), DATA_OFFSET)
        if nbytes == DATA_OFFSET:
            return self._private.acquire(name, file, fill)
        token = file.token
        digest = region_digest(file.header, content_token(token))
        wanted = _Wanted(self._directory / region_name(digest), name, file.header, token, digest, starts, nbytes)
        try:
            copy = self._share(wanted, fill)
        except _CannotShare as problem:
            self._warn(name, problem)
            return self._private.acquire(name, file, fill)
        sweep_versions(self._directory, name, digest, mode=self._mode)
        return copy

    def close(self) -> None:
        """End all waiting for other workers. Copies that were given out stay until they are released."""
        self._stop.set()

    def _share(self, wanted: _Wanted, fill: Fill) -> HostCopy:
        started = self._clock()
        refusals = 0
        while True:
            copy: HostCopy | None = None
            lock = self._open_lock(wanted.digest)
            try:
                copy = self._attach_or_create(wanted, fill, lock)
            except _Refused:
                refusals += 1
                if refusals >= _REFUSED_TRIES:
                    raise
            finally:
                if copy is None:
                    lock.close()
            if copy is not None:
                self._given_up.discard(wanted.digest)
                return copy
            # A creator that hung once is not waited for again at each load of its model.
            again = wanted.digest in self._given_up
            patience = 0.0 if again else self._patience(wanted.nbytes)
            if self._clock() - started >= patience:
                self._given_up.add(wanted.digest)
                raise (_CannotShare if again else _Overdue)(
                    f"another worker did not get done with {wanted.path} in {patience:.3g} s; if it is stopped, "
                    f"continue it or end it (fuser -v {lock.path}): the next load of this model shares again"
                )
            self._wait(_POLL_SECONDS * random.uniform(0.5, 1.5), wanted)

    def _attach_or_create(self, wanted: _Wanted, fill: Fill, lock: RegionLock) -> HostCopy | None:
        """One round of the protocol; None when somebody else is at it. The copy keeps the lock."""
        refusal: _Refused | None = None
        if lock.share() and lock.is_current():
            try:
                if (copy := self._attach(wanted, lock)) is not None:
                    return copy
            except _Refused as error:
                refusal = error
        if lock.exclude() and lock.is_current():
            if not self._is_complete(wanted):
                self._create(wanted, fill)
            # Others may have had the lock between exclusive and shared, so the region is looked at like everybody's.
            return self._attach(wanted, lock) if lock.share() and lock.is_current() else None
        if refusal is not None:
            raise refusal
        return None

    def _attach(self, wanted: _Wanted, lock: RegionLock) -> HostCopy | None:
        """Map the complete region, under the shared lock; None when there is none. Raises _Refused, _CannotShare."""
        fd = self._open(wanted)
        if fd is None:
            return None
        try:
            watch_for_handover(fd)
            mapping = mmap.mmap(fd, wanted.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise _CannotShare(f"{wanted.path} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)
        release = partial(_release, wanted.path, lock, self._mode)
        return HostCopy(mapping, wanted.header, wanted.starts, on_release=release)

    def _is_complete(self, wanted: _Wanted) -> bool:
        try:
            fd = self._open(wanted)
        except _Refused:
            return False
        if fd is not None:
            os.close(fd)
        return fd is not None

    def _open(self, wanted: _Wanted) -> int | None:
        """A descriptor of the complete region; None when there is none. Raises _Refused, or _CannotShare."""
        try:
            fd = open_region(wanted.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _CannotShare(f"{wanted.path} cannot be opened: {error.strerror or error}") from error
        refusal = True
        try:
            status = os.fstat(fd)
            if (problem := self._distrust(status)) is not None:
                raise _Refused(f"{wanted.path} {problem}")
            header = RegionHeader.read(fd)
            if header is None or not header.ready:
                return None
            found = (header.digest, header.nbytes, header.n_tensors)
            if found != (wanted.digest, wanted.nbytes, len(wanted.starts)) or status.st_size < wanted.nbytes:
                raise _Refused(f"{wanted.path} does not hold what its name says")
            refusal = False
            return fd
        finally:
            if refusal:
                os.close(fd)

    def _create(self, wanted: _Wanted, fill: Fill) -> None:
        """Make the region, in the place of an incomplete one, under the exclusive lock. Raises _CannotShare."""
        try:
            remove_region(wanted.path)
            self._require_room(wanted.nbytes)
            self._require_settled(wanted)
            fd = os.open(wanted.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _CannotShare(f"{wanted.path} cannot be created: {error.strerror}") from error
        try:
            mapping = self._reserve(fd, wanted)
            fill_views(mapping, ordered(wanted.header), wanted.starts, fill)
            mapping.flush()
            mapping[READY_OFFSET : READY_OFFSET + len(READY)] = READY
            mapping.flush()
            mapping.close()
        except BaseException as error:
            with contextlib.suppress(OSError):
                remove_region(wanted.path)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise _CannotShare(f"{wanted.path} cannot be filled: {error.strerror}") from error
            raise
        finally:
            os.close(fd)

    def _reserve(self, fd: int, wanted: _Wanted) -> mmap.mmap:
        """Give the new region its permissions, size and header, and map it."""
        try:
            # The mode given to open would be cut by the umask. Nobody writes by opening it anew, and who truncated it
            # would end all that have it mapped (SIGBUS).
            os.fchmod(fd, self._mode & _READ_BITS)
            # Reserved, not only sized: on a full file system a hole would answer the first write with SIGBUS.
            os.posix_fallocate(fd, 0, wanted.nbytes)
            mapping = mmap.mmap(fd, wanted.nbytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise _CannotShare(f"no {wanted.nbytes} bytes for {wanted.path}: {error.strerror}") from error
        model = wanted.model.encode()
        header = RegionHeader(False, wanted.digest, wanted.nbytes, len(wanted.starts), time.time_ns(), model).pack()
        mapping[: len(header)] = header
        return mapping

    def _require_room(self, nbytes: int) -> None:
        space = os.statvfs(self._directory)
        free = space.f_bavail * space.f_frsize
        if space.f_blocks and free < nbytes:  # a tmpfs without a limit says that it has no blocks at all
            raise _CannotShare(f"{self._directory} has room for {free} bytes, wanted {nbytes} (docker: --shm-size=…)")

    def _require_settled(self, wanted: _Wanted) -> None:
        """Wait until a change of the file would give another token; else the region might get bytes of a later version
        under the name of this one."""
        if wanted.token.is_settled(time.time_ns()):
            return
        self._wait(_SETTLE_SECONDS, wanted)
        if not wanted.token.is_settled(time.time_ns()):
            raise _CannotShare("the weights file says that it was changed in the future")

    def _wait(self, seconds: float, wanted: _Wanted) -> None:
        if self._stop.wait(seconds):
            raise ServerStopping(f"the server stops; model {wanted.model!r} is not loaded")

    def _open_lock(self, digest: int) -> RegionLock:
        try:
            lock = RegionLock.of(self._directory, digest, self._mode)
        except OSError as error:
            raise _CannotShare(
                f"the lock of {self._directory / region_name(digest)} cannot be opened: {error.strerror or error}"
            ) from error
        if (problem := self._distrust(lock.status)) is not None:
            lock.close()
            raise _CannotShare(f"{lock.path} {problem}")
        return lock

    def _distrust(self, status: os.stat_result) -> str | None:
        """Why an object must not be used: somebody may have written it who could not by our own mode."""
        if status.st_uid not in (0, os.geteuid()):
            in_group = self._mode & stat.S_IWGRP and status.st_gid == os.getegid()
            if not in_group and not self._mode & stat.S_IWOTH:
                return f"belongs to uid {status.st_uid}, gid {status.st_gid} (runtime.shared_host_weights_mode)"
        wider = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH) & ~self._mode
        if wider:
            return f"has mode {stat.S_IMODE(status.st_mode):03o}, wanted {self._mode:03o}"
        return None

    def _warn(self, model: str, problem: _CannotShare) -> None:
        level = logging.WARNING if self.sharing or isinstance(problem, _Overdue) else logging.DEBUG
        self.sharing = False
        logger.log(level, "weights are kept by this process alone model=%s because=%s", model, problem)


def _release(path: Path, lock: RegionLock, mode: int) -> None:
    """Give up a region that is no longer mapped here, and remove it when nobody else has it."""
    try:
        if not lock.is_current():
            return
        if lock.exclude():
            if lock.is_current():
                remove_region(path)
                # Whoever has it open looks whether it still is at its path, once it has the lock.
                with contextlib.suppress(OSError):  # another user's, in a sticky directory: it holds no bytes
                    lock.path.unlink()
        elif mode & (stat.S_IWGRP | stat.S_IWOTH):
            hand_over(path, mode)
    except OSError as error:
        logger.debug("weight region stays path=%s error=%s", path, error)
    finally:
        lock.close()
