"""What the client costs: a dataset of images through one server, and the CPU of tiny requests, beside tritonclient."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import models
from benchmarks.dataset_clients import Client, Took, client
from benchmarks.dataset_floor import floor
from benchmarks.report import Bound, Measurement
from benchmarks.servers import rsrv_server

ROWS = 32
"""Images of a request: as many as the model's largest program takes."""
IN_FLIGHT = 4
THREADS = 8


def dataset(*, short: bool) -> Iterator[Measurement]:
    """20 000 images of 602 112 bytes to one server, in turns: the floor, our driver, tritonclient's two ways.

    All have as many requests in flight and generate the same images; two of tritonclient's loops send as many rows in
    a request as our driver does, the others one, as a loop over a dataset does.
    """
    rounds, images, singles = (1, 256, 64) if short else (5, 4000, 800)
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        models.images(Path(tmp))
        server = stack.enter_context(rsrv_server(Path(tmp), core=None))
        bring = stack.enter_context(floor(ROWS, IN_FLIGHT))

        def start(kind: str, rows: int) -> Callable[[int], float]:
            started = stack.enter_context(client(kind, server.target, rows, IN_FLIGHT))
            return lambda items: started.run(items).seconds

        contestants = {
            "floor": (_timed(bring), images),
            "rsrv": (start("rsrv-dataset", ROWS), images),
            "inline": (start("tritonclient-inline", ROWS), images),
            "shared": (start("tritonclient-shared", ROWS), images),
            "inline_by_one": (start("tritonclient-inline", 1), singles),
            "shared_by_one": (start("tritonclient-shared", 1), singles),
        }
        for run, _ in contestants.values():  # connections, and the pages of all slots
            run(2 * ROWS * IN_FLIGHT)
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, (run, items) in contestants.items():
                rates[name].append(items / run(items))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, what, bound in (
        ("floor", "the same copies without gRPC", Bound("≥", 0.6)),
        ("inline", f"tritonclient inline, {ROWS} rows", Bound("≥", 3.0)),
        ("shared", f"tritonclient's shared memory, {ROWS} rows", Bound("≥", 1.3)),
        ("inline_by_one", "tritonclient inline, one row", Bound("≥", 3.0)),
        ("shared_by_one", "tritonclient's shared memory, one row", Bound("≥", 1.3)),
    ):
        parts = {"rsrv_images_s": medians["rsrv"], f"{name}_images_s": medians[name], "in_flight": IN_FLIGHT}
        yield Measurement(f"images/s of a dataset ÷ {what}", medians["rsrv"] / medians[name], bound, parts)


def _timed(bring: Callable[[int], None]) -> Callable[[int], float]:
    def run(items: int) -> float:
        began = time.perf_counter()
        bring(items)
        return time.perf_counter() - began

    return run


def client_cpu(*, short: bool) -> Iterator[Measurement]:
    """CPU of the client's process per tiny request, 8 threads, against tritonclient, in turns."""
    rounds, requests = (1, 300) if short else (15, 2000)
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        models.tiny(Path(tmp))
        server = stack.enter_context(rsrv_server(Path(tmp)))
        kinds = ("tritonclient-tiny", "rsrv-tiny", "rsrv-tiny-shared")
        clients: dict[str, Client] = {
            kind: stack.enter_context(client(kind, server.target, 1, THREADS)) for kind in kinds
        }
        found: dict[str, list[Took]] = {kind: [] for kind in kinds}
        for kind in kinds:
            clients[kind].run(8 * THREADS)
        for turn in range(rounds):
            for index in range(len(kinds)):  # whoever comes first in a round is not always the same
                kind = kinds[(turn + index) % len(kinds)]
                found[kind].append(clients[kind].run(requests))
    us = {kind: 1e6 * statistics.median(t.cpu_seconds for t in took) / requests for kind, took in found.items()}
    rate = {kind: requests / statistics.median(t.seconds for t in took) for kind, took in found.items()}
    for kind, what in (("rsrv-tiny", "inline"), ("rsrv-tiny-shared", "shared memory auto")):
        yield Measurement(
            f"tiny request, 8 threads, {what}: client CPU ÷ tritonclient",
            us[kind] / us["tritonclient-tiny"],
            Bound("≤", 1.0),
            {
                "rsrv_us": us[kind],
                "tritonclient_us": us["tritonclient-tiny"],
                "rsrv_rate": rate[kind],
                "tritonclient_rate": rate["tritonclient-tiny"],
            },
        )


CASES: dict[str, Callable[..., Iterator[Measurement]]] = {"dataset": dataset, "client-cpu": client_cpu}
