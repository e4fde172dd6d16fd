"""The gateway: what a hop costs, what several workers give, what placing models gives, and what a worker's death costs.

Workers of the last three have a fake device that takes its time and no CPU, so that a few of them fit on two cores.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from benchmarks.catalogue import COLUMNS, MIB, write_catalogue
from benchmarks.load import INFER, LoadResult, Stream, drive, median_of, open_channel
from benchmarks.report import Bound, Measurement
from benchmarks.servers import DRIVER_CORE, Server, echo_server, relay, rsrv_gateway, rsrv_server
from rsrv.client.gateway import Gateway
from rsrv.core.wire import encode_request, join

FAKE = {"RSRV_ALLOW_FAKE": "1", "RSRV_WORKER_RUNTIME_BACKEND": "fake"}
ROWS = 4
"""Rows of a request to the fleet: with one row each, two cores have too little left for three workers' requests."""
_RESTLESS = {
    "RSRV_GATEWAY_HEALTH_INTERVAL_SECONDS": "0.5",
    "RSRV_GATEWAY_SCHEDULING_FIRST_REBALANCE_COMPUTE_SECONDS": "2",
    "RSRV_GATEWAY_SCHEDULING_REBALANCE_COMPUTE_SECONDS": "10",
    "RSRV_GATEWAY_SCHEDULING_HYSTERESIS": "0.1",
}
"""Placements within seconds instead of minutes."""
MODES = ("round_robin", "least_outstanding", "lpt_packing")


def hop(*, short: bool) -> Iterator[Measurement]:
    """A tiny request through the gateway, and through a bare relay, to a server that returns it."""
    rounds, seconds = (1, 0.3) if short else (7, 3.0)
    body = join(encode_request("echo", [("x", np.ones((1, 16), np.float32))]))
    stream = Stream("echo", body)
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        backend = stack.enter_context(echo_server(32, core=DRIVER_CORE))
        servers = {
            "blocking": stack.enter_context(relay(backend.target, 32, "blocking")),
            "future": stack.enter_context(relay(backend.target, 32, "future")),
        }
        for mode in MODES[:1] if short else MODES:
            environ = {"RSRV_GATEWAY_LOGGING_LEVEL": "error"}
            gateway = rsrv_gateway([backend], "--mode", mode, log_directory=Path(tmp), environ=environ)
            servers[mode] = stack.enter_context(gateway)
        for in_flight in (1, 8):
            results: dict[str, list[LoadResult]] = {name: [] for name in servers}
            for _ in range(rounds):
                for name, server in servers.items():
                    load = drive(
                        server.target, [stream], in_flight=in_flight, seconds=seconds, server_pids=[server.pid]
                    )
                    if load.models[0].errors or not load.requests:
                        raise RuntimeError(f"{name}: {load.models[0].errors} errors, {load.requests} answers")
                    results[name].append(load)
            p50 = {name: median_of(r, lambda r: r.models[0].quantile(0.5)) for name, r in results.items()}
            cpu = {name: median_of(r, lambda r: r.cpu_us) for name, r in results.items()}
            bounds = (Bound("≤", 1.4), Bound("≤", 1.3)) if in_flight == 1 else (None, None)
            mode = MODES[0]
            parts = {f"{name}_ms": value for name, value in p50.items()}
            yield Measurement(
                f"gateway hop ÷ bare hop, p50, {in_flight} in flight", p50[mode] / p50["blocking"], bounds[0], parts
            )
            parts = {f"{name}_us": value for name, value in cpu.items()}
            yield Measurement(
                f"gateway hop ÷ bare hop, CPU, {in_flight} in flight", cpu[mode] / cpu["blocking"], bounds[1], parts
            )


