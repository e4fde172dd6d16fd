"""A closed-loop load driver: N requests in flight over raw-bytes gRPC calls, and what the server paid for them.

The driver knows nothing of the client library, so that it costs the same whatever server it drives. Later benchmarks
reuse it: give it one `Stream` per model and the pids of the server.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import psutil

MESSAGE_LIMIT = 1 << 30
INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class Stream:
    """Requests for one model: `body` is the serialised request, `weight` its share of the traffic."""

    model: str
    body: bytes
    weight: float = 1.0
    path: str = INFER
    check: Callable[[bytes], bool] | None = None


@dataclass
class ModelResult:
    model: str
    requests: int = 0
    errors: int = 0
    wrong: int = 0
    latencies: list[float] = field(default_factory=list, repr=False)

    def quantile(self, q: float) -> float:
        """Nearest-rank quantile of the latencies, in milliseconds."""
        ordered = sorted(self.latencies)
        rank = max(1, math.ceil(q * len(ordered)))
        return 1e3 * ordered[rank - 1] if ordered else float("nan")


@dataclass
class LoadResult:
    """`cpu_us` is user + system time of the server processes per finished request, in microseconds."""

    seconds: float
    in_flight: int
    models: list[ModelResult]
    cpu_us: float

    @property
    def requests(self) -> int:
        return sum(m.requests for m in self.models)

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    def to_json(self) -> dict[str, Any]:
        rows = [
            {k: v for k, v in asdict(m).items() if k != "latencies"}
            | {f"p{round(q * 100)}_ms": m.quantile(q) for q in (0.5, 0.9, 0.99)}
            for m in self.models
        ]
        return {"seconds": self.seconds, "in_flight": self.in_flight, "rate": self.rate, "cpu_us": self.cpu_us} | {
            "models": rows
        }


def cpu_seconds(pids: Sequence[int]) -> float:
    """User + system seconds of the processes and of all their living descendants."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def open_channel(target: str) -> grpc.Channel:
    options = [
        ("grpc.max_send_message_length", MESSAGE_LIMIT),
        ("grpc.max_receive_message_length", MESSAGE_LIMIT),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.insecure_channel(target, options=options)


def drive(
    target: str,
    streams: Sequence[Stream],
    *,
    in_flight: int,
    seconds: float,
    server_pids: Sequence[int] = (),
    warmup_seconds: float = 0.5,
    seed: int = 0,
    deadline: float = 60.0,
) -> LoadResult:
    """Keep `in_flight` requests going for `seconds` after a warm-up, and count what finished in that time; for longer,
    up to `deadline`, when nothing did."""
    channel = open_channel(target)
    calls = {s.path: channel.unary_unary(s.path) for s in streams}
    weights = [s.weight for s in streams]
    results = {s.model: ModelResult(s.model) for s in streams}
    lock = threading.Lock()
    measuring = threading.Event()
    stop = threading.Event()
    counting = threading.Event()

    def loop(index: int) -> None:
        rng = random.Random(f"{seed}/{index}")
        while not stop.is_set():
            stream = rng.choices(streams, weights)[0] if len(streams) > 1 else streams[0]
            counted = measuring.is_set()
            started = time.perf_counter()
            error, wrong = False, False
            try:
                answer = calls[stream.path](stream.body, timeout=deadline)
                wrong = stream.check is not None and not stream.check(answer)
            except grpc.RpcError:
                error = True
            elapsed = time.perf_counter() - started
            if counted and not stop.is_set():
                with lock:
                    row = results[stream.model]
                    row.requests += not error
                    row.errors += error
                    row.wrong += wrong
                    row.latencies.append(elapsed)
                counting.set()

    threads = [threading.Thread(target=loop, args=(i,), daemon=True) for i in range(in_flight)]
    for thread in threads:
        thread.start()
    time.sleep(warmup_seconds)
    cpu_before = cpu_seconds(server_pids)
    measuring.set()
    started = time.perf_counter()
    time.sleep(seconds)
    counting.wait(deadline)
    stop.set()
    elapsed = time.perf_counter() - started
    cpu = cpu_seconds(server_pids) - cpu_before
    for thread in threads:
        thread.join()
    channel.close()
    done = sum(r.requests for r in results.values())
    return LoadResult(elapsed, in_flight, list(results.values()), 1e6 * cpu / done if done else float("nan"))


def median_of(results: Sequence[LoadResult], read: Callable[[LoadResult], float]) -> float:
    return statistics.median(read(r) for r in results)


def pin(core: int) -> None:
    """Keep this process on one core, so that server and driver do not fight over both."""
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {core})
