"""What the scheduler keeps for a name for as long as it is served, however often what stands behind it is replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsrv.serve.scheduler.stats import Counters

if TYPE_CHECKING:
    from rsrv.serve.scheduler.queue import ModelQueue


class Account:
    """One name: its share of the device, what was counted for it, and what was set while it ran.

    Attributes:
        weight, used: the share of the device, and the inflated seconds that it used (see `shares`).
        weight_set: whether somebody set the weight of the running model; the policy's is for those that nobody set.
        cap: most rows that are merged, as somebody set it; None = nobody has.
        counters: of all incarnations together.
        queues: of the incarnations that are not finished, the oldest first.
    """

    __slots__ = ("cap", "counters", "name", "queues", "used", "weight", "weight_set")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.weight_set = False
        self.used = 0.0
        self.cap: int | None = None
        self.counters = Counters()
        self.queues: list[ModelQueue] = []

    @property
    def busy(self) -> bool:
        """Whether any incarnation has requests that wait or run."""
        # A plain loop: it runs for every batch that leaves a queue empty.
        for queue in self.queues:  # noqa: SIM110
            if queue.depth or queue.in_flight:
                return True
        return False
