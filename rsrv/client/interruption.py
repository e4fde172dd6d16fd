"""Mends a channel after Ctrl-C, or whatever else a signal handler raised, amid a call of grpcio.

grpcio guards the calls of a channel with a re-entrant lock that it takes in Python. An exception that strikes then
leaves it taken by that thread for ever: calls of other threads, the thread that answers `future`s and whoever waits
for these then hang, whatever their deadlines are.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import grpc

_REENTRANT = type(threading.RLock())


def mend(channel: grpc.Channel) -> None:
    """Release the lock of `channel` if this thread has it. Call it where no call of grpcio is under way."""
    condition = _condition(channel)
    if condition is not None:
        with contextlib.suppress(RuntimeError):  # at last: this thread does not have it
            while True:
                condition.release()


def _condition(channel: grpc.Channel) -> threading.Condition | None:
    """What guards the calls of `channel`; None for one that is not built as those of grpcio are."""
    inner: Any = channel
    while hasattr(inner, "_channel"):  # one with interceptors holds another one
        inner = inner._channel
    for state in gc.get_referents(inner):
        if type(state).__name__ == "_ChannelState":
            for part in gc.get_referents(state):
                if isinstance(part, threading.Condition) and isinstance(getattr(part, "_lock", None), _REENTRANT):
                    return part
    return None
