"""More models than the device holds: cold calls, a catalogue over a small budget, and what memory all of it takes."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np

from benchmarks.caching import lru, zipf_sequence
from benchmarks.catalogue import MIB, Entry, random_tensor, write_catalogue, write_entry
from benchmarks.direct_load import direct_loads
from benchmarks.load import open_channel
from benchmarks.replay import CacheCounters, Peak, Replay, at_rest, memory, metrics, pss, replay, watched
from benchmarks.report import Bound, Measurement
from benchmarks.servers import Server, rsrv_server

SIZES = (2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
"""Of the models of a catalogue."""
IN_FLIGHT = 8


def budget_environ(device_memory: int | None, **more: str) -> dict[str, str]:
    """A CPU server whose arena has so many bytes; None = one without a budget."""
    environ = {"RSRV_WORKER_RUNTIME_BACKEND": "cpu", "JAX_PLATFORMS": "cpu", **more}
    if device_memory is not None:
        environ["RSRV_WORKER_RUNTIME_DEVICE_MEMORY_BYTES"] = str(device_memory)
    return environ


# --- one cold call --------------------------------------------------------------------------------------------------


def cold_call(*, short: bool) -> Iterator[Measurement]:
    """Two models and a budget for one, called in turns, against a direct load of the same file and a warm call."""
    rounds, size = (2, 16 * MIB) if short else (40, 96 * MIB)
    for tensor_bytes in (8 * MIB,) if short else (MIB, 8 * MIB):
        with TemporaryDirectory() as tmp, ExitStack() as stack:
            repo = Path(tmp)
            entries = write_catalogue(repo, [size, size], tensor_bytes=tensor_bytes)
            direct = stack.enter_context(direct_loads([entry.weights for entry in entries]))
            server = stack.enter_context(rsrv_server(repo, environ=budget_environ(size * 3 // 2), core=None))
            channel = stack.enter_context(open_channel(server.target))
            at_rest(server)
            alone: list[float] = []
            cold: list[float] = []
            warm: list[float] = []
            _call(channel, entries, [0, 0, 1, 1])
            before = CacheCounters.of(server)
            for _ in range(rounds):
                for index in (0, 1):
                    alone.append(direct.seconds(index))
                    first, *others = _call(channel, entries, [index] * 4)
                    cold.append(first)
                    warm += others
            done = CacheCounters.of(server).since(before)
            if done.loads != 2 * rounds:
                raise RuntimeError(f"{done.loads} loads in {2 * rounds} calls of a model that was not resident")
        cold_ms, direct_ms, warm_ms = (1e3 * statistics.median(took) for took in (cold, alone, warm))
        yield Measurement(
            f"cold call, {size // MIB} MiB in tensors of {tensor_bytes // MIB} MiB ÷ (direct load + warm call)",
            cold_ms / (direct_ms + warm_ms),
            Bound("≤", 1.3),
            {
                "cold_ms": cold_ms,
                "direct_load_ms": direct_ms,
                "warm_ms": warm_ms,
                "load_ms": 1e3 * done.load_seconds / done.loads,
            },
        )


def _call(channel: grpc.Channel, entries: Sequence[Entry], sequence: Sequence[int]) -> list[float]:
    """Seconds of each call, one after the other; all answers have to be right."""
    done = replay(channel, [entry.stream for entry in entries], sequence, in_flight=1)
    if done.failed:
        raise RuntimeError(f"{done.wrong} wrong answers and {dict(done.errors)} in {len(sequence)} calls")
    return done.latencies


# --- a catalogue ----------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """One replay of the sequence on one server, and what its weight cache did meanwhile."""

    replay: Replay
    cache: CacheCounters
    peak: Peak


@dataclass
class Runs:
    """All turns of one server."""

    turns: list[Turn] = field(default_factory=list)

    def sum(self, read: Callable[[Turn], float]) -> float:
        return sum(read(turn) for turn in self.turns)

    @property
    def seconds(self) -> float:
        return self.sum(lambda turn: turn.replay.seconds)

    @property
    def load_seconds(self) -> float:
        return self.sum(lambda turn: turn.cache.load_seconds)

    @property
    def loads(self) -> float:
        return self.sum(lambda turn: turn.cache.loads)

    @property
    def requests(self) -> int:
        return len(self.latencies)

    @property
    def latencies(self) -> list[float]:
        return [latency for turn in self.turns for latency in turn.replay.latencies]


def mixed_sizes(models: int) -> list[int]:
    """`SIZES` in turns: how popular a model is has nothing to do with its size, since the sequence draws that."""
    return [SIZES[index % len(SIZES)] for index in range(models)]


def known_state(server: Server, entries: Sequence[Entry]) -> list[int]:
    """Call every model once, one at a time: what an LRU cache holds then does not depend on what it held before.

    Returns that sequence.
    """
    every = list(range(len(entries)))
    at_rest(server)
    with open_channel(server.target) as channel:
        _call(channel, entries, every)
    return every


def turn(server: Server, entries: Sequence[Entry], sequence: Sequence[int], *, in_flight: int) -> Turn:
    before = CacheCounters.of(server)
    with watched(server) as peak, open_channel(server.target) as channel:
        done = replay(channel, [entry.stream for entry in entries], sequence, in_flight=in_flight)
    return Turn(done, CacheCounters.of(server).since(before), peak)


def catalogue(*, short: bool) -> Iterator[Measurement]:
    """100 models under Zipf traffic: a budget for 20 with `lru` and with `cost`, and one for all.

    The sequence is cut into parts, and each part is sent to one server after the other, so that what else the machine
    does meanwhile falls on all of them.
    """
    models, requests, part = (12, 60, 30) if short else (100, 6000, 300)
    sizes = [size // (2 if short else 1) for size in mixed_sizes(models)]
    device_memory = sum(sizes) // 5 + MIB  # the rest is for the scratch
    sequence = zipf_sequence(models, requests)
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        repo = Path(tmp) / "repo"
        entries = write_catalogue(repo, sizes)

        def start(device_memory: int, eviction: str = "lru") -> Server:
            environ = budget_environ(
                device_memory, RSRV_WORKER_RUNTIME_EVICTION=eviction, RSRV_WORKER_CACHE_DIR=f"{tmp}/cache"
            )
            return stack.enter_context(rsrv_server(repo, environ=environ, core=None))

        small, cost, roomy = start(device_memory), start(device_memory, "cost"), start(2 * sum(sizes))
        for server in (roomy, cost, small):
            prefix = known_state(server, entries)
        budget = CacheCounters.of(small).budget
        by_small, by_cost, by_roomy, alone = Runs(), Runs(), Runs(), Runs()
        for begin in range(0, requests, part):
            for server, runs in ((small, by_small), (roomy, by_roomy), (cost, by_cost)):
                runs.turns.append(turn(server, entries, sequence[begin : begin + part], in_flight=IN_FLIGHT))
        # One at a time, the server sees the very order of the sequence; so does the simulation.
        known_state(small, entries)
        alone.turns.append(turn(small, entries, sequence, in_flight=1))
    simulated = lru([*prefix, *sequence], sizes, budget).hit_rate(skip=models)
    what = f"{models} models, Zipf, budget for {models // 5}"
    for runs, how in ((alone, "1 in flight"), (by_small, f"{IN_FLIGHT} in flight")):
        yield _hit_rate(f"{what}, {how}", runs, simulated)
    every = [one for runs in (by_small, by_cost, by_roomy, alone) for one in runs.turns]
    yield Measurement(
        f"{what}: wrong answers and errors",
        sum(one.replay.failed for one in every),
        Bound("≤", 0),
        {"requests": requests * 4},
    )
    peaks = [one.peak for runs in (by_small, by_cost, alone) for one in runs.turns]
    yield Measurement(
        f"{what}: most weights at a time ÷ budget",
        max(peak.cache for peak in peaks) / budget,
        Bound("≤", 1.0),
        {"budget_mib": budget / MIB},
    )
    peak_rss = max(peak.rss for peak in peaks)
    yield Measurement(
        f"{what}: peak of resident memory above the budget (MB)",
        (peak_rss - budget) / 1e6,
        Bound("≤", 300),
        {"peak_rss_mb": peak_rss / 1e6, "budget_mb": budget / 1e6},
    )
    yield _throughput(what, by_small, by_roomy)
    yield Measurement(
        f"{what}: seconds of reloads, cost ÷ lru",
        by_cost.load_seconds / by_small.load_seconds,
        Bound("<", 1.0),
        {
            "cost_s": by_cost.load_seconds,
            "lru_s": by_small.load_seconds,
            "cost_loads": by_cost.loads,
            "lru_loads": by_small.loads,
        },
    )


def _hit_rate(what: str, runs: Runs, simulated: float) -> Measurement:
    rate = 1 - runs.loads / runs.requests
    return Measurement(
        f"{what}: |hit rate − simulated LRU|",
        abs(rate - simulated),
        Bound("≤", 0.02),
        {"hit_rate": rate, "simulated": simulated, "load_ms": 1e3 * runs.load_seconds / max(1.0, runs.loads)},
    )


def _throughput(what: str, small: Runs, roomy: Runs) -> Measurement:
    """Requests per second outside of the loads; loads and executions overlap, so that this can exceed 1."""
    return Measurement(
        f"{what}, {IN_FLIGHT} in flight: requests/s without the loading ÷ those with a budget for all",
        roomy.seconds / (small.seconds - small.load_seconds),
        Bound("≥", 0.9),
        {
            "small_s": small.seconds,
            "loading_s": small.load_seconds,
            "for_all_s": roomy.seconds,
            "small_rate": small.requests / small.seconds,
            "for_all_rate": roomy.requests / roomy.seconds,
            "small_p50_ms": 1e3 * statistics.median(small.latencies),
            "small_p99_ms": 1e3 * float(np.quantile(small.latencies, 0.99)),
        },
    )


# --- memory ---------------------------------------------------------------------------------------------------------


def load_rounds(*, short: bool) -> Iterator[Measurement]:
    """Models of three sizes and a budget for the largest alone: every call evicts one and loads another."""
    rounds, settle = (12, 3) if short else (500, 50)
    sizes = [4 * MIB, 6 * MIB, 10 * MIB] if short else [16 * MIB, 24 * MIB, 40 * MIB]
    with TemporaryDirectory() as tmp:
        repo = Path(tmp)
        entries = write_catalogue(repo, sizes)
        environ = budget_environ(max(sizes) + MIB)
        with rsrv_server(repo, environ=environ, core=None) as server, open_channel(server.target) as channel:
            at_rest(server)
            before = CacheCounters.of(server)
            rss = []
            for number in range(rounds):
                _call(channel, entries, [number % len(sizes)])
                if number % len(sizes) == 0:
                    rss.append(memory(server.pid))
            done = CacheCounters.of(server).since(before)
    if done.loads < rounds - 1:
        raise RuntimeError(f"{done.loads} loads in {rounds} rounds, each of which has to load a model")
    settled = rss[settle // len(sizes) :]
    usual = statistics.median(settled[: max(1, settle // len(sizes))])
    yield Measurement(
        f"{rounds} rounds of load and evict: largest change of resident memory",
        max(abs(one - usual) for one in settled) / usual,
        Bound("≤", 0.05),
        {
            "first_mib": settled[0] / MIB,
            "last_mib": settled[-1] / MIB,
            "largest_mib": max(settled) / MIB,
            "load_ms": 1e3 * done.load_seconds / done.loads,
        },
    )


def shared_host_weights(*, short: bool) -> Iterator[Measurement]:
    """Two workers with `runtime.shared_host_weights`: what the second one adds when it has the weights, too."""
    size, settling = (16 * MIB, 0.2) if short else (256 * MIB, 1.0)
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        # The log of a server lies in its repository, so each worker has one of its own; the files are the same.
        first, second = Path(tmp) / "first", Path(tmp) / "second"
        rng = np.random.default_rng(0)
        small = write_entry(first / "small", [random_tensor(rng, MIB)])
        large = write_entry(first / "large", [random_tensor(rng, 8 * MIB) for _ in range(size // (8 * MIB))])
        shutil.copytree(first, second, copy_function=os.link)
        environ = budget_environ(2 * size, RSRV_WORKER_RUNTIME_SHARED_HOST_WEIGHTS="true")
        workers = [stack.enter_context(rsrv_server(repo, environ=environ, core=None)) for repo in (first, second)]
        entries = [small, large]
        channels = [stack.enter_context(open_channel(worker.target)) for worker in workers]
        for worker, channel in zip(workers, channels, strict=True):
            at_rest(worker)
            # So that the first execution, which makes threads and buffers, is over.
            _call(channel, entries, [0] * 20)
        free = _settled_pss(workers, settling)
        _call(channels[0], entries, [1, 1])
        one = _settled_pss(workers, settling)
        _call(channels[1], entries, [1, 1])
        both = _settled_pss(workers, settling)
    yield Measurement(
        f"second worker with {size // MIB} MiB of shared weights: added memory ÷ weights",
        (both - one) / size,
        Bound("<", 0.05),
        {"first_adds_mib": (one - free) / MIB, "second_adds_mib": (both - one) / MIB},
    )


def _settled_pss(servers: Sequence[Server], seconds: float) -> int:
    """Memory of all of them together after so long, where what they share counts once."""
    time.sleep(seconds)
    return sum(pss(server.pid) for server in servers)


def fine_tunes(*, short: bool) -> Iterator[Measurement]:
    """20 models that differ in their heads alone, called once each, against one of them."""
    models, backbone_bytes, head_bytes = (4, 8 * MIB, MIB // 16) if short else (20, 64 * MIB, MIB // 2)
    limit = 60.0
    with TemporaryDirectory() as tmp:
        repo = Path(tmp)
        rng = np.random.default_rng(0)
        backbone = [random_tensor(rng, 2 * MIB) for _ in range(backbone_bytes // (2 * MIB))]
        entries = [
            write_entry(repo / f"tune{index:02}", [*backbone, random_tensor(rng, head_bytes)])
            for index in range(models)
        ]
        environ = budget_environ(2 * sum(entry.nbytes for entry in entries))
        with rsrv_server(repo, environ=environ, core=None) as server, open_channel(server.target) as channel:
            at_rest(server)
            empty = memory(server.pid) - CacheCounters.of(server).resident
            _call(channel, entries, [0] * 20)
            rss_of_one = memory(server.pid) - empty
            _call(channel, entries, list(range(models)))
            began = time.monotonic()
            wanted = 1.2 * entries[0].nbytes
            while (held := metrics(server)["resident_weight_bytes"]) > wanted and time.monotonic() < began + limit:
                time.sleep(0.2)
            verified = time.monotonic() - began
            _call(channel, entries, list(range(models)))
            loads, rss = CacheCounters.of(server).loads, memory(server.pid) - empty
    yield Measurement(
        f"{models} fine-tunes of one backbone: resident weights ÷ those of one model",
        held / entries[0].nbytes,
        Bound("≤", 1.2),
        {
            "one_mib": entries[0].nbytes / MIB,
            "resident_mib": held / MIB,
            "rss_of_one_mib": rss_of_one / MIB,
            "rss_of_all_mib": rss / MIB,
            "shared_after_s": verified,
            "loads": loads,
        },
    )


CASES: dict[str, Callable[..., Iterator[Measurement]]] = {
    "cold-call": cold_call,
    "catalogue": catalogue,
    "load-rounds": load_rounds,
    "shared-host-weights": shared_host_weights,
    "fine-tunes": fine_tunes,
}
