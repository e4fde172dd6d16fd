"""The control plane of a worker: where its models' weights are, what share of the device each has; see and set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rsrv.client.connection import MAX_TIMEOUT_SECONDS, Handle, message_of
from rsrv.core.errors import UsageError

SERVICE = "/reactant_control.ControlService/"

Floor = Literal["unpinned", "system", "device"]
"""The place that a model's weights never leave: none, host memory, the device."""
FLOORS: tuple[Floor, ...] = get_args(Floor)


@dataclass(frozen=True, slots=True)
class ModelControl:
    """One model of a worker; counts are those since it was registered.

    Attributes:
        floor: "" when the server does not say.
        device_resident, host_resident: whether its weights are on the device, and in a host copy, now.
        weight_nbytes: bytes of its weights.
        weight: its share of the device under the discipline `fair`.
        queue_depth: requests that wait.
        compute_seconds: device time that it used.
        max_batch_size: most rows that requests are merged to; 0 = never merged.
        batch_input_name, batch_axis: the first batched input and its batch axis, from 1; "" and 0 = none.
    """

    name: str
    floor: Floor | Literal[""]
    device_resident: bool
    host_resident: bool
    weight_nbytes: int
    weight: float
    queue_depth: int
    compute_seconds: float
    requests_served: int
    rows_served: int
    dispatch_count: int
    max_batch_size: int
    batch_input_name: str
    batch_axis: int


@dataclass(frozen=True, slots=True)
class ControlStatus:
    """What a worker tells those who control it.

    Attributes:
        residency_mode: "self_managed", or "externally_managed" when others decide which weights are on the device.
        weight_cache_max_bytes: what weights that come and go may take; 0 = all weights stay.
    """

    residency_mode: str
    discipline: str
    weight_cache_max_bytes: int
    models: tuple[ModelControl, ...]


@dataclass(frozen=True, slots=True)
class CompactedMemory:
    """How many models the call loaded again that are still there, and the bytes of weights that come and go on the
    device afterwards."""

    reloaded: int
    resident_bytes: int


class Control(Handle):
    """The control plane of one worker by its URL. See `KServeModel` for the options.

    `timeout` bounds each call, in seconds, 300 by default, at most `MAX_TIMEOUT_SECONDS`; moving weights takes as long
    as reading them does, and waits its turn. Raises UsageError for another one.
    """

    _service = SERVICE
    _default_timeout = 300.0
    _max_timeout = MAX_TIMEOUT_SECONDS

    def status(self) -> ControlStatus:
        answer = self._ask("ModelControlStatus")
        models = tuple(_model(row) for row in answer.models)
        return ControlStatus(answer.residency_mode, answer.discipline, answer.weight_cache_max_bytes, models)

    def set_residency(self, name: str, floor: Floor) -> Floor | Literal[""]:
        """Have the weights of `name` at least in that place; returns the floor that it has when that is done.

        Raises ResidencyRefused when the server moves weights itself or has no budget for them, UnknownModel,
        DeviceOutOfMemory when they do not fit, or what the loading failed with.
        """
        if floor not in FLOORS:
            raise UsageError(f"no residency is called {floor!r}; wanted {', '.join(FLOORS)}")
        return _floor(self._ask("SetModelResidency", name=name, target=FLOORS.index(floor) + 1).residency)

    def set_policy(self, name: str, *, weight: float | None = None) -> None:
        """Give `name` another share of the device under `fair`; without one, only see that the server knows it.

        Raises UnknownModel, or InvalidRequest for a weight that is not a finite number above 0.
        """
        fields = {} if weight is None else {"has_weight": True, "weight": weight}
        self._ask("SetModelPolicy", name=name, **fields)

    def compact(self, reload: Sequence[str] = ()) -> CompactedMemory:
        """Free all weights that may be freed, so that holes in the device's memory merge, then load `reload` again.

        The server skips what cannot be loaded, and ends before one of them would have to leave for the next.
        """
        answer = self._ask("CompactMemory", reload_models=list(reload))
        return CompactedMemory(answer.reloaded_models, answer.resident_bytes_after)

    def _ask(self, method: str, **fields: Any) -> Any:
        from rsrv.protos import control

        request = getattr(control, f"{method}Request")(**fields)
        answer = self._connection.call(method, request.SerializeToString(), self._timeout)
        return message_of(getattr(control, f"{method}Response"), answer)


def _model(row: Any) -> ModelControl:
    return ModelControl(
        name=row.name,
        floor=_floor(row.residency),
        device_resident=row.device_resident,
        host_resident=row.host_resident,
        weight_nbytes=row.weight_nbytes,
        weight=row.weight,
        queue_depth=row.queue_depth,
        compute_seconds=row.total_compute_seconds,
        requests_served=row.requests_served,
        rows_served=row.rows_served,
        dispatch_count=row.dispatch_count,
        max_batch_size=row.max_batch_size,
        batch_input_name=row.batch_input_name,
        batch_axis=row.batch_axis,
    )


def _floor(number: int) -> Floor | Literal[""]:
    """The name of a `Residency` of the wire; "" for one that this version does not know."""
    return FLOORS[number - 1] if 1 <= number <= len(FLOORS) else ""
