"""The buffer pools of this process: one in shared memory for all servers that see it, one in its own memory."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from rsrv.client.budget import SETUP_SECONDS, Budget
from rsrv.client.transport.endpoint import Endpoint
from rsrv.client.windows import OutOfSharedMemory
from rsrv.core.errors import UsageError
from rsrv.core.shm.objects import DIRECTORY

if TYPE_CHECKING:
    from rsrv.core.shm.pool import BufferPool

log = logging.getLogger(__name__)

DEFAULT_BYTES = 256 << 20
DEFAULT_SLOTS = 8
_SMALLEST_SLOT = 64


@dataclass(slots=True, eq=False)
class _Registered:
    """The shared pool and the endpoints that were told of it."""

    pool: BufferPool
    endpoints: WeakSet[Endpoint] = field(default_factory=WeakSet)

    def close(self) -> None:
        region = self.pool.region
        if region is not None:
            for endpoint in tuple(self.endpoints):
                endpoint.unregister(region, wait=False)
        self.pool.close()


class Pools:
    """Makes pools when they are needed and replaces a shared one that lost slots. Thread safe.

    Args:
        n_bytes: size of each pool; None for 256 MiB, of which the shared one takes at most half of what is free.
        n_slots: slots of each.
    """

    def __init__(self, n_bytes: int | None = None, n_slots: int = DEFAULT_SLOTS) -> None:
        if n_bytes is not None and n_bytes <= 0:
            raise UsageError(f"pool_bytes={n_bytes} is not a number of bytes above 0")
        if n_slots <= 0:
            raise UsageError(f"n_slots={n_slots} is not a number of slots above 0")
        if n_bytes is not None and n_bytes < n_slots:
            raise UsageError(f"pool_bytes={n_bytes} has not even one byte for each of n_slots={n_slots}")
        self._n_bytes = n_bytes
        self._n_slots = n_slots
        self._lock = threading.Lock()
        self._shared: _Registered | None = None
        self._inline: BufferPool | None = None
        self._outgoing: list[_Registered] = []
        self._idle: deque[_Registered] = deque()
        self._heir: Pools | None = None

    def shared(self, endpoint: Endpoint, budget: Budget, instead_of: BufferPool | None = None) -> BufferPool:
        """The pool in shared memory, registered with `endpoint`; a new one in place of `instead_of`.

        Raises OutOfSharedMemory when this machine has no room for it, UsageError when the endpoint was closed, and what
        the registration raises.
        """
        outgoing = None
        with self._lock:
            endpoint.require_open()  # under the lock: what is made now will be closed
            current, heir = self._shared, self._heir
            if heir is not None:
                return heir.shared(endpoint, budget, instead_of)
            if current is not None and (current.pool is instead_of or 2 * current.pool.withdrawn > self._n_slots):
                outgoing, current, self._shared = current, None, None
                self._outgoing.append(outgoing)
            if current is None:
                current = self._shared = _Registered(self._make_shared())
            current.endpoints.add(endpoint)
        if outgoing is not None:
            pool = outgoing.pool
            log.info("event=pool_replaced region=%s withdrawn=%d", pool.region_name, pool.withdrawn)
            # The last slot may come back by the collector, in the midst of anything: only a note can be made then.
            pool.retire(partial(self._idle.append, outgoing))
        self.sweep()
        region = current.pool.region
        assert region is not None
        endpoint.register(region, budget.at_most(SETUP_SECONDS))
        return current.pool

    def inline(self) -> BufferPool:
        """The pool in memory of this process."""
        from rsrv.core.shm.pool import BufferPool

        with self._lock:
            if self._inline is None:
                n_bytes = DEFAULT_BYTES if self._n_bytes is None else self._n_bytes
                self._inline = BufferPool(n_bytes, n_slots=self._n_slots, use_shm=False, name="client")
            return self._inline

    def sweep(self) -> None:
        """Unregister and close pools that were replaced and whose last slot is back."""
        while self._idle:
            try:
                one = self._idle.popleft()
            except IndexError:  # another thread was faster
                return
            with self._lock:
                if one in self._outgoing:
                    self._outgoing.remove(one)
            one.close()

    def close(self) -> None:
        """Unregister, unlink and drop all pools; who waits for a slot fails. New ones are made when needed."""
        with self._lock:
            registered = [*self._outgoing, *([self._shared] if self._shared else [])]
            inline, self._inline = self._inline, None
            self._shared = None
            self._outgoing = []
        for one in registered:
            one.close()
        if inline is not None:
            inline.close()

    def hand_over(self, heir: Pools) -> None:
        """Have `heir` lend from now on, and close what is here when it is not in use any more."""
        with self._lock:
            self._heir = heir
            leaving, self._shared = self._shared, None
            inline, self._inline = self._inline, None
            heir._idle = self._idle
            heir._outgoing = [*self._outgoing, *([leaving] if leaving else [])]
        if inline is not None:
            inline.close()
        if leaving is not None:
            leaving.pool.retire(partial(self._idle.append, leaving))

    def renewed(self) -> Pools:
        """Such pools as these, none of them made yet."""
        return Pools(self._n_bytes, self._n_slots)

    def _make_shared(self) -> BufferPool:
        from rsrv.core.shm.pool import BufferPool

        n_bytes = self._n_bytes
        if n_bytes is None:
            n_bytes = max(min(DEFAULT_BYTES, _free_bytes() // 2), self._n_slots * _SMALLEST_SLOT)
        try:
            return BufferPool(n_bytes, n_slots=self._n_slots, use_shm=True, name="client")
        except OSError as error:
            raise OutOfSharedMemory(
                f"a pool of {n_bytes} bytes of shared memory cannot be created: {error.strerror or error}",
                hint="make it smaller (client_init(pool_bytes=…)), free some of /dev/shm, or give this machine more",
            ) from error


def _free_bytes() -> int:
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


_pools = Pools()


def shared_pool(endpoint: Endpoint, budget: Budget, instead_of: BufferPool | None = None) -> BufferPool:
    """The one pool of this process in shared memory, registered with `endpoint`.

    `instead_of` is a pool that turned the caller away (PoolWithdrawn): it is replaced, unless it was already. A pool
    that lost more than half of its slots is replaced too. Raises OutOfSharedMemory when this machine has no room for
    a pool, and what the registration raises.
    """
    return _pools.shared(endpoint, budget, instead_of)


def inline_pool() -> BufferPool:
    """The one pool of this process in its own memory."""
    return _pools.inline()


def configure(n_bytes: int | None, n_slots: int) -> None:
    """From now on, make pools of this size; those of before are closed when nobody uses them any more."""
    global _pools
    wanted = Pools(n_bytes, n_slots)
    _pools.hand_over(wanted)
    _pools = wanted
    sweep()


def sweep() -> None:
    """Close pools that were replaced and are not in use any more."""
    _pools.sweep()


def close() -> None:
    """Close the pools of this process; new ones are made when they are needed."""
    _pools.close()


def _forget_parent() -> None:
    """A forked child makes pools of the same size when it needs them; its parent's slots stay mapped while used."""
    global _pools
    _pools = _pools.renewed()


os.register_at_fork(after_in_child=_forget_parent)
