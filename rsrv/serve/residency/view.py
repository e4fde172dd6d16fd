"""Where the weights of a model are, for those who look: in one form, whether weights come and go or stay for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsrv.serve.residency.floors import Floor
from rsrv.serve.residency.manager import ModelResidency

if TYPE_CHECKING:
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.residency.moves import Mode
    from rsrv.serve.scheduler.model import ServableModel


def residency_mode(residency: Residency | None) -> Mode:
    """Who decides which weights are on the device."""
    return "self_managed" if residency is None else residency.mode


def whereabouts(residency: Residency | None, model: ServableModel) -> ModelResidency:
    """Where the weights of a model that is prepared are; without residency, on the device for good."""
    found = None if residency is None else residency.model(model.name)
    nbytes = model.weights.nbytes
    return found or ModelResidency(Floor.UNPINNED, True, False, nbytes, committed_bytes=nbytes)


def is_answered(residency: Residency | None, model: ServableModel) -> bool:
    """Whether requests for a model that is prepared are answered: in explicit mode only where its weights are."""
    return residency_mode(residency) == "self_managed" or whereabouts(residency, model).device_resident