def large(*, short: bool) -> Iterator[Measurement]:
    """64 MB bodies through the gateway: how long they take beside a bare relay, and what memory stays taken."""
    count, megabytes = (2, 8) if short else (30, 64)
    body = join(encode_request("echo", [("x", np.ones((1, megabytes << 18), np.float32))]))
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        backend = stack.enter_context(echo_server(4, core=DRIVER_CORE))
        bare = stack.enter_context(relay(backend.target, 4, "blocking"))
        gateway = stack.enter_context(rsrv_gateway([backend], log_directory=Path(tmp)))
        times: dict[str, list[float]] = {"bare": [], "gateway": []}
        resident: dict[str, list[int]] = {"bare": [], "gateway": []}
        for _ in range(count):
            for name, server in (("bare", bare), ("gateway", gateway)):
                channel = open_channel(server.target)
                began = time.perf_counter()
                answer = channel.unary_unary(INFER)(body, timeout=60)
                times[name].append(time.perf_counter() - began)
                if answer != body:
                    raise RuntimeError(f"{name}: the answer is not the request")
                del answer
                channel.close()
                resident[name].append(psutil.Process(server.pid).memory_info().rss)
        p50 = {name: 1e3 * statistics.median(found) for name, found in times.items()}
        yield Measurement(
            f"{megabytes} MB body, gateway ÷ bare hop, p50",
            p50["gateway"] / p50["bare"],
            None,
            {f"{name}_ms": value for name, value in p50.items()},
        )
        half = count // 2
        growth = max(resident["gateway"][half:]) - max(resident["gateway"][:half])
        parts = {f"{name}_mb": max(found) / MIB for name, found in resident.items()}
        yield Measurement(
            f"{megabytes} MB bodies, growth of the gateway's memory in the second half (MB)", growth / MIB, None, parts
        )


def fleet(*, short: bool) -> Iterator[Measurement]:
    """Rows per second of three workers with 5 ms a row behind a gateway, against one of them; then kill -9 of one under
    load, and one that joins: failed requests, and how long each takes."""
    environ = {**FAKE, "RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW": "0.005"}
    modes = MODES[1:2] if short else MODES
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        repo = Path(tmp)
        (entry,) = write_catalogue(repo, [MIB])
        stream = Stream(entry.name, join(encode_request(entry.name, [("x", np.zeros((ROWS, COLUMNS), np.float32))])))

        def start() -> Server:
            return stack.enter_context(rsrv_server(repo, environ=environ, core=None))

        workers = [start() for _ in range(3)]
        gateways = {}
        for mode in modes:
            more = {"RSRV_GATEWAY_SCHEDULING_DEFAULT_REPLICAS": "all"}
            gateway = rsrv_gateway(workers, "--mode", mode, log_directory=repo, environ=more, core=None)
            gateways[mode] = stack.enter_context(gateway)
        yield from _scale(workers[0], gateways, stream, short=short)
        yield from _death(workers, gateways["least_outstanding"], stream, start, short=short)


def _scale(one: Server, gateways: Mapping[str, Server], stream: Stream, *, short: bool) -> Iterator[Measurement]:
    rounds, seconds = (1, 0.5) if short else (3, 4.0)
    targets = {"one": one.target, **{mode: gateway.target for mode, gateway in gateways.items()}}
    rates: dict[str, list[float]] = {name: [] for name in targets}
    for _ in range(rounds):
        for name, target in targets.items():
            load = drive(target, [stream], in_flight=16 if name == "one" else 48, seconds=seconds)
            rates[name].append(load.rate * ROWS)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for mode in gateways:
        yield Measurement(
            f"three workers ÷ one, {mode}, 5 ms a row",
            medians[mode] / medians["one"],
            Bound("≥", 2.8),
            {"one_rows_s": medians["one"], "three_rows_s": medians[mode]},
        )


def _death(
    workers: list[Server], gateway: Server, stream: Stream, start: Callable[[], Server], *, short: bool
) -> Iterator[Measurement]:
    rounds, seconds = (1, 0.5) if short else (4, 2.0)
    failed, requests, slowest, joined = 0, 0, [], []
    with Gateway(gateway.target) as control:
        for round_ in range(rounds):
            with _background(gateway.target, stream) as load:
                time.sleep(seconds)
                workers[-1].process.kill()
                time.sleep(seconds)
            failed += load.failed
            requests += len(load.seconds)
            slowest.append(1e3 * max(load.seconds))
            control.remove_worker(workers.pop().target)
            workers.append(start())
            began = time.monotonic()
            control.add_worker(workers[-1].target)
            with _background(gateway.target, stream):
                while not _served(workers[-1]):
                    if time.monotonic() - began > 30:
                        raise RuntimeError(f"round {round_}: the worker that joined got no request in 30 s")
                    time.sleep(0.005)
                joined.append(1e3 * (time.monotonic() - began))
    parts = {"max": max(slowest)}
    yield Measurement("failed requests while one of three workers is killed", failed, Bound("≤", 0), {"of": requests})
    yield Measurement("slowest answer in that time, median (ms)", statistics.median(slowest), None, parts)
    yield Measurement("a worker that joins gets its first request after (ms)", statistics.median(joined), None)


