"""The numbers of the scheduler: what a dispatch costs beside the device, what a choice costs, shares and deadlines."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np

from benchmarks.report import Bound, Measurement
from benchmarks.simulation import Arrival, Outcome, paper_model, simulate
from rsrv.bundle.manifest import Manifest
from rsrv.core.dtypes import DType
from rsrv.core.tensors import BATCH, Dim, DimKind, TensorSpec
from rsrv.runtime.fake import FakeDevice
from rsrv.serve.scheduler import ModelPolicy, Policy, Result, Scheduler, ServableModel
from rsrv.serve.scheduler.backlog import Backlog
from rsrv.serve.scheduler.policy import Discipline
from rsrv.stablehlo.signature import ProgramSignature, tensor_type

SIZES = (1, 2, 4, 8, 16, 32)
IN_FLIGHT = 32
_INCARNATIONS = count(1)


def dispatch_overhead(*, short: bool) -> Iterator[Measurement]:
    """CPU of the dispatch thread per dispatch, less what the fake device and the callers' `submit` take of it.

    32 requests are always in flight: with one request a dispatch (batch size 1), and merged.
    """
    rounds, dispatches = (1, 200) if short else (15, 2000)
    for sizes, what in (((1,), "one request each"), (SIZES, "up to 32 requests each")):
        totals: list[float] = []
        devices: list[float] = []
        submits: list[float] = []
        merged = 1.0
        for _ in range(rounds):
            # In turns, as other programs may have the machine's other cores.
            devices.append(_device_us(sizes[-1]))
            submits.append(_submit_us(sizes))
            total, merged = _dispatch_us(sizes, dispatches)
            totals.append(total)
        device, submit = statistics.median(devices), statistics.median(submits)
        overhead = statistics.median(totals) - device - merged * submit
        yield Measurement(
            f"dispatch overhead, 32 in flight, {what} (µs)",
            overhead,
            Bound("≤", 25.0) if sizes == (1,) else None,
            {
                "per_request_us": overhead / merged,
                "fastest_round_us": min(totals) - min(devices) - merged * min(submits),
                "device_us": device,
                "submit_us": submit,
                "requests": merged,
            },
        )


def select_and_plan(*, short: bool) -> Iterator[Measurement]:
    """One choice and its plan, taken off the queues, under the fair discipline and the others."""
    rounds = 50 if short else 5000
    for n_models, n_requests, bound in ((200, 1000, 60.0), (10, 50, 15.0)):
        medians = {}
        for discipline in get_args(Discipline):
            for deadlines in (False, True):
                name = f"{discipline}{'_deadlines' if deadlines else ''}_us"
                policy = Policy(discipline=discipline, shed_late=False)
                medians[name] = _choice_us(policy, n_models, n_requests, deadlines, rounds)
        yield Measurement(
            f"select + plan, {n_models} models, {n_requests} requests (µs)",
            medians["fair_us"],
            Bound("≤", bound),
            medians,
        )


def fair_shares(*, short: bool) -> Iterator[Measurement]:
    """Two saturated models weighted 3:1 beside 48 idle ones, for 20 s: how the device time is split."""
    seconds = 0.3 if short else 20.0
    for a, b in ((1, 1), (1, 3), (3, 1)):
        share, dispatches = _real_share(0.004 * a, 0.004 * b, seconds)
        yield Measurement(
            f"fair 3:1, costs {a}:{b}: ratio of device time",
            share / (1 - share),
            Bound("≥", 2.7),
            {"share": share, "dispatches": dispatches, "at_most": 3.3},
        )


def deadlines(*, short: bool) -> Iterator[Measurement]:
    """20 % of requests with a deadline of 3 × cost, 80 % with 50 ×, at 1.2 × load, on a virtual clock: edf ÷ fifo.

    No more than 1 / 1.2 of all can be met, and fifo comes close to that by giving up the tight ones: they tell the
    disciplines apart.
    """
    sent = mixed_deadlines(1000 if short else 40000)
    count = Counter(arrival.model for arrival in sent)
    fifo, edf = run_deadlines("fifo", sent).met, run_deadlines("edf", sent).met
    parts = {
        f"{name}_{kind}": met[kind] / count[kind] for name, met in (("fifo", fifo), ("edf", edf)) for kind in count
    }
    yield Measurement("tight deadlines met, edf ÷ fifo", edf["tight"] / fifo["tight"], Bound("≥", 1.5), parts)
    mean = (parts["edf_tight"] + parts["edf_loose"]) / (parts["fifo_tight"] + parts["fifo_loose"])
    yield Measurement("deadlines met, mean of both kinds, edf ÷ fifo", mean, Bound("≥", 1.5), parts)
    totals = {"fifo": fifo.total() / len(sent), "edf": edf.total() / len(sent), "limit": 1 / 1.2}
    yield Measurement("deadlines met, all requests, edf ÷ fifo", totals["edf"] / totals["fifo"], None, totals)


def mixed_deadlines(n: int, cost: float = 0.01, load: float = 1.2, seed: int = 0) -> list[Arrival]:
    """`n` requests at random times: 20 % to a model "tight" within 3 × `cost`, 80 % to a model "loose" within 50 ×."""
    rng, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(n):
        at += rng.expovariate(load / cost)
        kind, costs = ("tight", 3) if rng.random() < 0.2 else ("loose", 50)
        arrivals.append(Arrival(at, kind, at + costs * cost))
    return arrivals


def run_deadlines(discipline: Discipline, arrivals: Sequence[Arrival], cost: float = 0.01) -> Outcome:
    """What becomes of `mixed_deadlines` under a discipline."""
    policy = Policy(discipline=discipline, max_queue_depth=len(arrivals), shed_late=False)
    programs = {"tight": {1: cost}, "loose": {1: cost}}
    return simulate(policy, programs, arrivals, until=arrivals[-1].at + 1)


# --- dispatch overhead --------------------------------------------------------------------------------------------


def _model(device: FakeDevice, name: str, sizes: Sequence[int], seconds: float = 0.0) -> ServableModel:
    axes = (BATCH, Dim(DimKind.FIXED, 16))
    programs = {}
    for size in sizes:
        kind = tensor_type("f32", (size, 16))
        programs[size] = device.program(lambda x: x, ProgramSignature((kind,), (kind,)), seconds)
    manifest = Manifest(
        name=name,
        executable_inputs=(TensorSpec("x", DType.F32, axes, "na", 0),),
        executable_outputs=(TensorSpec("y", DType.F32, axes, "na", 0),),
    )
    weights: Any = SimpleNamespace(buffers=(), nbytes=0, uses=0, resident=True, leaving=False)
    return ServableModel(name, next(_INCARNATIONS), manifest, {(): programs}, weights)


def _device_us(rows: int, n: int = 1000) -> float:
    """CPU of put, launch, result and free of one execution."""
    device = FakeDevice()
    executable = _model(device, "m", (rows,)).programs[()][rows]
    x = np.zeros((rows, 16), np.float32)
    started = time.thread_time_ns()
    for _ in range(n):
        buffers = [device.put(x)]
        device.launch(executable, buffers).result()
        device.free(buffers)
    return (time.thread_time_ns() - started) / n / 1e3


def _submit_us(sizes: Sequence[int], n: int = 1000) -> float:
    """CPU of `submit`, which runs on the callers' threads."""
    device = FakeDevice()
    scheduler = Scheduler(device, Policy(max_queue_depth=n))
    model = _model(device, "m", sizes)
    scheduler.add(model)
    inputs = {"x": np.zeros((1, 16), np.float32)}
    started = time.thread_time_ns()
    for _ in range(n):
        scheduler.submit(model, inputs, 1, (), 0, _nothing)
    spent = time.thread_time_ns() - started
    scheduler.stop()
    return spent / n / 1e3


