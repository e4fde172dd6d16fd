"""The handle of a model's weights: it stays for the life of the model while the bytes come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rsrv.runtime.device import Buffer
    from rsrv.serve.residency.content import ContentToken
    from rsrv.serve.residency.floors import Floor
    from rsrv.serve.residency.store import HostCopy
    from rsrv.serve.residency.tensors import DeviceWeights, WeightsFile


class Failure(NamedTuple):
    """Why a load failed, and which version of the file that was; None = it could not be looked at."""

    seen: ContentToken | None
    message: str
    hint: str | None


class ModelWeights:
    """What the scheduler knows as `Weights`.

    Attributes:
        name: what they are registered as: the model's name, or another one while they are not its current weights.
        model: the model's name, for stores, log lines and messages.
        file: where the bytes come from.
        floor: what they are never below.
        footprint: bytes that the budget counts for them.
        uses, resident, leaving: see `Weights`.
        pinned: by flag, see `Ledger.flag`.
        idle_since_ns: when the last batch that used them ended, they were loaded, or lost their pin, whichever was
            last; None = never.
        left_ns: when they left the device, or were opened.
        placed: on the device; None = not there, or not any more.
        host: the copy in host memory, where the floor wants one.
        warned: it was said that they are larger than the budget.
        failure: of the last load, when it failed for what is in the file.
    """

    __slots__ = (
        "_clock",
        "_uses",
        "failure",
        "file",
        "floor",
        "footprint",
        "host",
        "idle_since_ns",
        "leaving",
        "left_ns",
        "model",
        "name",
        "pinned",
        "placed",
        "resident",
        "warned",
    )

    def __init__(
        self,
        name: str,
        file: WeightsFile,
        floor: Floor,
        footprint: int,
        *,
        model: str | None = None,
        pinned: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock = clock
        self._uses = 0
        self.name = name
        self.model = name if model is None else model
        self.file = file
        self.floor = floor
        self.footprint = footprint
        self.pinned = pinned
        self.idle_since_ns: int | None = None
        self.left_ns = clock()
        self.resident = False
        self.leaving = False
        self.placed: DeviceWeights | None = None
        self.host: HostCopy | None = None
        self.failure: Failure | None = None
        self.warned = False

    @property
    def uses(self) -> int:
        return self._uses

    @uses.setter
    def uses(self, uses: int) -> None:
        self._uses = uses
        if not uses:
            self.touch()

    def touch(self) -> None:
        """They begin to be idle now."""
        self.idle_since_ns = self._clock()

    def idle_ns(self, now_ns: int) -> int | None:
        """For how long nobody has used them; None = nobody ever did, and they were never loaded."""
        if self._uses:
            return 0
        return None if self.idle_since_ns is None else max(now_ns - self.idle_since_ns, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, on the device or not."""
        return self.footprint

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """On the device, in argument order; empty when they are not there."""
        return self.placed.buffers if self.placed is not None else ()
