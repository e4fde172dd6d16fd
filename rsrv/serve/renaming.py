"""Models get other names: one, or several at once, so that a name that goes from one model to another is always known.

Programs, weights, counters and requests stay with their model. The names that requests are looked up by change last,
in one step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rsrv.bundle.files import require_name
from rsrv.core.errors import NameTaken, WrongState
from rsrv.serve import observe
from rsrv.serve.registry import Entry, ModelState, Renamed
from rsrv.serve.residency.setup import floor_of

if TYPE_CHECKING:
    from rsrv.core.config import ServerConfig
    from rsrv.serve.admission import Admission
    from rsrv.serve.counters import ServerCounters
    from rsrv.serve.loading import Loader
    from rsrv.serve.registry import Prepared, Registry
    from rsrv.serve.request import Request
    from rsrv.serve.residency.floors import Floor
    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.retirement import Retirements
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)

_NOT_RENAMED = {
    ModelState.PREPARING: "preparing",
    ModelState.RETIRING: "removing",
    ModelState.RELEASE_FAILED: "removing",
}
"""And the reason of the refusal."""


class Move(NamedTuple):
    """The model that is called `old` at that moment is called `new` from then on, and lies in `directory`."""

    old: str
    new: str
    directory: Path


class Renaming:
    """`counts` are kept by name; `on_renamed` is told of the old and the new name of each model."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        registry: Registry,
        scheduler: Scheduler,
        residency: Residency,
        loader: Loader,
        retirements: Retirements,
        counters: ServerCounters,
        admission: Admission[Request],
        counts: Iterable[Counter[str]],
        on_renamed: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._scheduler = scheduler
        self._residency = residency
        self._loader = loader
        self._retirements = retirements
        self._counters = counters
        self._admission = admission
        self._counts = tuple(counts)
        self._on_renamed = on_renamed

    def run(self, moves: Sequence[Move]) -> list[tuple[str, Entry]]:
        """Rename, in this order; the old names, and the entries under the new ones. A name is free once its model has
        left it.

        Raises UnknownModel, NameTaken, and WrongState for a model that is being prepared or removed; nothing is changed
        then.
        """
        with self._registry.changing:
            self._require_possible(moves)
            passing = {move.old for move in moves} & {
                move.new for move in moves if self._registry.get(move.new) is None
            }
            renamed: dict[str, Renamed] = {}
            undo: list[Callable[[], None]] = []
            try:
                for move in moves:
                    one = renamed.pop(move.old, None) or Renamed(move.old, self._registry.find(move.old), {})
                    renamed[move.new] = self._rename(one, move, undo, is_passing=move.new in passing)
            except BaseException:
                for step in reversed(undo):
                    step()
                raise
            self._registry.rename_all(renamed)
            for move in moves:
                self._on_renamed(move.old, move.new)
            done = [(one.old, self._registry.find(new)) for new, one in renamed.items()]
        for old, entry in done:
            log.info("model renamed from=%s to=%s incarnation=%d", old, entry.name, entry.incarnation)
            observe.beat("unload", old)
        for _, entry in done:
            observe.beat("load", entry.name)
        return done

    def _require_possible(self, moves: Sequence[Move]) -> None:
        there = {entry.name: entry for entry in self._registry.entries()}
        for old, new, _ in moves:
            require_name(new)
            entry = there.pop(old, None) or self._registry.find(old)
            if entry.state in _NOT_RENAMED:
                raise WrongState(
                    f"model {entry.name!r} is {entry.state.value} and cannot be renamed",
                    reason=_NOT_RENAMED[entry.state],
                )
            if new in there:
                raise NameTaken(f"model {old!r} cannot be renamed: a model {new!r} is registered already")
            there[new] = entry

    def _rename(self, one: Renamed, move: Move, undo: list[Callable[[], None]], *, is_passing: bool) -> Renamed:
        """Everything but the registry. A name that is only passed through says nothing about a floor."""
        old, new, directory = move
        changes: dict[str, Any] = {"path": directory}
        before = one.changes.get("prepared", one.entry.prepared)
        if before is None:
            self._carry(old, new, None, None)
            undo.append(lambda: self._carry(new, old, None, None))
            return Renamed(one.old, one.entry, changes)
        prepared = self._loader.renamed(before, new)
        kept = cast("ModelWeights", prepared.model.weights).floor
        floor = kept if is_passing else one.entry.settings.residency or floor_of(self._config, new)
        self._carry(old, new, prepared, floor)
        undo.append(lambda: self._carry(new, old, before, kept))
        return Renamed(one.old, one.entry, {**changes, "prepared": prepared, "manifest": prepared.model.manifest})

    def _carry(self, old: str, new: str, prepared: Prepared | None, floor: Floor | None) -> None:
        """What is known by name has another one from now on."""
        if prepared is not None:
            # First, because it may refuse: what was registered under that name may still be on its way out.
            self._residency.rename(cast("ModelWeights", prepared.model.weights), new, floor=floor)
            self._scheduler.rename(old, prepared.model)
        self._retirements.rename(old, new)
        self._counters.rename(old, new)
        self._admission.rename(old, new)
        for counts in self._counts:
            counts[new] = counts.pop(old, 0)
