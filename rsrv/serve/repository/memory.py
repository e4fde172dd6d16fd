"""What the watcher remembers of one name, and of changes that are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rsrv.serve.repository.diff import Change
from rsrv.serve.repository.snapshot import Seen


class Tombstone(NamedTuple):
    """A bundle that was unregistered while its files stayed; `since_unix` in seconds."""

    name: str
    signature: str
    since_unix: float


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of one name.

    Attributes:
        seen: the version that is served, as it was found before it was loaded; None = none was loaded.
        is_ours: False for a name that the watcher does not serve: `tombstone` says since when, else it is somebody's.
        buried: the version that was served before the tombstone.
        failures: how many changes in a row failed, for the version `tried` (None = its absence).
        next_round: the polling round at which it is tried again.
    """

    seen: Seen | None
    is_ours: bool = True
    tombstone: float | None = None
    buried: Seen | None = None
    failures: int = 0
    tried: Seen | None = None
    next_round: int = 0

    @property
    def known(self) -> Seen | None:
        """The version that nothing has to be done about."""
        return self.tried if self.failures else self.seen


@dataclass(slots=True, eq=False)
class Chain:
    """Changes that are applied one after the other.

    Attributes:
        bundles: the versions that were found.
        names: all that are concerned.
        buried: those that somebody unregistered meanwhile.
    """

    left: deque[Change]
    bundles: Mapping[str, Seen]
    names: frozenset[str]
    buried: set[str] = field(default_factory=set)
