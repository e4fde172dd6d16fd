"""How a model with several replicas fills them: the mode, and how many items make a batch worth waiting for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rsrv.gateway.scheduling.knobs import NO_OVERRIDE, ModelOverride


class FillPlan(NamedTuple):
    """How one model's requests are spread over its replicas.

    Attributes:
        mode: ``run``, ``spread`` or ``inflight``.
        quantum: items that one replica gets before the next one's turn; at least 1.
        input, axis: the wire input whose axis (from 0, row-major) counts the items; "" and None = one item a request.
    """

    mode: str = "run"
    quantum: int = 1
    input: str = ""
    axis: int | None = None


UNPLANNED = FillPlan()
"""The plan of a model that has none."""


_LARGEST = 1e18
"""Items of the longest run: a factor may be any number."""


def quantum(factor: float, max_batch: int) -> int:
    """Items of a run: `factor` times the largest batch, rounded half to even; 1 when the batch is unknown."""
    return max(1, round(min(factor * max_batch, _LARGEST))) if max_batch > 0 else 1


def fill_plans(
    max_batch: Mapping[str, int],
    batch_at: Mapping[str, tuple[str, int]],
    *,
    mode: str,
    factor: float,
    overrides: Mapping[str, ModelOverride],
) -> dict[str, FillPlan]:
    """The plans of all models whose largest batch is reported or that are overridden (spec gateway-node 2.6.7).

    `mode` and `factor` are the fleet's. `batch_at` comes from the snapshot of costs, so that plans made anew after a
    change of a setting keep counting items.
    """
    plans = {}
    for model in max_batch.keys() | overrides.keys():
        override = overrides.get(model, NO_OVERRIDE)
        name, axis = batch_at.get(model, ("", None))
        plans[model] = FillPlan(
            override.fill_mode or mode,
            quantum(override.fill_factor or factor, max_batch.get(model, 0)),
            name,
            axis,
        )
    return plans
