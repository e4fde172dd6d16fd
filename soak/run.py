"""A soak from the export of its models to its verdict: warm up, rest, work, rest, compare."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import INFER, open_channel
from benchmarks.replay import CacheCounters
from benchmarks.servers import Server, rsrv_server
from rsrv.core.status import WorkerStatus
from rsrv.core.wire import encode_request, join
from soak.fleet import Clients
from soak.models import models
from soak.vandal import Vandal
from soak.verdict import Check, judge
from soak.vitals import Vitals, Watch, remove_shared_memory, shared_memory

CONCURRENT = 16
"""Of the server's requests; the clients have more threads, so that some are turned away."""
ENGINE_THREADS = CONCURRENT + CONCURRENT // 2 + 32
REST_SECONDS = 30.0
"""Longest time until a server without clients has to have come to rest."""

ENVIRON = {
    "JAX_PLATFORMS": "cpu",
    "RSRV_WORKER_RUNTIME_BACKEND": "cpu",
    "RSRV_WORKER_ENDPOINTS_MAX_CONCURRENT_REQUESTS": str(CONCURRENT),
    "RSRV_WORKER_SCHEDULER_MAX_QUEUE_DEPTH": "12",
    "RSRV_WORKER_SHM_REAP_SECONDS": "2",
    "RSRV_WORKER_HOOKS_MAX_LOST": "1000000",
    # What the vandal does to the files is to be found damaged, and not to be loaded.
    "RSRV_WORKER_MODEL_CONTROL_MODE": "static",
}

ARENA_BYTES = 64 << 20
"""Of a soak with a small budget: much more than the scratch, so that the share for weights alone is what is small."""


@dataclass
class Record:
    """What a soak saw.

    Attributes:
        before, after: the server at rest.
        samples: its memory at work (seconds, bytes).
        started: requests that all clients sent, and of these what clients that lived to the end sent and finished.
        extra: requests that no client sent.
        cache: what the weight cache did; None = the server had no budget.
        vandal: who damaged weights files meanwhile; None = nobody.
        cut_off: requests that clients were killed in.
    """

    seconds: float
    seed: int
    before: Vitals
    after: Vitals
    samples: list[tuple[float, int]]
    status: WorkerStatus
    outcomes: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    started: int = 0
    extra: int = 0
    cache: CacheCounters | None = None
    vandal: Vandal | None = None
    survivors_started: int = 0
    survivors_ended: int = 0
    cut_off: int = 0
    killed: int = 0
    slowest: float = 0.0
    left_in_shared_memory: list[str] = field(default_factory=list)
    exit_code: int | None = None
    log: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "seconds": self.seconds,
            "seed": self.seed,
            "checks": [{"name": c.name, "passed": c.passed, "found": c.found} for c in self.checks],
            "requests": {"started": self.started, "killed_clients": self.killed, "cut_off_by_kills": self.cut_off},
            "outcomes": dict(sorted(self.outcomes.items())),
            "models": dict(sorted(self.models.items())),
            "slowest_seconds": self.slowest,
            "weight_cache": None if self.cache is None else asdict(self.cache),
            "damaged": {} if self.vandal is None else dict(sorted(self.vandal.outcomes.items())),
            "before": self.before.summary(),
            "after": self.after.summary(),
            "rss_samples": [[round(t, 1), rss] for t, rss in self.samples],
            "problems": self.problems,
        }


