"""The client processes of a soak: some live from its start to its end, others are killed and replaced all the time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from soak.client import Ledger, Orders

THREADS = {"steady": 8, "mortal": 4}
SHARE = {"steady": 2, "mortal": 1}
"""Threads of each client, and those of them that use shared memory."""
END_SECONDS = 90.0


class Clients:
    """Client processes against one server.

    Attributes:
        killed: pids of those that were killed.
        reports: of those that were not.
        lost: requests that killed clients had started and that had not ended.
        started: requests that all clients started.
    """

    def __init__(self, target: str, seed: int, folder: Path) -> None:
        self._target = target
        self._seed = seed
        self._folder = folder
        folder.mkdir()
        self._numbers = count()
        self._steady: list[tuple[subprocess.Popen[str], Ledger]] = []
        self._mortal: list[tuple[subprocess.Popen[str], Ledger]] = []
        self.pids: set[int] = set()
        self.killed: set[int] = set()
        self.reports: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.started = self.lost = 0

    def run(self, seconds: float, *, steady: int, mortal: int) -> None:
        """Let them work for so long, counted from when the first ones were started; return when all have ended."""
        rng = random.Random(f"{self._seed}/{next(self._numbers)}")
        self._steady = [self._start("steady") for _ in range(steady)]
        self._mortal = [self._start("mortal") for _ in range(mortal)]
        try:
            end = time.monotonic() + seconds
            for moment in _moments(rng, end, mortal):
                _sleep_until(moment)
                self._replace(rng.randrange(mortal))
            _sleep_until(end)
        finally:
            self._end()

    def _start(self, kind: str) -> tuple[subprocess.Popen[str], Ledger]:
        number, threads = next(self._numbers), THREADS[kind]
        path = self._folder / f"client{number}.ledger"
        ledger = Ledger(path, threads, create=True)
        orders = Orders(self._target, self._seed, number, threads, SHARE[kind], str(path))
        process = subprocess.Popen(
            [sys.executable, "-m", "soak.client", json.dumps(asdict(orders))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self.pids.add(process.pid)
        return process, ledger

    def _replace(self, index: int) -> None:
        process, ledger = self._mortal[index]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        self.killed.add(process.pid)
        started, ended = ledger.totals()
        self.started += started
        self.lost += started - ended
        self._mortal[index] = self._start("mortal")

    def _end(self) -> None:
        ending = [*self._steady, *self._mortal]
        for process, _ in ending:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        for process, ledger in ending:
            try:
                out, _ = process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            started, ended = ledger.totals()
            self.started += started
            if process.returncode != 0 or not out:
                self.problems.append(f"client {process.pid} ended with {process.returncode}, {started - ended} open")
                continue
            self.reports.append(json.loads(out))


def _moments(rng: random.Random, end: float, mortal: int) -> Iterator[float]:
    """When to kill one of so many clients, each a few seconds old by then."""
    at = time.monotonic() + 4.0
    while mortal and at < end:
        yield at
        at += rng.uniform(3.0, 6.0) / mortal


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
