"""Floors: the tier of memory that a model's weights never leave, and what a change of the floor has to move."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Floor(Enum):
    """How far down a model's weights may go; the values are the words of the configuration."""

    UNPINNED = "unpinned"
    """Every load reads the file."""
    SYSTEM = "system"
    """A copy stays in host memory. Where device memory is host memory, that is the arena."""
    DEVICE = "device"
    """The weights stay on the device."""


def resolve_floor(explicit: Floor | None, *, on_demand: bool, unified: bool) -> Floor:
    """The floor of a model at start, on load and after a rename: the configured one, otherwise the default (4.2).

    Without on-demand loading everything is loaded for good and nothing else is kept. A `unified` device has one tier,
    in which a `system` floor would pin every model.
    """
    if explicit is not None:
        return explicit
    return Floor.SYSTEM if on_demand and not unified else Floor.UNPINNED


def is_reserved(floor: Floor, *, unified: bool) -> bool:
    """Whether weights with that floor are in the pinned reserve of the device: never evicted, beside the budget."""
    return floor is Floor.DEVICE or (unified and floor is Floor.SYSTEM)


@dataclass(frozen=True, slots=True)
class FloorChange:
    """What the owner of the bytes does after a floor was changed.

    Attributes:
        old, new: the floors.
        load: the weights belong on the device and are not there: plan, begin and commit a load; when it fails, set the
            old floor again.
        free: the ledger no longer counts the weights on the device as resident; free them.
        host: what becomes of the copy in host memory: `keep` what there is, `materialise` it if absent, `drop` it if
            present. Always `keep` where device memory is host memory.
    """

    old: Floor
    new: Floor
    load: bool = False
    free: bool = False
    host: Literal["keep", "materialise", "drop"] = "keep"
