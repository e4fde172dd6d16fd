"""What workers report about themselves: cumulative counters, weights, budgets. One poll serves every consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from google.protobuf.message import DecodeError

from rsrv.core.errors import InvalidResponse
from rsrv.protos import control as cp


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model on one worker; counters are cumulative since the worker started, and as the worker tells them: whoever
    reckons with them judges whether they can be (`costs.Baselines`).

    Attributes:
        compute: device seconds.
        requests, rows: how many were served.
        weight_nbytes: bytes of its weights on a device.
        max_batch: most rows (items) that are merged; 0 = unknown.
        batch_input: the wire input that carries the batch axis; "" = none.
        batch_axis: its axis in the row-major wire shape, from 0; None = none.
    """

    compute: float = 0.0
    requests: int = 0
    rows: int = 0
    weight_nbytes: int = 0
    max_batch: int = 0
    batch_input: str = ""
    batch_axis: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker's answer to ModelControlStatus; `budget_bytes` 0 = weights are no constraint there."""

    url: str
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    budget_bytes: int = 0
    discipline: str = ""
    incarnation: str = ""

    @classmethod
    def read(cls, url: str, body: bytes) -> WorkerReport:
        """The report in an answer to ModelControlStatus. Raises InvalidResponse for bytes that are none."""
        try:
            message = cp.ModelControlStatusResponse.FromString(body)
        except DecodeError:
            raise InvalidResponse(f"{len(body)} bytes that are none") from None
        models = {
            row.name: ModelReport(
                compute=row.total_compute_seconds,
                requests=row.requests_served,
                rows=row.rows_served,
                weight_nbytes=max(row.weight_nbytes, 0),
                max_batch=max(row.max_batch_size, 0),
                batch_input=row.batch_input_name,
                batch_axis=row.batch_axis - 1 if row.batch_axis > 0 else None,
            )
            for row in message.models
        }
        return cls(url, models, message.weight_cache_max_bytes, message.discipline, message.incarnation)


@dataclass(frozen=True)
class Poll:
    """The answers of one round (spec gateway-node 2.2.1); a worker that did not answer is not in it."""

    workers: Mapping[str, WorkerReport] = field(default_factory=dict)

    @property
    def polled(self) -> tuple[str, ...]:
        """The workers that answered, sorted."""
        return tuple(sorted(self.workers))

    @cached_property
    def hosts(self) -> Mapping[str, tuple[str, ...]]:
        """Model → the workers that list it, sorted."""
        found: dict[str, list[str]] = {}
        for url in self.polled:
            for model in self.workers[url].models:
                found.setdefault(model, []).append(url)
        return {model: tuple(urls) for model, urls in found.items()}

    @cached_property
    def weight_nbytes(self) -> Mapping[str, int]:
        """Model → the largest of what workers say."""
        return {m: max(self.workers[url].models[m].weight_nbytes for url in urls) for m, urls in self.hosts.items()}

    @cached_property
    def max_batch(self) -> Mapping[str, int]:
        return {m: max(self.workers[url].models[m].max_batch for url in urls) for m, urls in self.hosts.items()}

    @cached_property
    def batch_at(self) -> Mapping[str, tuple[str, int]]:
        """Model → (batch input, axis from 0), of the first worker that reports one."""
        found: dict[str, tuple[str, int]] = {}
        for model, urls in self.hosts.items():
            for url in urls:
                row = self.workers[url].models[model]
                if row.batch_input and row.batch_axis is not None:
                    found[model] = (row.batch_input, row.batch_axis)
                    break
        return found

    @property
    def budgets(self) -> Mapping[str, int]:
        """Worker → bytes for weights; 0 = no constraint."""
        return {url: report.budget_bytes for url, report in self.workers.items()}
