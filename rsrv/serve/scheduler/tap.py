"""Copies of what ran, for whoever compares programs: a share of the batches of one incarnation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rsrv.core.errors import InvalidRequest
from rsrv.serve.scheduler.plan import Variant

if TYPE_CHECKING:
    from rsrv.serve.scheduler.batch import Batch

logger = logging.getLogger(__name__)

_ROUNDING = 1e-9
"""Ten times a tenth is a little less than one."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One batch that ran well: what its program was given, and what it gave.

    Attributes:
        rows: how many of the program's rows were requests'; the others are padding.
        inputs, outputs: by name, whole: as long as the program's batch size along each one's batch axis; C-ordered
            copies.
        compute_ns: upload, execution and download.
    """

    variant: Variant
    batch_key: int
    rows: int
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    compute_ns: int


class Tap:
    """Who is told of batches, and of how many: `share` of 1 is all of them, spread evenly.

    Raises InvalidRequest for a share outside of 0 to 1.
    """

    __slots__ = ("_owed", "_share", "_told")

    def __init__(self, told: Callable[[Sample], None], share: float) -> None:
        if not 0 <= share <= 1:
            raise InvalidRequest(f"the share {share!r} of the batches is not possible; wanted is a number from 0 to 1")
        self._told = told
        self._share = share
        self._owed = 0.0

    def offer(self, batch: Batch) -> None:
        """`batch` ran well and its staged inputs are still there. Never raises: no request may suffer from it."""
        self._owed += self._share
        if self._owed < 1 - _ROUNDING or batch.staged is None:
            return
        self._owed -= 1
        try:
            self._told(_sample(batch))
        except BaseException:
            logger.exception("tap failed model=%s key=%d", batch.queue.model.name, batch.batch_key)


def _sample(batch: Batch) -> Sample:
    model, staged, outputs = batch.queue.model, batch.staged, batch.outputs
    assert staged is not None
    assert outputs is not None
    inputs = zip(model.input_specs, staged.inputs, strict=True)
    return Sample(
        variant=batch.tickets[0].variant,
        batch_key=batch.batch_key,
        rows=batch.live_rows,
        inputs={spec.name: np.array(array, order="C", copy=True) for spec, (array, _) in inputs},
        outputs={
            spec.name: np.array(array, order="C", copy=True)
            for spec, array in zip(model.output_specs, outputs, strict=True)
        },
        compute_ns=batch.compute_ns,
    )
