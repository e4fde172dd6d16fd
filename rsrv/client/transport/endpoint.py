"""One server as this process knows it: its connection, whether it sees our shared memory, and which it was told of."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rsrv.client.budget import SETUP_SECONDS, Budget
from rsrv.client.connection import Connection
from rsrv.client.failures import answered_by_server
from rsrv.client.server import ask
from rsrv.client.shared import Mode
from rsrv.client.transport.probe import sees_our_memory
from rsrv.client.windows import OutOfSharedMemory
from rsrv.core.errors import (
    Code,
    DeadlineExceeded,
    RegionLimit,
    RegistrationFailed,
    RsrvError,
    ShmUnrecoverable,
    Unimplemented,
    UsageError,
)
from rsrv.core.shm.objects import owner_pid
from rsrv.core.shm.owned import OwnedRegion

log = logging.getLogger(__name__)

UNREGISTER_SECONDS = 5.0
"""The most that all goodbyes to a server may take: one that hangs must not hold the process."""
_REFUSED_HINT = (
    'shared_memory="off" (rsrv infer: --no-shm) sends tensors inline; how much a server of rsrv registers, '
    "shm.max_regions and shm.max_total_bytes say"
)
_LEAST_SECONDS = 0.05
"""What a server that is well gets in any case, after one that hangs."""


@dataclass(slots=True, eq=False)
class _Registration:
    """What one server knows of one region. `generation` counts its registrations, 0 = none yet.

    The region is its owner's: one that is dropped is unlinked, and forgotten here.
    """

    region: weakref.ref[OwnedRegion]
    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 0
    tries: int = 0
    failure: RsrvError | None = None  # of the latest try


class Endpoint:
    """A server, shared by all handles of this process that reach it in the same way. Thread safe.

    `on_latch` is called after the endpoint was latched. `interval` tells after how many seconds a server that did not
    see our memory is asked again; 0 or less: never. A forked child makes its own endpoints.
    """

    def __init__(
        self,
        connection: Connection,
        on_latch: Callable[[], None] = lambda: None,
        interval: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = connection
        self.target = connection.target
        self.closed = False
        self._on_latch = on_latch
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._probing = threading.Lock()
        self._routes: dict[Mode, bool] = {}
        self._registrations: dict[str, _Registration] = {}
        self._latched: RsrvError | None = None
        self._why_inline: str | None = None
        self._asked = 0.0  # when
        self._mute = False  # whether the latest goodbye was not answered
        # Names of regions that the collector took. It may strike in the midst of anything: they are only noted.
        self._dropped: deque[str] = deque()

    # --- the choice ---------------------------------------------------------------------------------------------------

    def uses_shared_memory(self, mode: Mode, budget: Budget) -> bool:
        """Whether `mode` means shared memory with this server. The first call asks it; concurrent ones wait for that.

        Raises UsageError when ``on`` cannot work, ShmUnrecoverable for ``on`` while the endpoint is latched, and every
        error of the server but the one that it has no probe; the next call then asks again.
        """
        known = self.route(mode)
        if known is None:
            with _held(self._probing, budget.remaining()):
                known = self.route(mode)
                if known is None:
                    known = self._decide(mode, budget)
        return known

    def route(self, mode: Mode) -> bool | None:
        """As `uses_shared_memory`, but without asking the server: None when it has to be asked."""
        if mode == "off":
            return False
        if (latched := self._latched) is not None:
            if mode == "auto":
                return False
            raise ShmUnrecoverable(
                f"shared memory with {self.target} was given up: {latched}",
                hint='wait until it is tried again (client_init(shm_reprobe_interval=…)), or use shared_memory="auto"',
            )
        known = self._routes.get(mode)
        if known is False and 0 < self._interval() <= self._clock() - self._asked:
            return None  # servers are replaced, and so are the workers of gateways
        return known

    def _decide(self, mode: Mode, budget: Budget) -> bool:
        try:
            same = sees_our_memory(self.connection, budget.at_most(SETUP_SECONDS))
        except OutOfSharedMemory as error:
            if mode == "on":
                raise
            self._give_up(error, "shm_unavailable")  # until there is room again
            return False
        if same is None:
            # Of stock servers: who insists vouches for the shared namespace.
            self._why_inline = "the server does not say whether it sees the shared memory of this process"
        elif not same:
            self._why_inline = (
                "the server runs in another IPC namespace (another machine or container), or is a gateway of which a "
                "worker does"
            )
            if mode == "on":
                raise UsageError(
                    f"{self.target} runs in another IPC namespace (another machine or container), or is a gateway of "
                    "which a worker does: shared memory cannot work",
                    hint='use shared_memory="auto" (rsrv infer: leave out --shm)',
                )
        self._asked = self._clock()
        self._routes[mode] = use = mode == "on" if same is None else same
        return use

    @property
    def why_inline(self) -> str | None:
        """Why ``auto`` does not use shared memory with this server; None when it does, or when nobody asked yet."""
        if (latched := self._latched) is not None:
            return f"it was given up after an error: {latched}"
        return None if self._routes.get("auto", True) else self._why_inline

    # --- registrations ------------------------------------------------------------------------------------------------

    def register(self, region: OwnedRegion, timeout: float | None) -> None:
        """Tell the server of `region`, once; concurrent calls share the outcome of the first.

        Raises what the server answers; the next call then asks again.
        """
        while self._dropped:
            self._tell_to_forget(self._dropped.popleft(), wait=False)
        entry = self._registrations.get(region.name)
        if entry is None:
            registrations, dropped, name = self._registrations, self._dropped, region.name

            def drop(_: object) -> None:
                if registrations.pop(name, None) is not None:
                    dropped.append(name)

            entry = registrations.setdefault(name, _Registration(weakref.ref(region, drop)))
        if entry.generation > 0:
            return
        tries = entry.tries
        with _held(entry.lock, timeout):
            if entry.generation > 0:
                return
            if entry.tries != tries and entry.failure is not None:
                raise entry.failure
            try:
                self._tell_of(entry, region, timeout)
            except BaseException as error:
                if not (isinstance(error, RsrvError) and answered_by_server(error)):
                    self._tell_to_forget(region.name, wait=False)  # it may have done what it did not confirm
                raise

    def generation(self, region: OwnedRegion) -> int:
        """How often `region` was registered here. Note it before sending, and give it to `renew` when that fails."""
        entry = self._registrations.get(region.name)
        return 0 if entry is None else entry.generation

    def renew(self, region: OwnedRegion, seen: int, timeout: float | None) -> bool:
        """Register `region` again unless somebody did since its generation was `seen`; True when this call did it.

        Of several at a time only one asks the server, and all others share its success or failure. Raises what the
        server answers, ShmUnrecoverable when the region was given up, or UsageError once the endpoint was closed.
        """
        entry = self._registrations.get(region.name)
        if entry is None:
            self.require_open()
            raise ShmUnrecoverable(f"shared memory {region.name!r} is no longer registered with {self.target}")
        tries = entry.tries
        with _held(entry.lock, timeout):
            if entry.generation != seen:
                return False
            if entry.tries != tries and entry.failure is not None:
                raise entry.failure
            self._tell_of(entry, region, timeout)
            if self._registrations.get(region.name) is not entry:  # given up meanwhile
                self._tell_to_forget(region.name, wait=False)
            return True

    def unregister(self, region: OwnedRegion, *, wait: bool) -> None:
        """Tell the server to forget `region`; never raises. Without `wait` it returns at once."""
        # Without the lock: a slot that the collector gives back may come here in the midst of anything.
        if self._registrations.pop(region.name, None) is not None:
            self._tell_to_forget(region.name, wait=wait)

    def close(self, until: float | None = None) -> tuple[OwnedRegion, ...]:
        """Unregister all regions, hang up, and return them, in 5 s or `until` then (`time.monotonic`), even if the
        server hangs."""
        self.closed = True
        until = time.monotonic() + UNREGISTER_SECONDS if until is None else until
        regions = self._regions()
        self._registrations.clear()
        for region in regions:
            self._tell_to_forget(region.name, wait=True, timeout=until - time.monotonic())
        self.connection.close()
        return regions

    def require_open(self) -> None:
        """Raise UsageError once the endpoint was closed."""
        if self.closed:
            raise UsageError(f"this handle to {self.target} is closed")

    def _regions(self) -> tuple[OwnedRegion, ...]:
        found = (entry.region() for entry in tuple(self._registrations.values()))
        return tuple(region for region in found if region is not None)

    def _tell_of(self, entry: _Registration, region: OwnedRegion, timeout: float | None) -> None:
        """Register under the entry's lock, without unregistering first.

        Another endpoint of this process may be the same server under another address; a moment without the region
        would fail that one's requests. Our servers replace a region of the same name.
        """
        entry.tries += 1
        entry.failure = None
        try:
            try:
                self._ask_to_register(region, timeout)
            except Unimplemented as error:
                raise UsageError(
                    f"{self.target} cannot use shared memory, it has no call to register it: {error}",
                    hint='with shared_memory="auto" or "off" tensors go to such a server inline',
                ) from None
            except RsrvError as error:
                if not answered_by_server(error) or error.reason:
                    raise
                # Stock servers refuse a name that they hold. One that we made up stands for one object only.
                if error.code is not Code.ALREADY_EXISTS or owner_pid(region.name) != os.getpid():
                    self._tell_to_forget(region.name, wait=True)
                    self._ask_to_register(region, timeout)
        except RsrvError as error:
            entry.failure = error
            if isinstance(error, (RegionLimit, RegistrationFailed)) and error.hint is None:
                error.hint = _REFUSED_HINT
            raise
        entry.generation += 1

    def _ask_to_register(self, region: OwnedRegion, timeout: float | None) -> None:
        ask(
            self.connection,
            "SystemSharedMemoryRegister",
            timeout,
            name=region.name,
            key=region.key,
            offset=0,
            byte_size=region.byte_size,
        )

    def _tell_to_forget(self, name: str, *, wait: bool, timeout: float = UNREGISTER_SECONDS) -> None:
        from rsrv.protos import inference

        body = inference.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString()
        if wait and self._mute:  # whoever has many regions does not wait for each
            timeout = 0.0
        answered = self.connection.tell("SystemSharedMemoryUnregister", body, max(_LEAST_SECONDS, timeout), wait=wait)
        if wait:
            self._mute = not answered

    # --- giving up ----------------------------------------------------------------------------------------------------

    @property
    def latched(self) -> bool:
        """Whether shared memory with this server was given up, until a probe in the background succeeds."""
        return self._latched is not None

    def latch(self, why: RsrvError) -> None:
        """Use no shared memory with this server for now. One warning, however many requests fail at a time."""
        self._give_up(why, "shm_given_up")

    def _give_up(self, why: RsrvError, event: str) -> None:
        with self._lock:
            if self._latched is not None or self.closed:
                return
            self._latched = why
        log.warning("target=%s event=%s using=inline %s", self.target, event, why)
        self._on_latch()

    def unlatch(self) -> None:
        """Use shared memory again."""
        with self._lock:
            latched, self._latched = self._latched, None
        if latched is not None:
            log.info("target=%s event=shm_again", self.target)

    def renew_all(self, timeout: float) -> None:
        """Register every known region again; raises at the first that the server refuses."""
        for region in self._regions():
            if seen := self.generation(region):
                self.renew(region, seen, timeout)

    def reset(self) -> None:
        """Forget what the server answered, and that it was latched."""
        self._routes.clear()
        self.unlatch()


@contextmanager
def _held(lock: threading.Lock, timeout: float | None) -> Iterator[None]:
    """`lock` for a ``with`` block; raises DeadlineExceeded when others hold it for `timeout` seconds."""
    if not lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
        raise DeadlineExceeded(f"another request was still preparing the same shared memory after {timeout:.3g} s")
    try:
        yield
    finally:
        lock.release()
