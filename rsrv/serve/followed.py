"""What the watcher finds in the directories, as registrations: the two speak of models in different words."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import NameTaken

if TYPE_CHECKING:
    from rsrv.serve.registrations import Registrations
    from rsrv.serve.registry import Registry
    from rsrv.serve.renaming import Move


class Followed:
    """The watcher's target. Nothing blocks."""

    def __init__(self, registrations: Registrations, registry: Registry) -> None:
        self._registrations = registrations
        self._registry = registry

    def load(self, name: str, path: Path) -> Future[Any]:
        """Register and prepare what is in `path`, also again when that failed. Raises NameTaken for a name that was
        given to another directory through the API."""
        entry = self._registry.get(name)
        if entry is None:
            self._registrations.register(name, path, source="watcher")
            return self._registrations.prepare(name)
        if entry.source == "api" and entry.path != path:
            raise NameTaken(f"a model {name!r} is registered already, from {entry.path}")
        return self._registrations.reload(name, path)

    def reload(self, name: str, path: Path) -> Future[Any]:
        """Serve what is in `path` now, in the place of what was loaded from there."""
        return self.load(name, path)

    def unload(self, name: str) -> Future[Any]:
        """Remove a model; the future is done when its name is free. Raises UnknownModel."""
        gone = self._registrations.gone(name)
        self._registrations.unregister(name)
        return gone

    def rename(self, moves: Sequence[Move]) -> None:
        """Models have other names from now on; see `Registrations.rename_all`."""
        self._registrations.rename_all(moves)
