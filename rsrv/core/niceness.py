"""The priority of threads that work in the background."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

LOWEST = 19
_LEFT_BEHIND_SECONDS = 3.0


def give_way() -> None:
    """Have the calling thread, and on Linux it alone, run only when no other wants the processor."""
    with suppress(OSError):  # it is only polite
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


def join_polite(thread: threading.Thread) -> None:
    """Wait for the end of a daemon thread that gave way. On a machine that has no processor to spare it gets none for
    its last step either, perhaps for minutes, so after three seconds it is left behind."""
    thread.join(_LEFT_BEHIND_SECONDS)
