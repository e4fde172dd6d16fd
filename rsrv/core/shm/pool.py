"""Buffers for tensors on their way: one region, shared or not, whose slots are lent first come, first served.

Not for what lies in a slot (`rsrv.core.shm.slot`), nor for telling servers about the region.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rsrv.core.errors import PoolAcquireTimeout, PoolWithdrawn, RsrvError, UsageError
from rsrv.core.memory import ALIGNMENT, aligned_empty
from rsrv.core.shm.owned import OwnedRegion
from rsrv.core.shm.slot import PoolSlot

if TYPE_CHECKING:
    import asyncio

_FREE, _LENT, _WITHDRAWN = 0, 1, 2
_POISON = 0xA5
_LENT_IS_FREE = bytes.maketrans(bytes((_LENT,)), bytes((_FREE,)))


_Outcome: TypeAlias = PoolSlot | RsrvError | None
"""Of a wait; None: it was given up."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A place in the line. `wake` tells the waiter that there is an outcome; RuntimeError: it waits no more."""

    span: int
    wake: Callable[[], None]
    _outcome: dict[str, _Outcome] = field(default_factory=dict)

    def settle(self, outcome: _Outcome) -> _Outcome:
        """Only the first outcome counts; returns that one."""
        return self._outcome.setdefault("", outcome)


