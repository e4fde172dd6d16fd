"""What the watcher remembers, and what it does at each look. It has no thread, and its time is passed in.

A look finds the names that differ from what is served, waits until each has settled, lets hashes decide where only
times differ, and gives the changes to the target. A name with a change under way is left alone until that has ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Lock

from rsrv.core.errors import NameTaken, UnknownModel
from rsrv.serve.renaming import Move
from rsrv.serve.repository.contents import Contents
from rsrv.serve.repository.diff import Change, diff, is_internal, shown
from rsrv.serve.repository.memory import Chain, Model, Tombstone
from rsrv.serve.repository.settling import Settling
from rsrv.serve.repository.snapshot import Identity, Seen, Snapshot, scan
from rsrv.serve.repository.target import Target

log = logging.getLogger(__name__)

MAX_ROUNDS = 32
BARE_ROUNDS = 2


class Follower:
    """Keeps `target` at what the directories hold. One thread calls `look`; all other methods may be called by any.

    Args:
        roots: the directories; those that cannot be read now are skipped, and the models from there stay.
        include: the only names that count, unless empty.
        settle_seconds: how long a change must have stayed the same.
        clock: monotonic seconds.
        wake: called when something happened that needs a look soon.
    """

    def __init__(
        self,
        target: Target,
        *,
        roots: Sequence[Path | str],
        include: Collection[str] = (),
        settle_seconds: float,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._roots = roots
        self._include = frozenset(include)
        self._clock = clock
        self._wake = wake
        self.contents = Contents()
        # Guards everything below; never held while anything else is called that may wait.
        self._lock = Lock()
        self._models: dict[str, Model] = {}
        self._settling = Settling(settle_seconds)
        self._busy: dict[str, Chain] = {}
        self._comparing: set[str] = set()
        self._verdicts: dict[str, tuple[Seen, Seen, bool]] = {}
        self._dirty: set[str] = set()
        self._ended: deque[tuple[Chain, Change, BaseException | None]] = deque()
        # Only the thread that looks.
        self._last = Snapshot()
        self._round = 0
        self._bare: dict[str, int] = {}
        self._devices: dict[Path, Identity] = {}
        self._away: set[Path] = set()
        self._has_ended = False

    def seed(self, snapshot: Snapshot) -> None:
        """What was found before the server loaded it; also of what then failed to load, which is not tried again
        before its files change."""
        with self._lock:
            self._models = {name: Model(seen) for name, seen in snapshot.items()}
        self._last = snapshot
        self._devices.update(snapshot.roots)
        for seen in snapshot.values():
            self.contents.learn(seen)

    # --- from outside ---------------------------------------------------------------------------------------------

    def event(self, names: Iterable[str] | None, now: float) -> None:
        """Something happened to `names` at `now`; None: nobody knows to which."""
        with self._lock:
            self._settling.event(self._concerned(names), now)

    def touch(self, names: Iterable[str] | None) -> None:
        """Look at `names` at the next occasion, whatever `next_due` said; None: at all."""
        with self._lock:
            self._dirty |= self._concerned(names)

    def _concerned(self, names: Iterable[str] | None) -> set[str]:
        if names is None:
            # The empty name makes for a look when none is known.
            return {"", *self._models, *self._last}
        return set(names) & self._include if self._include else set(names)

    def tombstone(self, name: str) -> None:
        """`name` was unregistered: it is not loaded again before the files change that it has now."""
        is_included = not self._include or name in self._include
        found = scan(self._roots, [name]).get(name) if is_included else None
        with self._lock:
            if name in self._busy:
                self._busy[name].buried.add(name)
            if found is None:
                self._models.pop(name, None)
            else:
                before = self._models.get(name, Model(found)).seen
                self._models[name] = Model(found, is_ours=False, tombstone=time.time(), buried=before)
        if found is not None:
            self.contents.learn(found)

    def adopt(self, name: str, path: Path) -> bool:
        """Somebody registers the bundle in `path`: what is there now is what will be served. False when it lies in no
        directory that is followed, or is followed already; `abandon` undoes it."""
        found = scan(self._roots, [name]).get(name) if self._concerned([name]) else None
        if found is None or not _is_same(found.path, path):
            return False
        with self._lock:
            model = self._models.get(name)
            if model is not None and model.is_ours:
                return False
            self._models[name] = Model(found)
        self.contents.learn(found)
        return True

    def abandon(self, name: str) -> None:
        """Undo `adopt`: it was not registered."""
        with self._lock:
            self._models.pop(name, None)
        self.touch([name])
        self._wake()

    def clear_tombstone(self, name: str) -> None:
        """Somebody registered `name` again: its directory is followed as before."""
        with self._lock:
            model = self._models.get(name)
            if model is not None and model.tombstone is not None:
                self._models[name] = Model(model.buried or model.seen)
                if name in self._busy:
                    self._busy[name].buried.discard(name)

    def tombstones(self) -> list[Tombstone]:
        with self._lock:
            return [
                Tombstone(name, model.seen.signature, model.tombstone)
                for name, model in sorted(self._models.items())
                if model.tombstone is not None and model.seen is not None
            ]

    # --- when to look ---------------------------------------------------------------------------------------------

    def next_due(self, after: float) -> float | None:
        """When to look again, if the last look was at `after`; None: not before the next poll, or an event."""
        with self._lock:
            if self._ended or self._dirty:
                return after
            return self._settling.next_due(after)

    @property
    def is_waiting(self) -> bool:
        """Whether a change was found that has not been acted on; one under way does not count."""
        with self._lock:
            return bool(self._settling.pending() - self._busy.keys())

    # --- a look ---------------------------------------------------------------------------------------------------

    def look(self, *, poll: bool = False) -> list[Change]:
        """Look at the directories, all of them when `poll`, else at those where something happened or is due.

        Returns the changes that were begun.
        """
        now = self._clock()
        begun: list[Change] = []
        self._take_outcomes(begun)
        self._forget_digests()
        self._round += poll
        snapshot = self._scan(now, everything=poll)
        groups, changing = self._decide(snapshot, now, poll)
        for served, found in changing:
            # Reading takes time, which there is until the change has settled.
            self._differ(served, found)
        for group in groups:
            if (chain := self._begin_unless_same(group, snapshot)) is not None:
                self._advance(chain, begun)
        return begun

    @property
    def snapshot(self) -> Snapshot:
        """What the last look found."""
        return self._last

    def _scan(self, now: float, *, everything: bool) -> Snapshot:
        with self._lock:
            changed = self._settling.due(now) | self._dirty
            self._dirty = set()
        keep = {} if everything else {name: seen for name, seen in self._last.items() if name not in changed}
        snapshot = scan(self._roots, self._include, keep)
        self._last = snapshot
        return snapshot

    def _decide(self, snapshot: Snapshot, now: float, poll: bool) -> tuple[list[list[Change]], list[tuple[Seen, Seen]]]:
        """What has to be done now, in groups that do not depend on each other; and what may have to be soon."""
        with self._lock:
            self._note_roots(snapshot)
            states: dict[str, Seen | None] = {}
            retries: list[str] = []
            for name in self._models.keys() | snapshot.keys():
                model, found = self._models.get(name), snapshot.get(name)
                if model is None:
                    states[name] = found
                elif found is not None and found is model.seen and not model.failures:
                    self._bare.pop(name, None)  # nearly all, between two rounds
                elif self._is_out_of_sight(name, model, snapshot, poll):
                    continue
                elif found is not model.known and not (found is not None and found.is_like(model.known)):
                    states[name] = found
                elif not model.failures:
                    # The directory may be another one, and files may be watched elsewhere.
                    self._models[name] = replace(model, seen=found)
                elif poll and self._round >= model.next_round and name not in self._busy:
                    retries.append(name)
            unsettled = (states.keys() - self._settling.look(states, now)) | self._busy.keys()
            settled = states.keys() - unsettled
            for name in settled:
                if states[name] is None and not self._models[name].is_ours:
                    del self._models[name]
            served = {
                name: model.seen
                for name in states
                if (model := self._models.get(name)) is not None and model.is_ours and model.seen is not None
            }
            found_now = {name: state for name, state in states.items() if state is not None}
            groups = [list(group) for group in diff(served, found_now, unsettled)]
            # A failed change that turned back to what is served is told to the target all the same, which knows of the
            # failure; what was never loaded, and is gone now, is registered there.
            silent = settled - {change.name for group in groups for change in group}
            for name in [*retries, *sorted(silent)]:
                again = self._again(name, snapshot.get(name))
                groups += [[again]] if again is not None else []
            self._verdicts = {name: self._verdicts[name] for name in self._verdicts.keys() & states.keys()}
            changing = [
                (model.seen, found)
                for name in unsettled - self._busy.keys()
                if (model := self._models.get(name)) is not None and model.seen and not model.failures
                if (found := states.get(name)) is not None and found.path == model.seen.path
            ]
            return groups, changing

    def _again(self, name: str, found: Seen | None) -> Change | None:
        model = self._models.get(name)
        if model is None or not model.failures:
            return None
        log.info("watcher: trying again name=%s failures=%d", shown(name), model.failures)
        if found is not None:
            return Change("load" if model.seen is None else "reload", name, found.path)
        gone = model.seen or model.tried
        return Change("unload", name, gone.path) if gone is not None else None

    def _begin_unless_same(self, group: Sequence[Change], snapshot: Snapshot) -> Chain | None:
        """None when the files have the content that is served already, or it takes longer to find out."""
        name, served = group[0].name, None
        if len(group) == 1 and group[0].action in ("load", "reload"):
            with self._lock:
                model = self._models.get(name)
            if group[0].action == "reload" and (model is None or not model.is_ours):
                return None  # somebody has just unregistered it
            served = model.seen if model is not None and not model.failures else None
        found = snapshot.get(name)
        differs: bool | None = True
        if served is not None and found is not None and served.path == found.path:
            differs = self._differ(served, found)
        with self._lock:
            if differs:
                return self._begin(group, snapshot)
            if differs is False:
                self._adopt(name, snapshot[name])
        return None

    def _differ(self, served: Seen, found: Seen) -> bool | None:
        """Whether the files have another content; None while it is being found out."""
        name = found.name
        with self._lock:
            before = self._verdicts.get(name)
            if before is not None and before[:2] == (served, found):
                return before[2]
            if name in self._comparing:
                return None
        differs = self.contents.differ(served, found)
        with self._lock:
            if differs is None:
                self._comparing.add(name)
            else:
                self._verdicts[name] = (served, found, differs)
        if differs is None:
            self.contents.compare(served, found, partial(self._on_compared, served, found))
        return differs

    def _forget_digests(self) -> None:
        if self._has_ended:
            self._has_ended = False
            with self._lock:
                served = [model.seen for model in self._models.values() if model.seen is not None]
            self.contents.retain(served)

    def _begin(self, group: Sequence[Change], snapshot: Snapshot) -> Chain:
        names = frozenset(name for change in group for name in (change.name, change.source) if name)
        chain = Chain(deque(group), {name: snapshot[name] for name in names if name in snapshot}, names)
        self._busy.update(dict.fromkeys(names, chain))
        return chain

    def _adopt(self, name: str, found: Seen) -> None:
        if (model := self._models.get(name)) is not None:
            log.info("watcher: touched, but the same name=%s dir=%s", shown(name), shown(found.path))
            self._models[name] = replace(model, seen=found)
            self._dirty.add(name)  # the next look finds that there is nothing to wait for

    # --- what cannot be seen now ----------------------------------------------------------------------------------

    def _is_out_of_sight(self, name: str, model: Model, snapshot: Snapshot, poll: bool) -> bool:
        """Whether nobody can say what became of `name`: its root is away, or its directory has lost its manifest."""
        at = model.seen or model.tried
        if at is None or at.root in self._away or at.root in snapshot.unreadable or at.path in snapshot.unreadable:
            return True
        if at.path not in snapshot.bare:
            self._bare.pop(name, None)
            return False
        self._bare[name] = self._bare.get(name, 0) + poll
        return self._bare[name] < BARE_ROUNDS

    def _note_roots(self, snapshot: Snapshot) -> None:
        """A root is away when it cannot be read, or is empty and on another device than before: it was unmounted."""
        away = set()
        for given in self._roots:
            root = Path(os.path.abspath(given))
            here = snapshot.roots.get(root)
            if here is None and root not in snapshot.unreadable:
                continue  # the same directory as an earlier root
            before = self._devices.get(root)
            is_other = here is not None and before is not None and before[0] != here[0]
            if here is None or (is_other and not any(seen.root == root for seen in snapshot.values())):
                away.add(root)
            else:
                self._devices[root] = here
        for root in sorted(away - self._away):
            log.warning("watcher: model directory is away, its models stay dir=%s", root)
        for root in sorted(self._away - away):
            log.info("watcher: model directory is back dir=%s", root)
        self._away = away

    # --- applying -------------------------------------------------------------------------------------------------

    def _advance(self, chain: Chain, begun: list[Change]) -> None:
        """Apply the changes of `chain`, up to one that takes its time."""
        while chain.left:
            change = chain.left.popleft()
            begun.append(change)
            log.info("watcher: change detected %s", change)
            if change.action == "rename" and self._rename_together(chain, change, begun):
                continue
            try:
                future = self._start(change)
            except Exception as error:
                self._end(chain, change, error)
                continue
            if future is not None and not future.done():
                future.add_done_callback(partial(self._on_done, chain, change))
                return
            self._end(chain, change, None if future is None else _error_of(future))
        with self._lock:
            for name in chain.names:
                self._busy.pop(name, None)
            # What happened to them meanwhile was not looked at.
            self._dirty.update(chain.names)
        self._has_ended = True
        self._wake()

    def _rename_together(self, chain: Chain, first: Change, begun: list[Change]) -> bool:
        """Rename all that follows `first`, too, in one step; False, and nothing was done, when that is not possible."""
        rest = list(takewhile(lambda change: change.action == "rename", chain.left))
        if not rest:
            return False
        try:
            self._target.rename([Move(change.source, change.name, change.path) for change in (first, *rest)])
        except Exception as error:
            log.info("watcher: renamed one by one first=%s why=%s", first, error)
            return False
        self._end(chain, first, None)
        for _ in rest:
            change = chain.left.popleft()
            begun.append(change)
            log.info("watcher: change detected %s", change)
            self._end(chain, change, None)
        return True

    def _start(self, change: Change) -> Future[object] | None:
        if change.action == "load":
            return self._target.load(change.name, change.path)
        if change.action == "reload":
            return self._target.reload(change.name, change.path)
        if change.action == "unload":
            return self._target.unload(change.name)
        self._target.rename([Move(change.source, change.name, change.path)])
        return None

    def _on_done(self, chain: Chain, change: Change, future: Future[object]) -> None:
        with self._lock:
            self._ended.append((chain, change, _error_of(future)))
        self._wake()

    def _on_compared(self, served: Seen, found: Seen, differs: bool) -> None:
        with self._lock:
            self._comparing.discard(found.name)
            self._verdicts[found.name] = (served, found, differs)
            self._dirty.add(found.name)
        self._wake()

    def _take_outcomes(self, begun: list[Change]) -> None:
        with self._lock:
            ended, self._ended = self._ended, deque()
        for chain, change, error in ended:
            self._end(chain, change, error)
            self._advance(chain, begun)

    def _end(self, chain: Chain, change: Change, error: BaseException | None) -> None:
        """`change` is done, or has failed with `error`."""
        if error is not None and change.action == "unload" and isinstance(error, UnknownModel):
            error = None
        if error is not None and change.action == "rename":
            self._without_rename(chain, change, error)
            return
        with self._lock:
            if change.name in chain.buried:
                return
            found = chain.bundles.get(change.name)
            if error is None:
                self._succeed(change, found)
            elif isinstance(error, NameTaken) and change.action == "load":
                log.warning("watcher: name taken, left alone %s", change)
                self._models[change.name] = Model(found, is_ours=False)
            else:
                self._fail(change, found if change.action != "unload" else None, error)

    def _succeed(self, change: Change, found: Seen | None) -> None:
        if change.action == "unload":
            self._models.pop(change.name, None)
            return
        if change.action == "rename":
            self._models.pop(change.source, None)
        if found is not None:  # None: a name in the middle of a cycle
            self._models[change.name] = Model(found)
            self.contents.learn(found)

    def _fail(self, change: Change, found: Seen | None, error: BaseException) -> None:
        before = self._models.get(change.name, Model(None))
        is_same = before.failures > 0 and (found.is_like(before.tried) if found else before.tried is None)
        failures = before.failures + 1 if is_same else 1
        rounds = min(MAX_ROUNDS, 1 << min(failures - 1, 8))
        log.warning(
            "watcher: change failed %s retry_rounds=%d error=%s",
            change,
            rounds,
            error if str(error) else type(error).__name__,
        )
        if is_internal(change.name):
            return
        seen = before.seen if before.is_ours else None
        self._models[change.name] = Model(seen, failures=failures, tried=found, next_round=self._round + rounds)

    def _without_rename(self, chain: Chain, change: Change, error: BaseException) -> None:
        """The model cannot take the new name: the old one goes, and the new one is loaded."""
        log.warning("watcher: rename failed %s error=%s", change, error)
        instead = [Change("unload", change.source, change.path)]
        if not is_internal(change.name):
            instead.append(Change("load", change.name, change.path))
        chain.left.extendleft(reversed(instead))


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _error_of(future: Future[object]) -> BaseException | None:
    return CancelledError("it was cancelled") if future.cancelled() else future.exception()
