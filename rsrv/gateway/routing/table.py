"""The routing table: which workers serve which model, and why others are not served. Made anew by every scan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class NotReady:
    """A model that a worker lists and does not serve; `reason` is ``preparing`` or ``failed``, `text` the worker's."""

    reason: str
    text: str


class RoutingTable:
    """Immutable but for one rotation counter per model, which starts at 0 with each table.

    Attributes:
        unheard: workers that have never listed their models, so that nobody knows what they have.
    """

    def __init__(
        self,
        urls: Mapping[str, Iterable[str]] = {},
        missing: Mapping[str, NotReady] = {},
        unheard: Iterable[str] = (),
    ) -> None:
        self._urls = {model: tuple(sorted(set(found))) for model, found in urls.items()}
        self._missing = {model: why for model, why in missing.items() if not self._urls.get(model)}
        self.unheard = tuple(sorted(unheard))
        self._counters = {model: count() for model in self._urls}

    @property
    def models(self) -> tuple[str, ...]:
        """The models that somebody serves, sorted."""
        return tuple(sorted(model for model, urls in self._urls.items() if urls))

    @property
    def missing(self) -> Mapping[str, NotReady]:
        return self._missing

    def __len__(self) -> int:
        return sum(1 for urls in self._urls.values() if urls)

    def knows(self, model: str) -> bool:
        """Whether any worker has registered the name, ready or not."""
        return bool(self._urls.get(model)) or model in self._missing

    def urls(self, model: str) -> tuple[str, ...]:
        """The workers that serve the model, sorted; empty when none does."""
        return self._urls.get(model, ())

    def pick(self, model: str) -> tuple[str, ...]:
        """The workers that serve the model, each call starting with the next one; empty when none does."""
        urls = self._urls.get(model, ())
        if len(urls) < 2:
            return urls
        start = next(self._counters[model]) % len(urls)
        return urls[start:] + urls[:start]

    def not_ready(self, model: str) -> NotReady | None:
        """Why a registered model has no replica; None for a name that nobody has, and for one that is served."""
        return self._missing.get(model)
