"""What the operator sets: how the scheduler chooses, and what it lets in. Plain values, made from the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rsrv.core.errors import InvalidRequest

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig

Discipline = Literal["fair", "fifo", "edf"]
Population = Literal["active", "prepared"]


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """Settings of one model: its share under `fair`, the most rows that are merged (None = the largest compiled
    size), and how long its requests may wait for company (None = what the scheduler says)."""

    weight: float = 1.0
    max_batch_size: int | None = None
    max_wait_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of one scheduler; the names are those of the configuration.

    Attributes:
        ema_halflife_seconds: after which used device time counts half.
        recency_penalty_cap: bound of a model's deficit or surplus.
        coalescing_discount: how much cheaper a merged batch counts.
        cost_ema_alpha: weight of the newest measurement of a program's time.
        dispatch_timeout_seconds: an execution beyond it is reported as stuck; also the implicit deadline.
        implicit_deadline: requests without a deadline get one.
        variant_overtakes: how many later requests of another shape may pass a request.
        max_wait_ns: how long a request may wait for others to be merged with.
        shed_late: refuse a request on arrival when what is queued before it takes longer than its deadline allows.
        split_oversize: run a request with more rows than any program takes in pieces.
    """

    discipline: Discipline = "fair"
    fair_population: Population = "active"
    ema_halflife_seconds: float = 30.0
    recency_penalty_cap: float = 0.25
    coalescing_discount: float = 0.1
    cost_ema_alpha: float = 0.2
    max_queue_depth: int = 1024
    dispatch_timeout_seconds: float = 30.0
    implicit_deadline: bool = False
    variant_overtakes: int = 0
    max_wait_ns: int = 0
    shed_late: bool = True
    split_oversize: bool = False
    models: Mapping[str, ModelPolicy] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ServerConfig) -> Policy:
        """The settings that a configuration file gives."""
        scheduler, batching = config.scheduler, config.batching
        return cls(
            discipline=scheduler.discipline,
            fair_population=scheduler.fair_population,
            ema_halflife_seconds=scheduler.ema_halflife_seconds,
            recency_penalty_cap=scheduler.recency_penalty_cap,
            coalescing_discount=scheduler.coalescing_discount,
            cost_ema_alpha=scheduler.cost_ema_alpha,
            max_queue_depth=scheduler.max_queue_depth,
            dispatch_timeout_seconds=scheduler.dispatch_timeout_seconds,
            implicit_deadline=scheduler.implicit_deadline,
            variant_overtakes=scheduler.variant_overtakes,
            max_wait_ns=_ns(batching.max_wait_ms),
            shed_late=scheduler.shed_late,
            split_oversize=batching.split_oversize,
            models={
                name: ModelPolicy(
                    weight=model.weight,
                    max_batch_size=model.max_batch_size,
                    max_wait_ns=None if model.max_wait_ms is None else _ns(model.max_wait_ms),
                )
                for name, model in scheduler.models.items()
            },
        )

    def model(self, name: str) -> ModelPolicy:
        return self.models.get(name, _DEFAULT)


_DEFAULT = ModelPolicy()


def require_weight(weight: float) -> float:
    """Raises InvalidRequest unless `weight` is a finite number above 0."""
    if not (math.isfinite(weight) and weight > 0):
        raise InvalidRequest(f"the weight {weight!r} is no share of the device; wanted is a finite number above 0")
    return float(weight)


def require_max_batch_size(rows: int) -> int:
    """Raises InvalidRequest unless `rows` is at least 1."""
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise InvalidRequest(f"the max_batch_size {rows!r} is not possible; wanted is a whole number of at least 1")
    return rows


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
