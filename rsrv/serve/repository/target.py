"""What the watcher asks of the rest of the worker, and the failures that mean something to it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rsrv.serve.renaming import Move


class Target(Protocol):
    """Where changes go. Nothing but `rename` may block; whatever is raised, or is in a future, is a failed change.

    NameTaken from `load` says that the name belongs to somebody else, who registered another directory under it; the
    watcher leaves the name alone until its own files change. UnknownModel from `unload` is a success.
    """

    def load(self, name: str, path: Path) -> Future[object]:
        """Register and prepare the bundle in `path`; also again, when the name stands there as failed."""
        ...

    def reload(self, name: str, path: Path) -> Future[object]:
        """Replace what serves `name` by what is in `path` now; also when the load at startup failed."""
        ...

    def unload(self, name: str) -> Future[object] | None:
        """Remove `name`; the future is done when the name is free. None: it is free."""
        ...

    def rename(self, moves: Sequence[Move]) -> object:
        """Models have other names from now on. In the order of `moves` each name is free; for requests all happen in
        one step. When one is not possible, nothing happens."""
        ...