def soak(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    steady: int,
    mortal: int,
    say: Callable[[str], None],
    small_budget: bool = False,
) -> Record:
    """Run clients against a server for `seconds`, after a warm-up of a fifth of that; `folder` has to be empty.

    With a `small_budget` the device holds the weights of the largest model alone, or some of the others, and files of
    weights are damaged after a third of the time.
    """
    repo = folder / "models"
    repo.mkdir()
    for model in models().values():
        say(f"export {model.name}")
        model.write(repo)
    present = set(shared_memory())
    environ = ENVIRON | (_budget() if small_budget else {})
    vandal = Vandal(repo) if small_budget else None
    with rsrv_server(repo, environ=environ, core=None) as server:
        say(f"warm up: {seconds / 5:.0f} s")
        warm = Clients(server.target, seed, folder / "warm")
        warm.run(max(6.0, seconds / 5), steady=steady, mortal=mortal)
        extra = _start_all_threads(server)
        before = _at_rest(server, warm)
        say(f"soak: {seconds:.0f} s, seed {seed}")
        clients = Clients(server.target, seed + 1, folder / "work")
        with _watched(server.pid) as watch:
            if vandal is not None:
                vandal.start(server.target, after=seconds / 3)
            try:
                clients.run(seconds, steady=steady, mortal=mortal)
            finally:
                if vandal is not None:
                    vandal.stop()
        say("rest")
        after = _at_rest(server, clients)
        record = Record(seconds, seed, before, after, watch.samples, _status(server), extra=extra)
        if vandal is not None:
            record.cache, record.vandal = CacheCounters.of(server), vandal
            record.problems += vandal.problems
            record.extra += vandal.requests
        server.process.terminate()
        record.exit_code = server.process.wait(60)
        record.log = server.log.read_text(errors="replace").splitlines()
        pids = warm.pids | clients.pids | {server.pid}
    for fleet in (warm, clients):
        _add(record, fleet)
    record.left_in_shared_memory = [
        name for name, pid in shared_memory().items() if name not in present and pid in pids
    ]
    record.checks = judge(record)
    return record


def _budget() -> dict[str, str]:
    largest = max(sum(array.nbytes for array in model.weights.values()) for model in models().values())
    return {
        "RSRV_WORKER_RUNTIME_DEVICE_MEMORY_BYTES": str(ARENA_BYTES),
        # Rounded up, so that the budget is not a byte below the largest model.
        "RSRV_WORKER_RUNTIME_WEIGHT_CACHE_FRACTION": repr((largest + 1) / ARENA_BYTES),
    }


def _add(record: Record, clients: Clients) -> None:
    record.problems += clients.problems
    record.started += clients.started
    record.cut_off += clients.lost
    record.killed += len(clients.killed)
    for report in clients.reports:
        record.outcomes.update(report["outcomes"])
        record.models.update(report["models"])
        record.problems += report["problems"]
        record.survivors_started += report["started"]
        record.survivors_ended += report["ended"]
        record.slowest = max(record.slowest, report["slowest"])


@contextmanager
def _watched(pid: int) -> Iterator[Watch]:
    watch = Watch(pid)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def _start_all_threads(server: Server) -> int:
    """Have the server start what it starts when needed. Calls that send nothing hold a thread of the engine each."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    channel = open_channel(server.target)
    calls = [channel.stream_unary(INFER).future(nothing()) for _ in range(ENGINE_THREADS)]
    threads = 0
    while (now := Vitals.of(server.pid).threads) > threads:  # until it starts no more
        threads = now
        time.sleep(1.0)
    for call in calls:
        call.cancel()
    over.set()
    # The threads for hooks are started when several calls wait for one.
    for model in models().values():
        body = join(encode_request(model.name, list(model.inputs(np.random.default_rng(0), 1).items())))
        for _ in range(5):
            calls = [channel.unary_unary(INFER).future(body, timeout=60) for _ in range(CONCURRENT)]
            for call in calls:
                call.exception()
    channel.close()
    return len(models()) * 5 * CONCURRENT


def _at_rest(server: Server, clients: Clients) -> Vitals:
    """The server when it is idle, has replaced lost hook processes, and has dropped the memory of dead clients."""
    until = time.monotonic() + REST_SECONDS
    seen: list[tuple[int, int, int]] = []
    while time.monotonic() < until:
        # Half a second after the last request over HTTP, whose thread and connection end by themselves.
        vitals = Vitals.of(server.pid)
        seen.append((vitals.fds, vitals.threads, vitals.children))
        # Nothing has changed for three seconds.
        if len(seen) > 6 and len(set(seen[-6:])) == 1 and not _regions(server):
            break
        time.sleep(0.5)
    for name, pid in shared_memory().items():
        if pid in clients.killed:
            remove_shared_memory(name)
    return vitals


def _regions(server: Server) -> float:
    return sum(
        float(line.split()[-1])
        for line in _get(server, "/metrics").splitlines()
        if line.startswith("rsrv_worker_shm_regions")
    )


def _status(server: Server) -> WorkerStatus:
    return WorkerStatus.model_validate_json(_get(server, "/v1/status"))


def _get(server: Server, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}{path}", timeout=20) as answer:
        return str(answer.read().decode())