class BufferPool:
    """`n_slots` equal slots of one region. Thread safe, and safe to be used from several event loops.

    Whoever asks first is served first, even if a later one would fit: many small requests cannot starve a large one.
    A pool that nobody closed is unlinked when it is collected, or at exit. A forked child can do nothing with it.

    Attributes:
        n_slots, slot_bytes, n_bytes: `n_bytes` is their product, what can be used: the size that was asked for, less
            what does not make a multiple of 64 bytes in every slot (a slot has at least 64).
        region: the shared memory, None for a pool inside this process.
        memory: all bytes of the pool, uint8 of shape (n_bytes,).
    """

    def __init__(
        self, n_bytes: int, *, n_slots: int = 8, use_shm: bool = True, name: str = "pool", key: str | None = None
    ) -> None:
        """`name` becomes a part of the region's random key; `key` is that key itself, and must not exist.

        Raises UsageError for sizes or names that make no pool, OSError when the system refuses (ENOSPC: no room,
        EEXIST: `key` is in use).
        """
        if n_bytes <= 0 or n_slots <= 0 or n_bytes < n_slots:
            raise UsageError(
                f"a pool of {n_bytes} bytes in {n_slots} slots is not possible",
                hint=f"both are at least 1, and a slot has at least one byte ({ALIGNMENT} are better)",
            )
        self.n_slots = n_slots
        self.slot_bytes = max(n_bytes // n_slots // ALIGNMENT, 1) * ALIGNMENT
        self.n_bytes = self.slot_bytes * n_slots
        self.region: OwnedRegion | None = None
        self.memory: np.ndarray
        if use_shm:
            try:
                self.region = OwnedRegion.create(name, self.n_bytes, key=key)
            except ValueError as error:
                raise UsageError(str(error)) from None
            self.memory = np.frombuffer(self.region.view, np.uint8)
        else:
            self.memory = aligned_empty(self.n_bytes, np.uint8)
        self._poison = os.environ.get("RSRV_POOL_POISON") == "1"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._states = bytearray(n_slots)
        self._longest = n_slots  # the longest run of slots that are not withdrawn
        self._tickets: deque[_Ticket] = deque()
        # These three, and a ticket's outcome, change without the lock, each in one step that nothing can interrupt: a
        # finalizer may give a slot back wherever the collector strikes, even where this very thread has the lock.
        self._lent: dict[int, tuple[int, int]] = {}  # generation → first slot, span
        self._returned: deque[tuple[int, int, bool]] = deque()  # first slot, span, reusable
        self._left: deque[_Ticket] = deque()
        self._out = 0
        self._generation = 0
        self._retired = False
        self._closed = False
        self._when_idle: Callable[[], None] | None = None

    @property
    def region_name(self) -> str:
        """What requests call the region; empty for a pool inside this process."""
        return self.region.name if self.region is not None else ""

    @property
    def key(self) -> str:
        """What servers register; empty for a pool inside this process."""
        return self.region.key if self.region is not None else ""

    @property
    def free(self) -> int:
        """How many slots nobody has now."""
        with self._held():
            return self._states.count(_FREE)

    @property
    def withdrawn(self) -> int:
        """How many slots are never lent again, because somebody may still write into them."""
        with self._held():
            return self._states.count(_WITHDRAWN)

    @property
    def lent(self) -> int:
        """How many loans are not back yet."""
        with self._held():
            return self._out

    @property
    def waiting(self) -> int:
        """How many wait in the line."""
        with self._held():
            return len(self._tickets)

    def lends(self, generation: int) -> bool:
        """Whether the loan of that number is not back yet."""
        return generation in self._lent

    def acquire(self, span: int = 1, deadline: float | None = None) -> PoolSlot:
        """Wait for `span` adjacent slots, the lowest that are free, until `deadline` on `time.monotonic`, or for ever.

        Raises UsageError for a span that no pool of this size has, PoolAcquireTimeout past the deadline (even if
        slots are free), and PoolWithdrawn when this pool will never again have so many slots to lend.
        """
        started = self._check(span, deadline)
        with self._held():
            slot = self._at_once(span)
            if slot is not None:
                return slot
            bell = threading.Lock()
            bell.acquire()
            ticket = _Ticket(span, bell.release)
            self._tickets.append(ticket)
        try:
            bell.acquire(timeout=-1.0 if deadline is None else min(deadline - started, threading.TIMEOUT_MAX))
        except BaseException:
            self._leave(ticket)
            raise
        return self._outcome(ticket, started)

    async def aacquire(self, span: int = 1, deadline: float | None = None) -> PoolSlot:
        """Like `acquire`, in the same line, for a task of an event loop. A task that is cancelled gets no slot."""
        import asyncio

        started = self._check(span, deadline)
        loop = asyncio.get_running_loop()
        with self._held():
            slot = self._at_once(span)
            if slot is not None:
                return slot
            bell: asyncio.Future[None] = loop.create_future()
            ticket = _Ticket(span, lambda: _ring(loop, bell))
            self._tickets.append(ticket)
        try:
            await asyncio.wait((bell,), timeout=None if deadline is None else deadline - started)
        except BaseException:
            self._leave(ticket)
            raise
        return self._outcome(ticket, started)

    def release(self, slot: PoolSlot, *, reusable: bool = True) -> None:
        """Give `slot` back: who waits for it has it when this returns. Nothing happens for a carved part.

        With `reusable` False its slots are never lent again: a server that is late may still write into them.
        Raises UsageError for a slot that was given back before, or belongs to another pool.
        """
        if slot.pool is not self:
            raise UsageError(f"{slot!r} does not belong to {self!r}")
        if slot.index is None:
            return
        place = self._lent.pop(slot.generation, None)
        if place is None:
            raise UsageError(f"double release of slot {slot.index} of {self!r}: it was given back before")
        if self._pid != os.getpid():
            return  # the memory is the parent's
        if self._poison and reusable:
            self.memory[slot.offset : slot.offset + slot.capacity] = _POISON
        self._returned.append((*place, reusable))
        self._settle()

    def retire(self, when_idle: Callable[[], None] | None = None) -> None:
        """Lend no more: who waits, or asks later, gets PoolWithdrawn. The region stays for what is lent already.

        `when_idle` is called once every slot is back: at once, or by the thread that returns the last one, with no
        lock held. It may be given once.
        """
        if self._pid != os.getpid():
            return
        with self._held():
            self._retired = True
            if when_idle is not None:
                self._when_idle = when_idle
            self._turn_away()

    def close(self) -> None:
        """Retire and unlink the region; it stays mapped until the last slot is back. Idempotent."""
        self.retire()
        if self._pid != os.getpid():
            return
        with self._held():
            if not self._closed:
                self._closed = True
                if self.region is not None:
                    self.region.unlink()

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BufferPool {self.region_name or 'inline'}: {self.n_slots} × {self.slot_bytes} bytes>"

    # --- before and after the wait -----------------------------------------------------------------------------------

    def _check(self, span: int, deadline: float | None) -> float:
        """Refuse what can be refused before any wait; returns the time."""
        if not 1 <= span <= self.n_slots:
            raise UsageError(
                f"cannot lend {span} adjacent slots: {self!r} has {self.n_slots}",
                hint="make the pool larger (client_init(pool_bytes=…)), or its slots fewer and larger (n_slots=…)",
            )
        if self._pid != os.getpid():
            raise PoolWithdrawn(f"{self!r} belongs to process {self._pid}, which forked this one")
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            raise PoolAcquireTimeout(span, 0.0)
        return now

    def _outcome(self, ticket: _Ticket, started: float) -> PoolSlot:
        """The end of a wait: what came, or else the deadline."""
        outcome = ticket.settle(None)
        if outcome is None:
            self._left.append(ticket)
            self._settle()
            raise PoolAcquireTimeout(ticket.span, time.monotonic() - started)
        if isinstance(outcome, PoolSlot):
            return outcome
        raise outcome

    def _leave(self, ticket: _Ticket) -> None:
        """Give up waiting, or give back the slot that came while the waiter went."""
        outcome = ticket.settle(None)
        if isinstance(outcome, PoolSlot) and outcome.live:
            self.release(outcome)
        self._left.append(ticket)
        self._settle()

    # --- under the lock ----------------------------------------------------------------------------------------------

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The lock; what happened without it is taken in before and after."""
        try:
            with self._lock:
                self._take_in()
                yield
        finally:
            self._settle()

    def _settle(self) -> None:
        """Take in what happened without the lock, unless it is held: its holder does that next."""
        while self._unsettled() and self._lock.acquire(blocking=False):
            when_idle = None
            try:
                self._take_in()
                if self._idle():
                    when_idle, self._when_idle = self._when_idle, None
                    if self._closed and self.region is not None and self.memory.size:
                        self.memory = np.empty(0, np.uint8)
                        self.region.close()
            finally:
                self._lock.release()
            if when_idle is not None:
                when_idle()

    def _unsettled(self) -> bool:
        waiting = self._when_idle is not None or (self._closed and self.region is not None and self.memory.size > 0)
        return bool(self._returned or self._left or (waiting and self._idle()))

    def _idle(self) -> bool:
        return self._retired and not self._out

    def _take_in(self) -> None:
        while self._left:
            ticket = self._left.popleft()
            if ticket in self._tickets:
                self._tickets.remove(ticket)
        withdrew = False
        while self._returned:
            index, span, reusable = self._returned.popleft()
            self._states[index : index + span] = bytes((_FREE if reusable else _WITHDRAWN,)) * span
            self._out -= 1
            withdrew |= not reusable
        if withdrew:
            runs = self._states.translate(_LENT_IS_FREE).split(bytes((_WITHDRAWN,)))
            self._longest = max(map(len, runs))
            self._turn_away()
        self._serve()

    def _serve(self) -> None:
        """Hand slots to the head of the line while they fit."""
        while self._tickets:
            ticket = self._tickets[0]
            start = self._states.find(bytes(ticket.span))
            if start < 0:
                return
            self._tickets.popleft()
            slot = self._lend(start, ticket.span)
            if not self._tell(ticket, slot):
                self._lent.pop(slot.generation)
                self._states[start : start + slot.span] = bytes(slot.span)
                self._out -= 1

    def _tell(self, ticket: _Ticket, outcome: PoolSlot | RsrvError) -> bool:
        """Whether the waiter will take it."""
        if ticket.settle(outcome) is not outcome:
            return False
        try:
            ticket.wake()
        except RuntimeError:  # its event loop is closed
            return False
        return True

    def _at_once(self, span: int) -> PoolSlot | None:
        """A slot without waiting, None when there is none yet or others are in the line."""
        if self._hopeless(span):
            raise self._refusal(span)
        if self._tickets:
            return None
        start = self._states.find(bytes(span))
        return self._lend(start, span) if start >= 0 else None

    def _lend(self, start: int, span: int) -> PoolSlot:
        self._states[start : start + span] = bytes((_LENT,)) * span
        self._out += 1
        self._generation += 1
        self._lent[self._generation] = (start, span)
        offset = start * self.slot_bytes
        return PoolSlot(self, self._generation, start, span, offset, span * self.slot_bytes)

    def _hopeless(self, span: int) -> bool:
        return self._retired or span > self._longest

    def _turn_away(self) -> None:
        """Fail everybody in the line for whom there will never be a slot."""
        for ticket in [ticket for ticket in self._tickets if self._hopeless(ticket.span)]:
            self._tickets.remove(ticket)
            self._tell(ticket, self._refusal(ticket.span))

    def _refusal(self, span: int) -> PoolWithdrawn:
        if self._retired:
            return PoolWithdrawn(f"{self!r} lends no more: it was closed, or another one took its place")
        return PoolWithdrawn(
            f"{self!r} will never again have {span} adjacent slots: a server may still write into "
            f"{self._states.count(_WITHDRAWN)} of them"
        )


def _ring(loop: asyncio.AbstractEventLoop, bell: asyncio.Future[None]) -> None:
    def ring() -> None:
        if not bell.done():
            bell.set_result(None)

    loop.call_soon_threadsafe(ring)
