"""What the processes that a server starts have in common: they end with it, and how one ended can be said in words."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """The kernel ends this process with the thread that started it, a thread of the process `parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def ending_of(returncode: int | None) -> str:
    """How a process ended, as the end of a sentence; `returncode` as in `subprocess.Popen`, None = it still runs."""
    if returncode is None:
        return "it closed its pipe"
    if returncode >= 0:
        return f"it ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    killer = " (often the kernel, when memory runs out)" if name == "SIGKILL" else ""
    return f"it was ended by {name}{killer}"
