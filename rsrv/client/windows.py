"""The shared memory of one model handle: a region that grows, cut into one window per call in flight.

Not for choosing between shared memory and inline (`rsrv.client.shared`) nor for what lies in a window.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rsrv.core.errors import RegionLimit
from rsrv.core.memory import ALIGNMENT, aligned
from rsrv.core.shm.owned import OwnedRegion

_GRANULE = 64 << 10


class OutOfSharedMemory(RegionLimit):
    """This machine, not the server, has no room for a region."""


class Registrar(Protocol):
    """Tells the server about regions; `timeout` is in seconds or None."""

    def register(self, region: OwnedRegion, timeout: float | None) -> None: ...

    def unregister(self, region: OwnedRegion, *, wait: bool) -> None:
        """Best effort: never raises. Without `wait` it returns at once."""


def create_region(prefix: str, n_bytes: int) -> OwnedRegion:
    """A region of this process. Raises OutOfSharedMemory when the system refuses to make one."""
    try:
        return OwnedRegion.create(prefix, n_bytes)
    except OSError as error:
        raise OutOfSharedMemory(f"a shared memory region cannot be created: {error.strerror or error}") from error


def _window_bytes(n_bytes: int) -> int:
    return max(aligned(n_bytes), ALIGNMENT)


@dataclass(slots=True, eq=False)
class _Arena:
    """A region and the windows of it that are in use, by offset. A retired arena hands out no more windows."""

    region: OwnedRegion
    live: dict[int, int] = field(default_factory=dict)
    retired: bool = False

    def take(self, n_bytes: int) -> int | None:
        """First fit: the offset of a free range, now in use, or None."""
        end = 0
        for offset in sorted(self.live):
            if offset - end >= n_bytes:
                break
            end = offset + self.live[offset]
        if end + n_bytes > self.region.byte_size:
            return None
        self.live[end] = n_bytes
        return end


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """`byte_size` bytes at `offset` of a registered region, owned by one call until it is released."""

    arena: _Arena
    offset: int
    byte_size: int

    @property
    def region(self) -> OwnedRegion:
        return self.arena.region


class WindowPool:
    """Windows for concurrent calls. Thread safe.

    A pool that nobody closed is unlinked when it is collected, or at exit; never by a forked child.
    """

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._lock = threading.Lock()
        self._arenas: list[_Arena] = []  # the last one is current unless it is retired
        self._closed = False
        self._untidy = False  # a retired arena may be without windows
        # Appended to without the lock: the collector may give a window back in the midst of anything, also where this
        # very thread has the lock.
        self._returned: deque[tuple[Window, bool]] = deque()

    def take(self, n_bytes: int) -> Window | None:
        """Like `acquire`, at once: None when the region has no room, or somebody is just changing that."""
        n_bytes = _window_bytes(n_bytes)
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._take_in()
            current = self._current()
            offset = current.take(n_bytes) if current else None
            return None if current is None or offset is None else Window(current, offset, n_bytes)
        finally:
            self._lock.release()
            self._settle()

    def acquire(self, n_bytes: int, timeout: Callable[[], float | None]) -> Window:
        """A window of `n_bytes`. A region without room is replaced by a larger one, which is registered first.

        Raises OutOfSharedMemory when this machine has no room left, and whatever the registration raises.
        """
        n_bytes = _window_bytes(n_bytes)
        try:
            with self._lock:  # also while registering: whoever needs room meanwhile waits for the new region
                self._take_in()
                current = self._current()
                offset = current.take(n_bytes) if current else None
                if current is None or offset is None:
                    grown = self._grow(current, n_bytes, timeout())
                    if current is not None:
                        self._retire(current)
                    current, offset = grown, grown.take(n_bytes)
                    assert offset is not None
                return Window(current, offset, n_bytes)
        finally:
            self._settle()

    def release(self, window: Window, *, reusable: bool = True) -> None:
        """Give `window` back. With `reusable` False its whole region is given up.

        That is for a call whose server may still be writing: a late write must not hit another call's answer.
        """
        self._returned.append((window, reusable))
        self._settle()

    def close(self) -> None:
        """Unregister and unlink; regions with calls in flight follow when those return. Idempotent."""
        with self._lock:
            self._closed = True
            self._take_in()
            for arena in self._arenas:
                self._retire(arena)
        self._settle(wait=True)

    # --- under the lock ----------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        while self._returned:
            window, reusable = self._returned.popleft()
            window.arena.live.pop(window.offset, None)
            if self._closed or not reusable or window.arena.retired:
                self._retire(window.arena)

    def _current(self) -> _Arena | None:
        return self._arenas[-1] if self._arenas and not self._arenas[-1].retired else None

    def _retire(self, arena: _Arena) -> None:
        """Hand out no more windows of `arena`; `_settle` drops it when none is in use."""
        arena.retired = True
        self._untidy = True

    def _grow(self, current: _Arena | None, n_bytes: int, timeout: float | None) -> _Arena:
        wanted = n_bytes + (sum(current.live.values()) + current.region.byte_size // 2 if current else 0)
        region = create_region("client", -(-wanted // _GRANULE) * _GRANULE)
        try:
            self._registrar.register(region, timeout)
        except BaseException:
            region.close()
            raise
        arena = _Arena(region)
        self._arenas.append(arena)
        return arena

    # --- without the lock --------------------------------------------------------------------------------------------

    def _settle(self, *, wait: bool = False) -> None:
        """Take in what was returned, and drop what is not needed any more, unless another thread does so next."""
        while (self._returned or self._untidy) and self._lock.acquire(blocking=False):
            try:
                self._take_in()
                self._untidy = False
                ended = [arena for arena in self._arenas if arena.retired and not arena.live]
                self._arenas = [arena for arena in self._arenas if arena not in ended]
            finally:
                self._lock.release()
            for arena in ended:
                self._registrar.unregister(arena.region, wait=wait)
                arena.region.close()
