"""The gateway's budget of second attempts, from its configuration."""

from __future__ import annotations

from collections.abc import Callable

from rsrv.core.config.gateway import RetriesConfig
from rsrv.core.retries import AttemptBudget


class RetryBudget(AttemptBudget):
    """An `AttemptBudget` for retries and hedges of all models together."""

    def __init__(self, config: RetriesConfig, clock: Callable[[], float]) -> None:
        super().__init__(ratio=config.ratio, minimum=config.minimum, window_seconds=config.window_seconds, clock=clock)
