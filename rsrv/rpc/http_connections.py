"""The connections of the HTTP listener, and when one ends because its client sends nothing, reads nothing, or takes a
place that others need. What is asked and answered on them is not its subject."""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

_QUIET_SECONDS = 60.0
_AT_ONCE = struct.pack("ii", 1, 0)
"""Of SO_LINGER: what is unsent is dropped, or the system would keep it for a client that does not read."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the listener waits for clients, and how many may be connected.

    Attributes:
        first_seconds: from the connection to the end of the first header.
        idle_seconds: from an answer to the end of the next header. More than the minute at which many scrape.
        unread_seconds: for the next byte of an answer to leave.
        connections: how many there may be, beside one for each thread of the listener. When there are that many, the
            one that has waited longest for its client makes place for a new one.
    """

    first_seconds: float = 10.0
    idle_seconds: float = 75.0
    unread_seconds: float = 30.0
    connections: int = 256

    @property
    def look_seconds(self) -> float:
        """How often to look for clients that had their time."""
        return min(self.first_seconds, self.idle_seconds, self.unread_seconds) / 4


class Transport(Protocol):
    """What is needed of asyncio's."""

    def get_extra_info(self, name: str) -> Any: ...

    def get_write_buffer_size(self) -> int: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(slots=True)
class _Connection:
    """`works` = a request is being answered; else its client is waited for, since `since`, and if `asks` for the rest
    of a request. `unsent` = bytes that the system did not take when we looked last, and `moved` when some of them left.
    """

    transport: Transport
    since: float
    works: bool = False
    asks: bool = False
    answered: bool = False
    unsent: int = 0
    moved: float = 0.0


class Connections:
    """For one thread. `limit` is how many there may be; `clock` gives seconds."""

    def __init__(self, patience: Patience, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._limit = limit
        self._clock = clock
        self._open: dict[Hashable, _Connection] = {}
        self._quiet_until = float("-inf")

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, key: Hashable, transport: Transport) -> None:
        """Note a new connection; the one that waited longest, or else this one, is closed when there are too many."""
        self._open[key] = _Connection(transport, self._clock())
        if len(self._open) <= self._limit:
            return
        # The new one is the last to be chosen, and is so when all others are being answered.
        waiting = [(each.since, number, key) for number, (key, each) in enumerate(self._open.items()) if not each.works]
        _reset(self._open.pop(min(waiting)[2]).transport)
        if self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + _QUIET_SECONDS
            log.warning("http connections closed why=there are more than %d", self._limit)

    def closed(self, key: Hashable) -> None:
        self._open.pop(key, None)

    @contextmanager
    def works(self, key: Hashable) -> Iterator[None]:
        """While a request is answered, its connection stays."""
        self._turn(key, works=True)
        try:
            yield
        finally:
            self._turn(key, works=False)
        if (connection := self._open.get(key)) is not None:
            connection.answered = True

    @contextmanager
    def waits(self, key: Hashable) -> Iterator[None]:
        """While the rest of a request is waited for, its connection may have to make place. How long that may take is
        up to who waits, and tells the client so."""
        self._turn(key, works=False, asks=True)
        try:
            yield
        finally:
            self._turn(key, works=True)

    def _turn(self, key: Hashable, *, works: bool, asks: bool = False) -> None:
        if (connection := self._open.get(key)) is not None:
            connection.works, connection.asks, connection.since = works, asks, self._clock()

    def look(self) -> None:
        """Close those whose clients had their time."""
        now = self._clock()
        for connection in list(self._open.values()):
            if self._over(connection, now):
                _reset(connection.transport)
            elif self._silent(connection, now):
                connection.transport.close()

    def abort(self) -> None:
        """Close all, whatever is unsent."""
        for connection in list(self._open.values()):
            _reset(connection.transport)

    def _over(self, connection: _Connection, now: float) -> bool:
        """Whether an answer has not moved for too long."""
        before, connection.unsent = connection.unsent, connection.transport.get_write_buffer_size()
        if connection.unsent and before and connection.unsent >= before:
            return now - connection.moved >= self._patience.unread_seconds
        connection.moved = now
        if before and not connection.unsent and not connection.works:
            connection.since = now  # the answer took until now
        return False

    def _silent(self, connection: _Connection, now: float) -> bool:
        if connection.works or connection.asks or connection.unsent:
            return False
        patience = self._patience
        return now - connection.since >= (patience.idle_seconds if connection.answered else patience.first_seconds)


def _reset(transport: Transport) -> None:
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
