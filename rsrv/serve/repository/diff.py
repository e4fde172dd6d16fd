"""From what is served and what is there now to what has to be done, in which order. Pure: no clock, no file system."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rsrv.serve.repository.snapshot import Identity, Seen

Action = Literal["unload", "rename", "reload", "load"]

_ORDER: tuple[Action, ...] = ("unload", "rename", "reload", "load")
"""Memory is given back before more is wanted."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is done about one name; a rename gives it to the model that is called `source`.

    `path` is the directory of the bundle, where it was in the case of an unload.
    """

    action: Action
    name: str
    path: Path
    source: str = ""

    def __str__(self) -> str:
        """For log lines."""
        origin = f" from={shown(self.source)}" if self.source else ""
        return f"name={shown(self.name)} action={self.action} dir={shown(self.path)}{origin}"


def shown(name: str | Path) -> str:
    """`name` for a log line: directories may have names that are no text, or more than one line."""
    text = str(name)
    return text if text.isprintable() else ascii(text)[1:-1]


class Changes(tuple[tuple[Change, ...], ...]):
    """Groups that do not depend on each other; the changes in a group follow one another."""

    __slots__ = ()

    @property
    def flat(self) -> list[Change]:
        return [change for group in self for change in group]


def is_internal(name: str) -> bool:
    """Whether `name` is one that `diff` gives to a model in the middle of a cycle of renames: no bundle can have it."""
    return name.startswith(".")


def diff(seen: Mapping[str, Seen], now: Mapping[str, Seen], unsettled: Collection[str] = ()) -> Changes:
    """What makes what is served, `seen`, into what is there `now`.

    A directory that has got another name, with the same versions of all files, while the model of its old name leaves
    it, is a rename. Where a name is taken by a model that has to leave it first, that one goes first; a cycle goes over
    an internal name. Names in `unsettled` wait, and whatever depends on them.
    """
    changed = {
        name
        for name in seen.keys() | now.keys()
        if not (seen[name].is_like(now.get(name)) if name in seen else name not in now)
    }
    leaving: dict[Identity, list[str]] = {}
    for name in sorted(changed & seen.keys()):
        if name not in now or now[name].identity != seen[name].identity:
            leaving.setdefault(seen[name].identity, []).append(name)
    renames: dict[str, str] = {}
    groups = {name: {name} for name in changed}
    for name in sorted(changed & now.keys()):
        identity = now[name].identity
        if name in seen and seen[name].identity == identity:
            continue
        for old in leaving.get(identity, ()):
            _join(groups, old, name)
            if old not in renames and name not in renames.values() and seen[old].files == now[name].files:
                renames[old] = name
    waiting = set(unsettled)
    found = [
        _steps(group, seen, now, {old: renames[old] for old in sorted(group & renames.keys())})
        for group in {id(group): group for group in groups.values()}.values()
        if not group & waiting
    ]
    return Changes(sorted(found, key=lambda steps: (_ORDER.index(steps[0].action), steps[0].name)))


def _join(groups: dict[str, set[str]], one: str, other: str) -> None:
    if groups[one] is not groups[other]:
        groups[one] |= groups[other]
        for name in groups[one]:
            groups[name] = groups[one]


def _steps(
    group: set[str], seen: Mapping[str, Seen], now: Mapping[str, Seen], renames: dict[str, str]
) -> tuple[Change, ...]:
    targets = set(renames.values())
    leavers = [name for name in sorted(group & seen.keys()) if name not in renames]
    unloads = [name for name in leavers if name in targets or name not in now]
    steps = [Change("unload", name, seen[name].path) for name in unloads]
    sources, pending = set(renames), dict(renames)
    while pending:
        free = [old for old, new in pending.items() if new not in pending]
        if free:
            for old in free:
                new = pending.pop(old)
                steps.append(Change("rename", new, now[new].path, old))
            continue
        old, new = next(iter(pending.items()))
        del pending[old]
        aside = f".{old}"
        steps.append(Change("rename", aside, now[new].path, old))
        pending[aside] = new
    rest: list[Change] = []
    for name in sorted(group & now.keys() - targets):
        action: Action = "reload" if name in seen and name not in sources else "load"
        rest.append(Change(action, name, now[name].path))
    return (*steps, *sorted(rest, key=lambda change: _ORDER.index(change.action)))
