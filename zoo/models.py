"""What the zoo holds: a name, where the model comes from, and a factory that makes it with its examples."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

Made = tuple[nn.Module, Mapping[str, Any]]
"""A module, and its example inputs by name (batch axis first, four rows)."""

TRAINED = "trained"
SEEDED = "seeded"


@dataclass(frozen=True)
class ZooModel:
    """One architecture.

    Attributes:
        name: of the bundle, and what ``--only`` takes.
        source: the package that defines the architecture, or brings the weights.
        make: called without arguments after the random state was seeded.
        weights: ``seeded`` or ``trained``.
        batch_sizes: the programs to write.
        options: further options of `export_bundle`.
        note: what a reader of the table has to know.
    """

    name: str
    source: str
    make: Callable[[], Made]
    weights: str = SEEDED
    batch_sizes: tuple[int, ...] = (1, 4)
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


_SOURCES = ("plain", "vision", "timm_models", "transformers_models", "trained")


def all_models() -> dict[str, ZooModel]:
    """Every model by name, in the order of the table."""
    return {model.name: model for source in _SOURCES for model in import_module(f"zoo.sources.{source}").MODELS}


def find(name: str) -> ZooModel:
    """Raises KeyError with a suggestion."""
    models = all_models()
    if name not in models:
        close = difflib.get_close_matches(name, models, n=1)
        raise KeyError(f"the zoo has no {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return models[name]
