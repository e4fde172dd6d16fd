"""One client process of a soak: ``python -m soak.client JSON``. It runs until its stdin closes, or it is killed.

Its report, a line of JSON on stdout, says how every request ended. How many were sent is in a file, so that the number
survives a SIGKILL.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.load import INFER, open_channel
from rsrv.client import KServeModel
from rsrv.core.errors import RsrvError
from soak.attempts import PATIENCE, Attempt, Outcome, draw, read

CALLS_PER_CHANNEL = 200
"""After which a thread connects anew."""
BY_CLIENT = frozenset({"valid", "nan", "hook"})
"""Kinds of requests that the Python client can send, too."""


@dataclass(frozen=True)
class Orders:
    """What a client is told. `number` is its own, also after a restart: no two clients of a run draw the same.

    `share` is how many of its threads use the Python client, with shared memory; the others speak gRPC.
    """

    target: str
    seed: int
    number: int
    threads: int
    share: int
    ledger: str


@dataclass
class Report:
    """Counts by ``kind outcome`` and by model; `problems` says which request (thread/number) was wrong, and how."""

    started: int = 0
    ended: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0


class Ledger:
    """Requests started and ended, by thread, in a mapped file."""

    def __init__(self, path: str | Path, threads: int, *, create: bool = False) -> None:
        self.counts = np.memmap(path, np.int64, "w+" if create else "r+", shape=(threads, 2))

    def totals(self) -> tuple[int, int]:
        started, ended = self.counts.sum(0)
        return int(started), int(ended)


class Client:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._ledger = Ledger(orders.ledger, orders.threads)
        self._report = Report()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._models: dict[str, KServeModel] = {}

    def run(self) -> Report:
        threads = [threading.Thread(target=self._loop, args=(index,)) for index in range(self._orders.threads)]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self._stop.set()
        for thread in threads:
            thread.join()
        for model in self._models.values():
            model.close()
        self._report.started, self._report.ended = self._ledger.totals()
        return self._report

    def _loop(self, thread: int) -> None:
        channels = _Channels(self._orders.target)
        shares = thread < self._orders.share
        number = 0
        while not self._stop.is_set():
            number += 1
            key = (self._orders.seed, self._orders.number, thread, number)
            attempt = draw(np.random.default_rng(key))
            self._ledger.counts[thread, 0] += 1
            began = time.monotonic()
            try:
                outcome = self._infer(attempt) if shares and attempt.kind in BY_CLIENT else channels.send(attempt)
                problem = attempt.problem(outcome)
            except Exception as error:
                outcome = Outcome("EXCEPTION")
                problem = f"{type(error).__name__}: {error}"
            self._count(key, attempt, outcome, problem, time.monotonic() - began)
            self._ledger.counts[thread, 1] += 1
        channels.close()

    def _infer(self, attempt: Attempt) -> Outcome:
        try:
            return Outcome("OK", answer=self._model(attempt.model.name).infer(attempt.inputs))
        except RsrvError as error:
            return Outcome(error.code.name, error.reason, details=error.message)

    def _count(
        self, key: tuple[int, ...], attempt: Attempt, outcome: Outcome, problem: str | None, seconds: float
    ) -> None:
        with self._lock:
            report = self._report
            report.outcomes[f"{attempt.kind} {outcome.label}"] += 1
            report.models[f"{attempt.model.name} {outcome.code}"] += 1
            report.slowest = max(report.slowest, seconds)
            if problem is not None:
                report.problems.append(f"{key} {attempt.model.name}, {attempt.kind}, {attempt.rows} rows: {problem}")

    def _model(self, name: str) -> KServeModel:
        with self._lock:
            if name not in self._models:
                self._models[name] = KServeModel(self._orders.target, name, deadline=PATIENCE)
            return self._models[name]


class _Channels:
    """Requests as bytes over gRPC, on a connection that is replaced now and then."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = open_channel(target)
        self._calls = 0

    def close(self) -> None:
        self._channel.close()

    def send(self, attempt: Attempt) -> Outcome:
        self._calls += 1
        if self._calls % CALLS_PER_CHANNEL == 0:
            self._channel.close()
            self._channel = open_channel(self._target)
        call: Any = self._channel.unary_unary(INFER).future(attempt.body, timeout=attempt.seconds)
        if attempt.cancel_after is not None:
            time.sleep(attempt.cancel_after)
            call.cancel()
        try:
            return read(call.result())
        except grpc.FutureCancelledError:
            return Outcome("CANCELLED")
        except grpc.RpcError as error:
            trailers = dict(error.trailing_metadata() or ())
            return Outcome(error.code().name, str(trailers.get("rsrv-reason", "")), details=error.details())


def main() -> int:
    report = Client(Orders(**json.loads(sys.argv[1]))).run()
    sys.stdout.write(json.dumps(vars(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
