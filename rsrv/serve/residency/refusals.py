"""What the ledger says when weights cannot come to the device, or cannot stay there."""

from __future__ import annotations

from collections.abc import Iterable

from rsrv.core.errors import DeviceOutOfMemory, NotResident
from rsrv.serve.residency.holdings import Trial

_ROOM_HINT = "unpin a model, raise runtime.device_memory_bytes, or serve fewer models on this device"


def not_by_itself(name: str) -> NotResident:
    """An operator moves the weights."""
    return NotResident(
        f"the weights of model {name!r} are not on the device, and nothing brings them there by itself "
        "(model_control_mode: explicit)",
        hint=f"rsrv ctl residency {name} device",
    )


def no_room_to_stay(name: str, nbytes: int, *, reserved: int, arena: int) -> DeviceOutOfMemory:
    """The pinned reserve would be larger than the device."""
    return DeviceOutOfMemory(
        f"model {name!r} is to stay on the device with {nbytes} bytes of weights; with what is pinned already that is "
        f"{reserved} of {arena} bytes",
        hint=_ROOM_HINT,
    )


def no_room_beside_flagged(name: str, nbytes: int, limit: int, flagged: Iterable[str]) -> DeviceOutOfMemory:
    """Models that are pinned by flag leave no room."""
    return DeviceOutOfMemory(
        f"no room for the {nbytes} bytes of model {name!r}: of {limit} bytes for weights on demand, models that are "
        f"pinned by flag do not leave enough ({', '.join(flagged)})",
        hint=_ROOM_HINT,
    )


def no_room_beside_pinned(name: str, nbytes: int, *, reserved: int, arena: int) -> DeviceOutOfMemory:
    """The pinned reserve leaves no room."""
    return DeviceOutOfMemory(
        f"no room for the {nbytes} bytes of model {name!r}: models that are pinned to the device take {reserved} of "
        f"{arena} bytes",
        hint=_ROOM_HINT,
    )


def no_room_to_pin(name: str, trial: Trial, *, scratch: int, slack: int, arena: int) -> DeviceOutOfMemory:
    """A floor would make the pinned reserve too large: `trial` are the sums with only what cannot leave."""
    beside = f" and {trial.on_demand} pinned by flag" if trial.on_demand else ""
    return DeviceOutOfMemory(
        f"model {name!r} cannot be pinned to the device: with it {trial.reserved} bytes of weights would be "
        f"pinned{beside}, beside {scratch} of scratch and {slack} of slack in {arena} bytes",
        hint=_ROOM_HINT,
    )
