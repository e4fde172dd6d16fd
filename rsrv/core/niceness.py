"""The priority of threads that work in the background."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

LOWEST = 19


def give_way() -> None:
    """Have the calling thread, and on Linux it alone, run only when no other wants the processor."""
    with suppress(OSError):  # it is only polite
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