def _nothing(result: Result) -> None:
    pass


def _dispatch_us(sizes: Sequence[int], dispatches: int) -> tuple[float, float]:
    """CPU of the dispatch thread per dispatch, and requests per dispatch, with 32 requests always in flight."""
    device = FakeDevice()
    scheduler = Scheduler(device)
    model = _model(device, "m", sizes)
    scheduler.add(model)
    for size in sizes:
        scheduler.seed_cost("m", (), size, 20e-6)
    inputs = {"x": np.zeros((1, 16), np.float32)}
    marks: list[tuple[int, int]] = []
    done, ended = 0, threading.Event()
    warm, last = 4 * IN_FLIGHT, (4 + dispatches) * IN_FLIGHT if len(sizes) > 1 else 4 * IN_FLIGHT + dispatches

    def again(result: Result) -> None:
        # On the dispatch thread: one more in flight for each that left.
        nonlocal done
        done += 1
        if done in (warm, last):
            marks.append((time.thread_time_ns(), scheduler._backlog.queues["m"].counters.dispatch_count))
        if done < last:
            scheduler.submit(model, inputs, 1, (), 0, again)
        elif done == last:
            ended.set()

    for _ in range(IN_FLIGHT):
        scheduler.submit(model, inputs, 1, (), 0, again)
    scheduler.start()
    ended.wait()
    scheduler.stop()
    (began, first), (stopped, final) = marks
    return (stopped - began) / (final - first) / 1e3, (last - warm) / (final - first)


