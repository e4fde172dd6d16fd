"""A given sequence of requests against a server, so many at a time, and what its memory and its counters say."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from benchmarks.load import Stream
from benchmarks.servers import Server

PREFIX = "rsrv_worker_"


@dataclass
class Replay:
    """`latencies` are in seconds, in the order of the sequence; `errors` counts by gRPC status."""

    latencies: list[float]
    seconds: float = 0.0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.wrong + sum(self.errors.values())


def replay(channel: grpc.Channel, streams: Sequence[Stream], sequence: Sequence[int], *, in_flight: int) -> Replay:
    """Send the requests in their order, each as soon as fewer than `in_flight` are open; every answer is checked."""
    result = Replay([0.0] * len(sequence))
    positions = iter(range(len(sequence)))
    lock = threading.Lock()
    calls = {stream.path: channel.unary_unary(stream.path) for stream in streams}

    def work() -> None:
        while True:
            with lock:
                position = next(positions, None)
            if position is None:
                return
            stream = streams[sequence[position]]
            error, wrong = "", False
            began = time.perf_counter()
            try:
                answer = calls[stream.path](stream.body, timeout=120)
                result.latencies[position] = time.perf_counter() - began
                wrong = stream.check is not None and not stream.check(answer)
            except grpc.RpcError as failure:
                error = f"{failure.code().name} {dict(failure.trailing_metadata() or ()).get('rsrv-reason', '')}"
            with lock:
                result.wrong += wrong
                if error:
                    result.errors[error] += 1

    threads = [threading.Thread(target=work) for _ in range(in_flight)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.seconds = time.perf_counter() - began
    return result


# --- counters -------------------------------------------------------------------------------------------------------


def metrics(server: Server) -> dict[str, float]:
    """The server's metrics by name without the prefix; those with labels are added up."""
    totals: Counter[str] = Counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=20) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(PREFIX):
                name, value = line.rsplit(" ", 1)
                totals[name.partition("{")[0].removeprefix(PREFIX)] += float(value)
    return dict(totals)


@dataclass(frozen=True)
class CacheCounters:
    """What the weight cache did since the server started, and what it holds of its budget, in bytes."""

    loads: int
    evictions: int
    load_seconds: float
    resident: int
    budget: int

    @classmethod
    def of(cls, server: Server) -> CacheCounters:
        """Raises KeyError when the server has no budget, and so no weight cache."""
        seen = metrics(server)
        return cls(
            loads=int(seen["weight_loads_total"]),
            evictions=int(seen.get("weight_evicts_total", 0)),  # there from the first eviction on
            load_seconds=seen["weight_load_seconds_total"],
            resident=int(seen["weight_cache_resident_bytes"]),
            budget=int(seen["weight_cache_max_bytes"]),
        )

    def since(self, before: CacheCounters) -> CacheCounters:
        return CacheCounters(
            self.loads - before.loads,
            self.evictions - before.evictions,
            self.load_seconds - before.load_seconds,
            self.resident,
            self.budget,
        )


def at_rest(server: Server, *, quiet_seconds: float = 1.0, timeout: float = 300.0) -> CacheCounters:
    """Wait until nothing was loaded for a while: a server that is ready goes on measuring its programs."""
    until = time.monotonic() + timeout
    seen, since = CacheCounters.of(server), time.monotonic()
    while time.monotonic() - since < quiet_seconds:
        if time.monotonic() > until:
            raise RuntimeError(f"the server still loads weights {timeout:g} s after it was ready")
        time.sleep(0.1)
        latest = CacheCounters.of(server)
        if (latest.loads, latest.resident) != (seen.loads, seen.resident):
            seen, since = latest, time.monotonic()
    return seen


@dataclass
class Peak:
    """The most that was seen, in bytes: of the cache now and then, of the process' resident memory by the kernel."""

    cache: int = 0
    rss: int = 0
    budget: int = 0


@contextmanager
def watched(server: Server, *, every: float = 0.1) -> Iterator[Peak]:
    """The peaks while the block runs; they are complete when it was left."""
    peak, over = Peak(), threading.Event()
    reset_peak_rss(server.pid)

    def look() -> None:
        while not over.wait(every):
            seen = CacheCounters.of(server)
            peak.cache = max(peak.cache, seen.resident)
            peak.budget = seen.budget

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        peak.rss = memory(server.pid, "VmHWM")


# --- memory ---------------------------------------------------------------------------------------------------------


def memory(pid: int, field: str = "VmRSS") -> int:
    """Bytes of resident memory of a process: now (VmRSS), or at most (VmHWM) since `reset_peak_rss`."""
    return _kilobytes(Path(f"/proc/{pid}/status"), field)


def pss(pid: int) -> int:
    """Bytes of resident memory, where a page that n processes share counts as 1/n: those of all processes add up."""
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss")


def reset_peak_rss(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _kilobytes(path: Path, field: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])
