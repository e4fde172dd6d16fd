"""How full the device is under load, and what a model that serves feels of others that compile and load."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import models
from benchmarks.direct import direct_loop
from benchmarks.load import INFER, ModelResult, Stream, drive, median_of, open_channel
from benchmarks.report import Bound, Measurement
from benchmarks.resnets import SHORT_STAGES, STAGES, resnet
from benchmarks.servers import Server, rsrv_server, wait_ready
from benchmarks.traced import Trace, traced_server
from rsrv.core.status import WorkerStatus
from rsrv.core.wire import encode_request, join
from rsrv.runtime.compile_child import NICENESS

CLIENTS = 32
SERVING = "a-serving"
"""Of the models, the first one in the order of names, so that it is prepared before the others."""


def full_batches(*, short: bool) -> Iterator[Measurement]:
    """32 clients with one row each and one thread for the device, against full batches in a loop without a server."""
    rounds, seconds, warmup = (1, 0.3, 0.2) if short else (10, 6.0, 1.0)
    made: dict[str, Any] = {"steps": 40, "batch_sizes": (1, CLIENTS)} if short else {}
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        bundle = models.rows(Path(tmp), **made)
        stream = Stream("rows", join(encode_request("rows", [("x", np.ones((1, 64, 64), np.float32))])))
        direct = stack.enter_context(direct_loop(bundle, CLIENTS, 1))
        environ = {"RSRV_WORKER_RUNTIME_CPU_THREADS": "1"}
        plain = stack.enter_context(rsrv_server(Path(tmp), environ=environ, core=None))
        window = stack.enter_context(
            rsrv_server(Path(tmp), environ=environ | {"RSRV_WORKER_BATCHING_MAX_WAIT_MS": "10"}, core=None)
        )
        loop: list[float] = []
        by_plain, by_window = [], []
        for _ in range(rounds):
            loop.append(direct.rate(seconds))
            for server, results in ((plain, by_plain), (window, by_window)):
                results.append(
                    drive(
                        server.target,
                        [stream],
                        in_flight=CLIENTS,
                        seconds=seconds,
                        server_pids=[server.pid],
                        warmup_seconds=warmup,
                    )
                )
        direct_rate = statistics.median(loop)
        for what, results in (("", by_plain), (", max_wait_ms 10", by_window)):
            rate = median_of(results, lambda r: r.rate)
            yield Measurement(
                f"32 clients, 1 thread{what}: rows/s ÷ full batches without a server",
                rate / direct_rate,
                None if what else Bound("≥", 0.85),
                {
                    "rows_s": rate,
                    "direct_rows_s": direct_rate,
                    "ms_a_row": 1e3 / direct_rate,
                    "p50_ms": median_of(results, lambda r: r.models[0].quantile(0.5)),
                    "cpu_us": median_of(results, lambda r: r.cpu_us),
                },
            )


def beside_loading(*, short: bool) -> Iterator[Measurement]:
    """Latency of a model while others compile, or load from the cache, against an equal burner.

    The models are prepared by the server itself, which is ready before them. A trace counts what the dispatching
    threads had to do with it.
    """
    rounds, seconds, others = (1, 0.5, 1) if short else (3, 15.0, 8)
    quiet, burner, compiling, loading, warming = (ModelResult(SERVING) for _ in range(5))
    traces = {"compiling": Trace(), "loading": Trace()}
    with TemporaryDirectory() as tmp:
        alone, crowd = Path(tmp) / "alone", Path(tmp) / "crowd"
        models.rows(alone, SERVING, steps=100, batch_sizes=(1,))
        models.rows(crowd, SERVING, steps=100, batch_sizes=(1,))
        for index in range(others):
            resnet(crowd, f"net{index}", seed=index, stages=SHORT_STAGES if short else STAGES)
        for round_ in range(rounds):
            cache = Path(tmp) / f"cache{round_}"
            with traced_server(alone, SERVING) as watched:
                wait_ready(watched.server)
                _for_seconds(watched.server, quiet, seconds)
                with idle_burner():
                    _for_seconds(watched.server, burner, seconds)
            for results, name in ((compiling, "compiling"), (loading, "loading")):
                with traced_server(crowd, SERVING, cache) as watched:
                    wait_ready(watched.server)
                    # In the first execution of a process XLA looks up which processor this is.
                    _first_request(watched.server)
                    before = watched.trace()
                    _until(watched.server, results, _loaded)
                    traces[name] = _sum(traces[name], watched.trace().since(before))
                    _until(watched.server, warming, _warm)
    for results, what in ((compiling, "compile"), (loading, "load from the cache"), (warming, "warm up")):
        if results.requests:  # the short form may be over before one has ended
            yield from _against(results, burner, quiet, what)
    for name, results in (("compiling", compiling), ("loading", loading)):
        trace = traces[name]
        yield Measurement(
            f"reads, opens and looks elsewhere of the dispatching threads while {name}",
            trace.reads + trace.opens + trace.elsewhere + trace.major_faults,
            Bound("≤", 0.0),
            {"requests": results.requests, **vars(trace)},
        )


def _against(results: ModelResult, burner: ModelResult, quiet: ModelResult, what: str) -> Iterator[Measurement]:
    for q, limit in ((0.5, 1.1), (0.99, 2.0)):
        name = f"p{round(100 * q)}"
        yield Measurement(
            f"{name} of a model while others {what} ÷ beside a burner",
            results.quantile(q) / burner.quantile(q),
            Bound("≤", limit),
            {
                f"{name}_ms": results.quantile(q),
                "burner_ms": burner.quantile(q),
                "quiet_ms": quiet.quantile(q),
                "slowest_ms": results.quantile(1.0),
                "requests": results.requests,
            },
        )


def _for_seconds(server: Server, results: ModelResult, seconds: float) -> None:
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.start()
    _add(results, _latencies(server, over))


def _until(server: Server, results: ModelResult, reached: Callable[[WorkerStatus], bool]) -> None:
    """One request after the other until the server's status is that; those that may have ended later do not count."""
    over, latest = threading.Event(), time.perf_counter()

    def look() -> None:
        nonlocal latest
        while not over.wait(0.05):
            now = time.perf_counter()
            if reached(_status(server)):
                over.set()
            else:
                latest = now

    looker = threading.Thread(target=look)
    looker.start()
    took = _latencies(server, over)
    looker.join()
    _add(results, [(ended, seconds) for ended, seconds in took if ended <= latest])