# --- select and plan ----------------------------------------------------------------------------------------------


def _choice_us(policy: Policy, n_models: int, n_requests: int, deadlines: bool, rounds: int) -> float:
    backlog, rng, now = Backlog(policy), random.Random(0), 0
    models = [paper_model(f"m{i}", SIZES) for i in range(n_models)]
    for model in models:
        queue = backlog.add(model)
        for size in SIZES:
            queue.costs.seed((), size, round(1e6 * (1 + 0.2 * size) * rng.uniform(1, 1.5)), 0)

    def arrive(model: ServableModel) -> None:
        nonlocal now
        now += 1000
        deadline = now + round(1e12 * rng.uniform(1, 2)) if deadlines else 0
        backlog.accept(model, {}, 1, (), deadline, _nothing, now)

    for i in range(n_requests):
        arrive(models[i % n_models])
    took = []
    for _ in range(rounds):
        now += 10_000
        started = time.perf_counter_ns()
        batch = backlog.next(now)
        took.append(time.perf_counter_ns() - started)
        assert batch is not None
        # What the batch leaves behind: a measurement, and as many new requests as it took.
        compute_ns = round(batch.queue.costs.estimates[(), batch.batch_key].mean_ns * rng.uniform(0.95, 1.05))
        backlog.shares.charge(batch.queue.account, compute_ns / 1e9, now)
        backlog.measured(batch.queue, (), batch.batch_key, compute_ns, now)
        backlog.settled(batch.queue)
        for _ in batch.tickets:
            arrive(rng.choice(models))
    return statistics.median(took) / 1e3


# --- shares ----------------------------------------------------------------------------------------------------


def _real_share(cost_a: float, cost_b: float, seconds: float) -> tuple[float, int]:
    """The first model's share of the device time, on the real threads, with a device that sleeps."""
    device = FakeDevice()
    scheduler = Scheduler(device, Policy(models={"a": ModelPolicy(weight=3.0)}))
    models = [_model(device, "a", (1,), cost_a), _model(device, "b", (1,), cost_b)]
    models += [_model(device, f"idle{i}", (1,)) for i in range(48)]
    for model in models:
        scheduler.add(model)
    inputs = {"x": np.zeros((1, 16), np.float32)}
    open_, closed, left = threading.Semaphore(0), threading.Event(), 16

    def again(model: ServableModel) -> Callable[[Result], None]:
        def done(result: Result) -> None:
            if closed.is_set():
                open_.release()
            else:
                scheduler.submit(model, inputs, 1, (), 0, done)

        return done

    for model in models[:2]:
        for _ in range(left // 2):
            scheduler.submit(model, inputs, 1, (), 0, again(model))
    scheduler.start()
    closed.wait(seconds)
    stats = scheduler.stats()
    closed.set()
    for _ in range(left):
        open_.acquire()
    scheduler.stop()
    a, b = stats["a"].total_compute_seconds, stats["b"].total_compute_seconds
    return a / (a + b), stats["a"].dispatch_count + stats["b"].dispatch_count


CASES: dict[str, Callable[..., Iterator[Measurement]]] = {
    "dispatch-overhead": dispatch_overhead,
    "select-and-plan": select_and_plan,
    "fair-shares": fair_shares,
    "deadlines": deadlines,
}
