"""A serving process: the signals that end it, the files that it may open, how its threads take turns."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType

Ends = SimpleQueue[int | BaseException | None]
"""What ends a server's run: the number of a signal, an error of its bring-up, or None when somebody called `stop`."""

_LOOK_SECONDS = 0.5

MAX_FILES = 1 << 16

SWITCH_SECONDS = 0.001
"""How long a thread may keep the GIL when another wants it. CPython's 5 ms make a request, which changes threads four
times, wait up to 20 ms while a bundle is loaded; at 0.1 ms the switching itself costs a third more per request."""

FORCED_EXIT = 128
"""A second signal ends the process at once with this plus the signal's number, as a shell would report it."""


def raise_file_limit() -> None:
    """Let this process open as many files as it may ask for, within reason: a connection and a region take one each,
    and the usual soft limit of 1024, meant for programs that call select(), is one client's regions."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def first_end(ends: Ends, on_hangup: Callable[[], None]) -> int | BaseException | None:
    """What ends the server, as soon as it is there; a hangup does not, and is told.

    With a timeout, because a signal that arrives just before the main thread blocks does not wake it: its handler,
    which fills the queue, runs only when that thread runs again.
    """
    while True:
        try:
            end = ends.get(timeout=_LOOK_SECONDS)
        except Empty:
            continue
        if end != signal.SIGHUP:
            return end
        on_hangup()


@contextmanager
def signals_into(ends: Ends) -> Iterator[None]:
    """Put the first SIGTERM or SIGINT into `ends`, and every SIGHUP; let a second one end the process.

    Where standard input is a terminal, SIGHUP is as SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = 0
    # The hangup of a terminal: who closes the window wants what runs in it to end.
    of_terminal = os.isatty(0)

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal received
        if number == signal.SIGHUP and not of_terminal:
            ends.put(number)
            return
        if number == signal.SIGHUP and received:
            return  # shell and kernel both send it
        received += 1
        if received > 1:
            os._exit(FORCED_EXIT + number)
        # SimpleQueue.put may be called inside a signal handler; events and locks may not.
        ends.put(signal.SIGTERM if number == signal.SIGHUP else number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