def _add(results: ModelResult, took: list[tuple[float, float]]) -> None:
    results.latencies += [seconds for _, seconds in took]
    results.requests += len(took)


def _loaded(status: WorkerStatus) -> bool:
    return status.server.state != "starting"


def _warm(status: WorkerStatus) -> bool:
    """The cost of every program was measured: the last part of loading, in which each runs twice."""
    return all(model.cost_seconds for model in status.models)


def _request() -> bytes:
    return join(encode_request(SERVING, [("x", np.ones((1, 64, 64), np.float32))]))


def _first_request(server: Server) -> None:
    with open_channel(server.target) as channel:
        channel.unary_unary(INFER)(_request(), timeout=60)


def _latencies(server: Server, over: threading.Event) -> list[tuple[float, float]]:
    """When each request ended, and the seconds that it took."""
    body, took = _request(), []
    with open_channel(server.target) as channel:
        call = channel.unary_unary(INFER)
        call(body, timeout=60)
        while not over.is_set():
            began = time.perf_counter()
            call(body, timeout=60)
            ended = time.perf_counter()
            took.append((ended, ended - began))
    return took


def _status(server: Server) -> WorkerStatus:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/v1/status", timeout=20) as answer:
        return WorkerStatus.model_validate_json(answer.read())


def _sum(a: Trace, b: Trace) -> Trace:
    return Trace(*(x + y for x, y in zip(vars(a).values(), vars(b).values(), strict=True)))


@contextmanager
def idle_burner() -> Iterator[None]:
    """A process that computes all the time, with the priority of a compile worker."""
    code = (
        f"import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); os.nice({NICENESS})\nwhile True: pass"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
    try:
        yield
    finally:
        process.kill()
        process.wait()


CASES: dict[str, Callable[..., Iterator[Measurement]]] = {
    "full-batches": full_batches,
    "beside-loading": beside_loading,
}
