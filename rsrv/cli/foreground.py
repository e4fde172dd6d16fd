"""A command that serves in the foreground: its standard streams, signals before there is a server, and its end."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from rsrv.cli import output

_LEFT_BEHIND_SECONDS = 3.0
"""How long the process may take to end once the server has stopped and the main thread has returned."""

_serves = False
_code: int | None = None
"""What the process ends with, once that is known."""


def stdout_to_stderr() -> None:
    """After the one line of data: what others print is none, and nobody may be reading stdout any more, and a full pipe
    would stop them for good."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file, in a test
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def note(text: str) -> None:
    """Say `text` on stderr. A full disk under the log is no reason to stop."""
    with contextlib.suppress(OSError):
        output.note(text)


def open_standard_streams() -> None:
    """Give stdin, stdout and stderr that somebody closed to /dev/null: a socket must not get one of their numbers."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))


@contextlib.contextmanager
def signals_end_it() -> Iterator[None]:
    """Until the server takes SIGTERM and SIGINT over there is nothing to stop: either ends the command, gracefully."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    if not os.isatty(0):  # a hangup is nothing to a server; that of a terminal ends what runs in it
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serves() -> None:
    """Called first by a command that serves: the standard streams are made fit for it, and its end is looked after."""
    global _serves
    open_standard_streams()
    if not _serves:
        _serves = True
        atexit.register(_leave)  # before hooks are imported: the first that is registered is the last that runs


def end_soon(code: int) -> None:
    """Of a command that served: end the process with `code` although a hook left a thread or an exit function behind
    that never ends, and without taking the interpreter apart. Others end as always."""
    global _code
    if not _serves:
        return
    _code = code

    def end() -> None:
        threading.main_thread().join()
        time.sleep(_LEFT_BEHIND_SECONDS)
        left = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        note(f"ended although hooks left something running: {', '.join(left) or 'an exit function'}")
        os._exit(code)

    threading.Thread(target=end, name="rsrv-end", daemon=True).start()


def _leave() -> None:
    """All threads and the other exit functions have ended. To free every object of jax takes a second of CPU, and on a
    machine that has none to spare half a minute in which the server looks as if it did not stop."""
    if _code is None:
        return
    logging.shutdown()
    for each in gc.get_objects():  # the standard streams, and files that hooks have written to and not closed
        if issubclass(type(each), io.IOBase):
            with contextlib.suppress(Exception):
                each.flush()
    os._exit(_code)
