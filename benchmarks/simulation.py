"""The scheduler's choices against a virtual clock: no threads, no device, the same result every time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

from rsrv.bundle.manifest import Manifest
from rsrv.core.dtypes import DType
from rsrv.core.errors import RsrvError
from rsrv.core.tensors import BATCH, Dim, DimKind, TensorSpec
from rsrv.serve.scheduler.backlog import Backlog
from rsrv.serve.scheduler.batch import Batch
from rsrv.serve.scheduler.model import ServableModel
from rsrv.serve.scheduler.policy import Policy
from rsrv.stablehlo.signature import ProgramSignature, tensor_type

_INCARNATIONS = count(1)


class Arrival(NamedTuple):
    """One request: `at` and `deadline` (0 = none) in seconds of the virtual clock."""

    at: float
    model: str
    deadline: float = 0.0
    rows: int = 1


@dataclass
class Outcome:
    """What a run did: seconds of the device and deadlines met by model, and what became of the other requests."""

    seconds: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    late: int = 0
    dropped: int = 0
    refused: int = 0
    dispatches: int = 0

    def share(self, name: str) -> float:
        return float(self.seconds[name] / sum(self.seconds.values()))


def paper_model(name: str, keys: Sequence[int]) -> ServableModel:
    """A model that is planned and never run: one input and one output of two numbers a row."""
    axes = (BATCH, Dim(DimKind.FIXED, 2))

    def program(key: int) -> Any:
        shape = tensor_type("f32", (key, 2))
        return SimpleNamespace(signature=ProgramSignature((shape,), (shape,)))

    manifest = Manifest(
        name=name,
        executable_inputs=(TensorSpec("x", DType.F32, axes, "na", 0),),
        executable_outputs=(TensorSpec("y", DType.F32, axes, "na", 0),),
    )
    weights: Any = SimpleNamespace(uses=0, resident=True, leaving=False)
    return ServableModel(name, next(_INCARNATIONS), manifest, {(): {key: program(key) for key in keys}}, weights)


def simulate(
    policy: Policy,
    programs: Mapping[str, Mapping[int, float]],
    arrivals: Iterable[Arrival],
    *,
    until: float,
    saturated: Sequence[str] = (),
    look_ahead: bool = True,
) -> Outcome:
    """Run `arrivals` on models whose `programs` take the given seconds by batch key, up to `until` seconds.

    Models that are `saturated` always have eight requests of one row in their queue. With `look_ahead` the next batch
    is chosen while one runs, as the dispatch thread does it, and grows by what fits when the device is free.
    """
    backlog = Backlog(policy)
    models = {name: paper_model(name, tuple(keys)) for name, keys in programs.items()}
    for name, model in models.items():
        queue = backlog.add(model)
        for key, seconds in programs[name].items():
            queue.costs.seed((), key, _ns(seconds), 0)
    edf = policy.discipline == "edf"
    waiting, outcome = deque(sorted(arrivals)), Outcome()
    now, free, end = 0, 0, _ns(until)
    staged: Batch | None = None

    def accept(arrival: Arrival, at: int) -> None:
        nonlocal staged
        try:
            model, deadline = models[arrival.model], _ns(arrival.deadline)
            ticket = backlog.accept(model, {}, arrival.rows, (), deadline, lambda result: None, at)
        except RsrvError:
            outcome.refused += 1
            return
        if staged is not None and backlog.precedes(ticket, staged):
            backlog.put_back(staged)
            staged = backlog.next(at, max(free - at, 0) if edf else 0)

    def arrive(to: int) -> None:
        while waiting and _ns(waiting[0].at) <= to:
            accept(waiting[0], _ns(waiting.popleft().at))
        for name in saturated:
            while backlog.queues[name].depth < 8:
                accept(Arrival(0, name), to)

    while now < end:
        arrive(now)
        if staged is not None:
            batch, staged = backlog.grow(staged, now) or staged, None
        else:
            found = backlog.next(now)
            if found is None:
                upcoming = [_ns(waiting[0].at)] if waiting else []
                upcoming += [backlog.ripe_ns] if backlog.ripe_ns is not None else []
                if not upcoming:
                    break
                now = max(min(upcoming), now + 1)
                continue
            batch = found
        queue, key = batch.queue, batch.batch_key
        margin = queue.costs.margin_ns((), key, now) if edf else 0
        live = [ticket for ticket in batch.tickets if ticket.verdict(now, margin) is None]
        outcome.dropped += len(batch.tickets) - len(live)
        if live:
            took = _ns(programs[queue.model.name][key])
            free = now + took
            if look_ahead:
                arrive(now)
                staged = backlog.next(now, took if edf else 0)
            now = free
            # What arrives while the device is busy is queued when it arrives, not when it is free.
            arrive(now)
            backlog.shares.charge(queue.account, took / 1e9, now)
            backlog.measured(queue, (), key, took, now)
            outcome.seconds[queue.model.name] += took / 1e9
            outcome.dispatches += 1
            for ticket in live:
                in_time = not ticket.deadline_ns or now <= ticket.deadline_ns
                outcome.met[queue.model.name] += in_time
                outcome.late += not in_time
        backlog.settled(queue)
        outcome.dropped += len(backlog.dropped)
        backlog.dropped.clear()
    return outcome


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
