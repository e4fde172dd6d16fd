"""``python -m benchmarks.budget_curve``: hit rate and latency against the budget, and the figure of docs/residency.md.

One catalogue, one sequence of requests, one server after the other with a budget for 5 % … 100 % of the weights. The
points are kept beside the figure; ``--redraw`` draws them anew without a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.caching import CacheRun, lru, zipf_sequence
from benchmarks.catalogue import MIB, Entry, write_catalogue
from benchmarks.linechart import Panel, Series, svg
from benchmarks.replay import CacheCounters
from benchmarks.report import machine
from benchmarks.residency import Turn, budget_environ, known_state, mixed_sizes, turn
from benchmarks.servers import rsrv_server

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
"""Of all weights, that a budget holds."""
FIGURE = Path("docs/residency.svg")


@dataclass(frozen=True)
class Point:
    """One budget; latencies in milliseconds, with one request at a time.

    Attributes:
        share: of all weights that the budget holds.
        hit_rate, cost_hit_rate: with `runtime.eviction` lru, and cost.
        simulated: the hit rate of an LRU cache on paper.
        cold, warm: medians of the requests that had to load their model, and of the others; None = there were none.
        cold_p99: of 100 requests that had to load, 99 took no longer.
        mean: over all requests.
    """

    share: float
    hit_rate: float
    cost_hit_rate: float
    simulated: float
    cold: float | None
    cold_p99: float | None
    warm: float
    mean: float


def measure(models: int, requests: int) -> list[Point]:
    sizes = mixed_sizes(models)
    sequence = zipf_sequence(models, requests)
    points = []
    with TemporaryDirectory() as tmp:
        repo = Path(tmp) / "repo"
        entries = write_catalogue(repo, sizes)
        for share in SHARES:
            # What the scratch takes comes on top; a budget for all has room for all.
            device_memory = int(share * sum(sizes)) + MIB
            by_lru, paper = _run(repo, entries, sequence, device_memory, "lru")
            by_cost, _ = _run(repo, entries, sequence, device_memory, "cost")
            points.append(_point(share, by_lru, by_cost, paper, models))
            sys.stderr.write(json.dumps(asdict(points[-1])) + "\n")
    return points


def _run(
    repo: Path, entries: Sequence[Entry], sequence: Sequence[int], device_memory: int, eviction: str
) -> tuple[Turn, CacheRun]:
    """What the server did, and what an LRU cache with its budget does on paper."""
    environ = budget_environ(
        device_memory, RSRV_WORKER_RUNTIME_EVICTION=eviction, RSRV_WORKER_CACHE_DIR=str(repo.parent / "cache")
    )
    with rsrv_server(repo, environ=environ, core=None) as server:
        prefix = known_state(server, entries)
        budget = CacheCounters.of(server).budget
        done = turn(server, entries, sequence, in_flight=1)
    if done.replay.failed:
        raise RuntimeError(f"{done.replay.wrong} wrong answers and {dict(done.replay.errors)} with {eviction}")
    return done, lru([*prefix, *sequence], [entry.nbytes for entry in entries], budget)


def _point(share: float, by_lru: Turn, by_cost: Turn, paper: CacheRun, skip: int) -> Point:
    took = 1e3 * np.array(by_lru.replay.latencies)
    hits = np.array(paper.hits[skip:])
    cold = took[~hits]
    return Point(
        share=share,
        hit_rate=1 - by_lru.cache.loads / len(took),
        cost_hit_rate=1 - by_cost.cache.loads / len(took),
        simulated=paper.hit_rate(skip),
        cold=float(np.median(cold)) if len(cold) else None,
        cold_p99=float(np.quantile(cold, 0.99)) if len(cold) else None,
        warm=float(np.median(took[hits])),
        mean=float(took.mean()),
    )


def draw(points: Sequence[Point], facts: dict[str, Any]) -> str:
    """The figure: what share of the requests found their weights, and how long requests took."""

    def line(read: str, label: str, colour: str, *, scale: float = 1.0, dashed: bool = False) -> Series:
        seen = [(100 * p.share, getattr(p, read)) for p in points]
        return Series(label, [(x, scale * y) for x, y in seen if y is not None], colour, dashed)

    budget = "budget, % of all weights"
    rates = Panel(
        "Requests that found their weights",
        budget,
        "hit rate, %",
        [
            line("hit_rate", "eviction: lru", "#1f77b4", scale=100),
            line("simulated", "LRU on paper, same sequence", "#7f7f7f", scale=100, dashed=True),
            line("cost_hit_rate", "eviction: cost", "#2ca02c", scale=100),
        ],
        x_max=100,
        y_max=100,
    )
    latencies = Panel(
        "Latency, one request at a time",
        budget,
        "milliseconds",
        [
            line("cold", "had to load, median", "#d62728"),
            line("mean", "mean over all", "#9467bd"),
            line("warm", "found its weights, median", "#1f77b4"),
        ],
        x_max=100,
    )
    caption = (
        f"{facts['models']} models, {facts['requests']} requests, Zipf 1.0, {facts['cores']} cores of {facts['cpu']}"
    )
    return svg([rates, latencies], caption)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget_curve", description=__doc__)
    parser.add_argument("--out", type=Path, default=FIGURE, help="the figure; the points go beside it, as JSON")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--requests", type=int, default=2000, help="for each budget and policy")
    parser.add_argument("--redraw", action="store_true", help="from the points of the last run")
    arguments = parser.parse_args()
    data = arguments.out.with_suffix(".json")
    if arguments.redraw:
        document = json.loads(data.read_text())
    else:
        points = measure(arguments.models, arguments.requests)
        facts = {"models": arguments.models, "requests": arguments.requests, "date": time.strftime("%Y-%m-%d")}
        document = {"facts": {**machine(), **facts}, "points": [asdict(point) for point in points]}
        data.write_text(json.dumps(document, indent=1) + "\n")
    arguments.out.write_text(draw([Point(**point) for point in document["points"]], document["facts"]))
    sys.stderr.write(f"{arguments.out} and {data} are written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