def packing(*, short: bool) -> Iterator[Measurement]:
    """12 models under Zipf traffic on three workers: rows per execution, and evictions with room for a part of them.

    The short form takes both from two workers with room for a part, in the two modes that are compared.
    """
    seconds, count, size = (1.0, 4, 2) if short else (10.0, 12, 3)
    modes = ("round_robin", "lpt_packing") if short else MODES
    weights = [1 / rank for rank in range(1, count + 1)]
    # So slow that the devices, and not this machine's two cores, are what requests wait for.
    environ = {**FAKE, "RSRV_WORKER_RUNTIME_FAKE_SECONDS_PER_ROW": "0.01"}
    tight = {**environ, "RSRV_WORKER_RUNTIME_DEVICE_MEMORY_BYTES": str((count // size + 2) * MIB)}
    sites = ("tight",) if short else ("all fit", "tight")
    with TemporaryDirectory() as tmp:
        repo = Path(tmp)
        entries = write_catalogue(repo, [MIB] * count, batch_sizes=(1, 8, 32))
        streams = [Stream(e.name, e.stream.body, weight) for e, weight in zip(entries, weights, strict=True)]
        depth: dict[str, float] = {}
        evictions: dict[str, float] = {}
        rate: dict[str, float] = {}
        for site in sites:
            with ExitStack() as stack:
                chosen = tight if site == "tight" else environ
                workers = [stack.enter_context(rsrv_server(repo, environ=chosen, core=None)) for _ in range(size)]
                for mode in modes:
                    settings = {"log_directory": repo, "core": None, "environ": _RESTLESS}
                    with rsrv_gateway(workers, "--mode", mode, **settings) as gateway:
                        drive(gateway.target, streams, in_flight=48, seconds=seconds / 2)  # until it is placed
                        before = _totals(workers)
                        load = drive(gateway.target, streams, in_flight=48, seconds=seconds)
                        rows, dispatches, evicted = (b - a for a, b in zip(before, _totals(workers), strict=True))
                    if site == sites[0]:
                        depth[mode], rate[mode] = rows / max(dispatches, 1), load.rate
                    if site == "tight":
                        evictions[mode] = evicted / max(load.requests, 1) * 1000
        yield Measurement(
            f"rows per execution, {count} models, lpt_packing ÷ round_robin",
            depth["lpt_packing"] / depth["round_robin"],
            Bound("≥", 1.5),
            {**depth, **{f"{mode}_rows_s": rate[mode] for mode in modes}},
        )
        yield Measurement(
            f"evictions per 1000 requests under a tight budget, {count} models, round_robin ÷ lpt_packing",
            evictions["round_robin"] / max(evictions["lpt_packing"], 1e-3),
            Bound("≥", 5.0),
            dict(evictions),
        )


class _Load:
    def __init__(self) -> None:
        self.failed = 0
        self.seconds: list[float] = []


@contextmanager
def _background(target: str, stream: Stream) -> Iterator[_Load]:
    """24 requests in flight as long as the block runs."""
    load, over, lock = _Load(), threading.Event(), threading.Lock()
    channel = open_channel(target)
    call = channel.unary_unary(INFER)

    def run() -> None:
        while not over.is_set():
            began = time.perf_counter()
            try:
                call(stream.body, timeout=30)
                failed = 0
            except Exception:
                failed = 1
            with lock:
                load.failed += failed
                load.seconds.append(time.perf_counter() - began)

    threads = [threading.Thread(target=run) for _ in range(24)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        over.set()
        for thread in threads:
            thread.join()
        channel.close()


def _metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))


def _totals(workers: Sequence[Server]) -> tuple[float, float, float]:
    """Rows, executions and evictions of all workers so far."""
    names = ("rsrv_worker_rows_served_total", "rsrv_worker_dispatch_total", "rsrv_worker_weight_evicts_total")
    rows, dispatches, evicted = (sum(_metric(worker, name) for worker in workers) for name in names)
    return rows, dispatches, evicted


def _served(worker: Server) -> bool:
    return _metric(worker, "rsrv_worker_rows_served_total") > 0


CASES = {
    "gateway-hop": hop,
    "gateway-large": large,
    "gateway-fleet": fleet,
    "gateway-packing": packing,
}
