"""The device of `make test-gpu`: a CUDA card where RSRV_TEST_BACKEND is ``cuda``, else the CPU in its place."""

from __future__ import annotations

import os
import subprocess

import pytest

from rsrv.core.errors import ConfigError, DeviceError
from rsrv.runtime import open_device

BACKEND = os.environ.get("RSRV_TEST_BACKEND", "cpu")
ARENA_BYTES = 1 << 30
"""What a process of these tests takes of a card."""


def open_card():
    """The device, with about `ARENA_BYTES`. Skips the test, and says why, where a card is wanted and there is none."""
    if BACKEND == "cpu":
        return open_device("cpu")
    assert BACKEND == "cuda", f"RSRV_TEST_BACKEND is {BACKEND!r}, wanted cpu or cuda"
    try:
        return open_device("cuda", mem_fraction=card_share(), allow_cpu_fallback=False)
    except (ConfigError, DeviceError) as error:
        pytest.skip(f"no CUDA device: {error}")


def card_share() -> float:
    """The `runtime.mem_fraction` that is about `ARENA_BYTES`, on the smallest of the visible cards."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        smallest = min(int(line) for line in answer.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.1
    return min(0.5, ARENA_BYTES / smallest)


def server_environment(backend: str) -> dict[str, str]:
    """Variables of a server on `backend` (``cpu``, ``cuda`` or ``fake``, which is a card) with that arena.

    A device that is not the wanted one ends its start.
    """
    settings = {
        "RSRV_WORKER_RUNTIME_BACKEND": backend,
        "RSRV_WORKER_RUNTIME_ALLOW_CPU_FALLBACK": "off",
        # No warm-up, whose loads would be counted among those of the requests.
        "RSRV_WORKER_SCHEDULER_DISCIPLINE": "fifo",
    }
    if backend == "cuda":
        settings |= {"JAX_PLATFORMS": "", "RSRV_WORKER_RUNTIME_MEM_FRACTION": repr(card_share())}
    elif backend == "fake":
        settings |= {"RSRV_ALLOW_FAKE": "1", "RSRV_WORKER_RUNTIME_FAKE_MEMORY_BYTES": str(ARENA_BYTES)}
    else:
        settings |= {"RSRV_WORKER_RUNTIME_DEVICE_MEMORY_BYTES": str(ARENA_BYTES)}
    return settings
