"""`Knobs`: everything about packing that an operator may change while the gateway runs, as one immutable record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from rsrv.core.config.gateway import ModelRoutingConfig, Replicas, SchedulingConfig
from rsrv.core.config.keys import leaves
from rsrv.core.config.sections import Section
from rsrv.core.errors import InvalidRequest
from rsrv.gateway.scheduling.names import ALL

STARTUP_ONLY = ("mode", "scheduling_mode", "max_worker_share", "endpoints", "listen")
"""What the configuration has and no call changes: the gateway must be started again for it."""


@dataclass(frozen=True, slots=True)
class ModelOverride:
    """What is set for one model; None = as for every model."""

    replicas: Replicas | None = None
    fill_mode: str | None = None
    fill_factor: float | None = None

    @classmethod
    def from_config(cls, config: ModelRoutingConfig) -> ModelOverride:
        """What a model's section of the configuration sets."""
        return cls(config.replicas, None if config.fill_mode == "inherit" else config.fill_mode, config.fill_factor)

    def to_config(self) -> ModelRoutingConfig:
        """The section that sets this. Raises InvalidRequest that names the field whose value is not accepted."""
        values = {"replicas": self.replicas, "fill_mode": self.fill_mode, "fill_factor": self.fill_factor}
        return _checked(ModelRoutingConfig, {name: value for name, value in values.items() if value is not None})

    @property
    def empty(self) -> bool:
        return self == NO_OVERRIDE


NO_OVERRIDE = ModelOverride()


@dataclass(frozen=True)
class Knobs:
    """Spec gateway-node 2.6.3. A tick or a request reads the record once, so it never sees half a change.

    Attributes:
        rebalance_compute_seconds: device seconds of the fleet after which models are placed anew.
        first_rebalance_compute_seconds: the same for the first time; 0 = no separate budget.
        ema_halflife_compute_seconds: device seconds after which a measurement counts half; always above 0.
        hysteresis: how much worse (0.1 = 10 %) its present worker may be before a model moves.
        default_replicas: workers per model, or ``all``.
        models: what is set for single models; every entry sets something.
        generation: how many changes were accepted; 0 = as configured.
    """

    rebalance_compute_seconds: float
    first_rebalance_compute_seconds: float
    hysteresis: float
    ema_halflife_compute_seconds: float
    default_replicas: Replicas
    routing_policy: str
    routing_fill_factor: float
    routing_fill_mode: str
    compaction_mode: str
    compaction_interval: int
    forbid_memory_oversubscription: bool
    work_basis: str
    models: Mapping[str, ModelOverride] = field(default_factory=dict)
    generation: int = 0

    @classmethod
    def from_config(cls, config: SchedulingConfig) -> Knobs:
        """As configured; a half-life of 0 becomes the rebalance budget."""
        models = {name: ModelOverride.from_config(model) for name, model in config.models.items()}
        return cls(**_fields(config), models=_without_empty(models))

    def policy(self) -> dict[str, Any]:
        """The twelve fields that hold for the fleet, by the names of ``SetSchedulingPolicy``'s update mask."""
        return {name: getattr(self, name) for name in POLICY_FIELDS}

    def changed(self, /, **values: Any) -> Knobs:
        """With these of the fleet's fields set, all or none, checked by the rules of the configuration file.

        A half-life of 0 is the rebalance budget of this same change, or the present one. Raises InvalidRequest that
        names the field, its value and what is accepted.
        """
        for name in values:
            if name in STARTUP_ONLY:
                raise InvalidRequest(
                    f"{name} is fixed when the gateway starts, so that no call can change it",
                    hint="change it in the configuration and restart the gateway",
                )
            if name not in POLICY_FIELDS:
                raise InvalidRequest(f"unknown field {name!r}; wanted one of {', '.join(POLICY_FIELDS)}")
        config = _checked(SchedulingConfig, self.policy() | values)
        return replace(self, **_fields(config), generation=self.generation + 1)

    def override(self, model: str) -> ModelOverride:
        """What is set for the model; the empty override when nothing is."""
        return self.models.get(model, NO_OVERRIDE)

    def with_override(self, model: str, override: ModelOverride) -> Knobs:
        """With what is set for one model replaced; an empty override removes it. Raises InvalidRequest as `changed`."""
        checked = ModelOverride.from_config(override.to_config())
        return replace(self, models=_without_empty({**self.models, model: checked}), generation=self.generation + 1)

    def repack_budget(self, *, first_done: bool) -> float:
        """Device seconds from one repack to the next; the first one has a budget of its own, unless that is 0."""
        first = self.first_rebalance_compute_seconds
        return first if first > 0 and not first_done else self.rebalance_compute_seconds

    @property
    def replica_counts(self) -> dict[str, int]:
        """Model → workers that it is to have, where that is set for it, as `place` takes it."""
        return {name: count_of(override.replicas) for name, override in self.models.items() if override.replicas}

    def inflight_warnings(self) -> list[str]:
        """A sentence for each place that chooses the fill mode ``inflight``, sorted: it may starve replicas."""
        found = [name for name, override in self.models.items() if override.fill_mode == "inflight"]
        texts = [_INFLIGHT.format(where=f"model {name}: fill_mode") for name in found]
        if self.routing_fill_mode == "inflight":
            texts.append(_INFLIGHT.format(where="routing_fill_mode"))
        return sorted(texts)


_INFLIGHT = (
    "{where} is inflight: it may keep a model on one replica for good while between 2 and a quantum of its items are "
    "in flight; run does not"
)

POLICY_FIELDS = tuple(entry.name for entry in fields(Knobs) if entry.name not in ("models", "generation"))
"""The fields that `Knobs.changed` takes, in the order of the wire message."""


def count_of(replicas: Replicas) -> int:
    """A number of replicas as `place` takes it: `ALL` for all."""
    return ALL if replicas == "all" else replicas


def _fields(config: SchedulingConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in POLICY_FIELDS} | {
        "ema_halflife_compute_seconds": config.ema_halflife,
    }


def _without_empty(models: Mapping[str, ModelOverride]) -> Mapping[str, ModelOverride]:
    return MappingProxyType({name: override for name, override in models.items() if not override.empty})


Checked = TypeVar("Checked", bound=Section)


def _checked(section: type[Checked], values: Mapping[str, Any]) -> Checked:
    try:
        return section.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for entry in error.errors(include_url=False):
            # A union has a problem for each of its members; the type's text tells of them all.
            problems.setdefault(str(entry["loc"][0]), _problem(section, entry))
        raise InvalidRequest("; ".join(problems.values())) from None


def _problem(section: type[Section], entry: Any) -> str:
    name = str(entry["loc"][0])
    if entry["type"] == "value_error":
        return f"{name}: {entry['ctx']['error']}"
    wanted = next(leaf.type_text for leaf in leaves(section) if leaf.key == name)
    return f"{name}: {entry['input']!r} is not accepted; wanted {wanted}"
