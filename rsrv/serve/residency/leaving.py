"""Which weights may be freed although nobody needs their room: those that an operator sends away, and the idle ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsrv.core.errors import ModelUnloaded, WrongState
from rsrv.serve.residency.floors import Floor, is_reserved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.scheduler import Scheduler
    from rsrv.serve.scheduler.model import Weights
    from rsrv.serve.scheduler.queue import ModelQueue


class Resident:
    """The `Mover` of a server whose weights stay: those that are not there were removed, and do not come back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def used(self, weights: Weights) -> None:
        """Nothing follows from that."""

    def look(self, wanted: Sequence[ModelQueue], released: Sequence[Weights]) -> None:
        """Refuse what a warm-up sends that did not hear of the end in time."""
        for queue in wanted:
            self._scheduler.refuse(queue, ModelUnloaded(f"the weights of model {queue.model.name!r} were removed"))
        if wanted:
            self._scheduler.warm(wanted)


def require_unpinned(weights: ModelWeights, *, unified: bool) -> None:
    """Raises WrongState, reason ``pinned``, when neither an operator nor idleness may free `weights`."""
    if is_reserved(weights.floor, unified=unified):
        raise WrongState(
            f"the weights of model {weights.model!r} stay on the device: their floor is {weights.floor.value!r}",
            reason="pinned",
            hint=f"rsrv ctl residency {weights.model} unpinned",
        )
    if weights.pinned:
        raise WrongState(
            f"the weights of model {weights.model!r} are pinned",
            reason="pinned",
            hint=f"rsrv ctl unpin {weights.model}",
        )


def idles(weights: ModelWeights, now_ns: int, after_ns: int, *, unified: bool) -> bool:
    """Whether `weights` are on the device, unpinned, and were not used for `after_ns`; 0 = never."""
    if not after_ns or not weights.resident or weights.pinned or is_reserved(weights.floor, unified=unified):
        return False
    idle_ns = weights.idle_ns(now_ns)
    return idle_ns is not None and idle_ns >= after_ns and not weights.uses


def lingers(weights: ModelWeights, now_ns: int, after_ns: int, *, unified: bool) -> bool:
    """Whether unpinned `weights` keep a copy in host memory, and were off the device for `after_ns`; 0 = never."""
    if not after_ns or unified or weights.pinned or weights.host is None or weights.floor is not Floor.SYSTEM:
        return False
    return not weights.resident and weights.placed is None and now_ns - weights.left_ns >= after_ns
