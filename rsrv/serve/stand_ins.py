"""Stand-ins: models that nobody else can name, for runs of programs that wait behind the requests of every model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rsrv.serve.scheduler.plan import ANY_BATCH, Variant

if TYPE_CHECKING:
    from rsrv.runtime.device import Executable
    from rsrv.serve.scheduler import Scheduler
    from rsrv.serve.scheduler.model import ServableModel

SHARE = 1e-3
"""Weight of a stand-in under the fair discipline; a model has 1."""

_numbers = itertools.count(-1, -1)
"""Their incarnations; those of models are above 0."""


def add_stand_in(
    scheduler: Scheduler,
    model: ServableModel,
    purpose: str,
    programs: Mapping[Variant, Mapping[int, Executable]] | None = None,
) -> ServableModel:
    """Schedule `model` once more, under a name of its own, with all or some of its programs; whoever does removes it.

    Raises ServerStopping.
    """
    number = next(_numbers)
    stand_in = replace(
        model,
        name=f"{model.name}/{purpose}{number}",
        incarnation=number,
        programs=model.programs if programs is None else programs,
        max_batch_size=None,
    )
    scheduler.add(stand_in)
    scheduler.set_policy(stand_in.name, weight=SHARE)
    return stand_in


def zeros(model: ServableModel, variant: Variant, key: int) -> tuple[dict[str, np.ndarray], int]:
    """Inputs of a program by name, and how many rows they have."""
    rows = model.largest(variant) if key == ANY_BATCH else key
    return {shape.name: np.zeros(shape.shape, shape.dtype) for shape in model.input_shapes(variant, rows)}, rows
