"""Workers that exist only as what they report, and a packing whose clock the test turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rsrv.core.config.gateway import SchedulingConfig
from rsrv.gateway.scheduling.knobs import Knobs
from rsrv.gateway.scheduling.packing import LptPacking
from rsrv.gateway.workers.poll import ModelReport, Poll, WorkerReport

NEVER = {"rebalance_compute_seconds": 1e9, "first_rebalance_compute_seconds": 1e9}
AT_ONCE = {"rebalance_compute_seconds": 1e-9, "first_rebalance_compute_seconds": 1e-9}


def knobs(**values: Any) -> Knobs:
    return Knobs.from_config(SchedulingConfig.model_validate(values))


class Reporting:
    """A worker's cumulative counters."""

    def __init__(self, models: Iterable[str], *, mem: int = 0, budget: int = 0, max_batch: int = 8) -> None:
        self.mem = dict.fromkeys(models, mem)
        self.used: dict[str, tuple[float, int, int]] = dict.fromkeys(self.mem, (0.0, 0, 0))
        self.budget = budget
        self.max_batch = max_batch
        self.discipline = "fifo"
        self.incarnation = "a"

    def serve(self, model: str, seconds: float, requests: int = 1, rows: int | None = None) -> None:
        compute, many, items = self.used[model]
        self.used[model] = (compute + seconds, many + requests, items + (requests if rows is None else rows))

    def load(self, model: str, mem: int = 0) -> None:
        self.mem[model] = mem
        self.used.setdefault(model, (0.0, 0, 0))

    def unload(self, model: str) -> None:
        del self.mem[model]

    def restart(self, incarnation: str = "a") -> None:
        self.used = dict.fromkeys(self.mem, (0.0, 0, 0))
        self.incarnation = incarnation

    def report(self, url: str) -> WorkerReport:
        models = {
            model: ModelReport(
                *self.used[model], weight_nbytes=mem, max_batch=self.max_batch, batch_input="x", batch_axis=0
            )
            for model, mem in self.mem.items()
        }
        return WorkerReport(url, models, self.budget, self.discipline, self.incarnation)


class PackedFleet:
    """Workers ``w0``, ``w1``, … with the same models, and an `LptPacking` over them that starts at 0 s."""

    def __init__(self, workers: int, names: Iterable[str], *, mem: int = 0, budget: int = 0, **scheduling: Any) -> None:
        names = list(names)
        self.workers = {f"w{i}": Reporting(names, mem=mem, budget=budget) for i in range(workers)}
        self.down: set[str] = set()
        self.now = 0.0
        self.compactions: list[dict[str, list[str]]] = []
        self.woken = 0
        self.packing = LptPacking(
            knobs(**scheduling),
            wake=self._wake,
            compact=lambda work: self.compactions.append(dict(work)),
            clock=lambda: 1e9 + self.now,
        )

    def _wake(self) -> None:
        self.woken += 1

    @property
    def ready(self) -> list[str]:
        return sorted(self.workers.keys() - self.down)

    def poll(self, missing: Iterable[str] = ()) -> Poll:
        return Poll({url: self.workers[url].report(url) for url in self.ready if url not in set(missing)})

    def start(self) -> PackedFleet:
        self.packing.start(self.ready, self.poll(), self.now)
        return self

    def tick(self, after: float = 10.0, missing: Iterable[str] = ()) -> None:
        self.now += after
        self.packing.tick(self.ready, self.poll(missing), self.now)

    def arrive(self, model: str, times: int) -> None:
        for _ in range(times):
            self.packing.record_arrival(model)

    @property
    def triggers(self) -> dict[str, int]:
        return dict(self.packing.status().repacks)

    def homes(self, model: str) -> tuple[str, ...]:
        row = next(row for row in self.packing.status().models if row.name == model)
        return tuple(replica.worker for replica in row.replicas)

    @property
    def accumulated(self) -> float:
        tick = self.packing.status().tick
        assert tick is not None
        return tick.accumulated

    @property
    def notes(self) -> list[str]:
        return [text for _, text in self.packing.take_notes()]
