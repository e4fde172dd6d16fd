"""What a process holds: memory, descriptors, threads, children. Sampled while it works, compared when it rests."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rsrv.core.shm.objects import owner_pid

MIB = 1 << 20


@dataclass(frozen=True)
class Vitals:
    """One look: `files` are the descriptors by what they lead to, `tasks` the threads by their names in the system."""

    rss: int
    fds: int
    threads: int
    children: int
    files: Counter[str]
    tasks: Counter[str]

    @classmethod
    def of(cls, pid: int) -> Vitals:
        process = psutil.Process(pid)
        files: Counter[str] = Counter()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                files[os.readlink(fd).split(":")[0]] += 1
        tasks: Counter[str] = Counter()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                tasks[(task / "comm").read_text().strip()] += 1
        children, rss = len(process.children(recursive=True)), process.memory_info().rss
        return cls(rss, sum(files.values()), sum(tasks.values()), children, files, tasks)

    def summary(self) -> dict[str, int]:
        return {"rss_bytes": self.rss, "fds": self.fds, "threads": self.threads, "children": self.children}


class Watch:
    """Samples the resident memory of a process twice a second between `start` and `stop`."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: list[tuple[float, int]] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stop.wait(0.5):
            self.samples.append((time.monotonic() - began, self._process.memory_info().rss))


def growth(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes that memory grew by over the samples, by the line of least squares through them."""
    if len(samples) < 3:
        return 0.0
    slope, _ = statistics.linear_regression([t for t, _ in samples], [float(rss) for _, rss in samples])
    return slope * (samples[-1][0] - samples[0][0])


def shared_memory() -> dict[str, int]:
    """Objects in /dev/shm that carry the name of their maker, and its pid."""
    objects = ((name, owner_pid(name)) for name in os.listdir("/dev/shm"))
    return {name: pid for name, pid in objects if pid is not None}


def remove_shared_memory(name: str) -> None:
    Path("/dev/shm", name).unlink(missing_ok=True)
