"""The handle of a model's weights: it stays for the life of the model while the bytes come and go."""

from __future__ import annotations

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
        name: the model's name.
        file: where the bytes come from.
        floor: what they are never below.
        footprint: bytes that the budget counts for them.
        uses, resident, leaving: see `Weights`.
        placed: on the device; None = not there, or not any more.
        host: the copy in host memory, where the floor wants one.
        warned: it was said that they are larger than the budget.
        failure: of the last load, when it failed for what is in the file.
    """

    __slots__ = (
        "failure",
        "file",
        "floor",
        "footprint",
        "host",
        "leaving",
        "name",
        "placed",
        "resident",
        "uses",
        "warned",
    )

    def __init__(self, name: str, file: WeightsFile, floor: Floor, footprint: int) -> None:
        self.name = name
        self.file = file
        self.floor = floor
        self.footprint = footprint
        self.uses = 0
        self.resident = False
        self.leaving = False
        self.placed: DeviceWeights | None = None
        self.host: HostCopy | None = None
        self.failure: Failure | None = None
        self.warned = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, on the device or not."""
        return self.footprint

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """On the device, in argument order; empty when they are not there."""
        return self.placed.buffers if self.placed is not None else ()
