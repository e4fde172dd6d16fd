"""What is raised when requests of a dataset failed: one error, with all that is to be said of the others, once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rsrv.client.dataset.answers import items_text
from rsrv.client.notes import Detail, ItemsNote


def settle(failures: Sequence[BaseException]) -> None:
    """Raise the first of `failures`, if there is one. Its notes name its items, those that failed alike, and others."""
    if not failures:
        return
    first = failures[0]
    groups: dict[tuple[type[BaseException], str], dict[int, BaseException]] = {}
    for failure in failures:
        groups.setdefault((type(failure), _without_items(failure)), {})[id(failure)] = failure
    notes: list[str] = []
    for group in groups.values():
        leader, *others = group.values()
        told, alike = _told(leader, others)
        if leader is first:
            notes += told
            if alike:
                notes.append(f"failed alike: {alike}")
        else:
            told += [f"alike: {alike}"] if alike else []
            notes.append(f"also failed: {type(leader).__name__}: {leader}" + (f" ({'; '.join(told)})" if told else ""))
    if notes:
        first.__notes__ = notes
    try:
        raise first
    finally:
        del first, failures, failure, groups, group, leader, others


def _told(leader: BaseException, others: Iterable[BaseException]) -> tuple[list[str], str]:
    """The notes on `leader` as far as they are its own, and which items failed like it, with notes of the user's.

    Several requests may have raised the very same error.
    """
    told: list[str] = []
    rows: list[range] = []
    found = False
    for note in _notes(leader):
        if isinstance(note, ItemsNote):
            if found:
                rows.append(note.rows)
            else:
                told.append(note)
            found = True
        elif note not in told and not (found and isinstance(note, Detail)):
            told.append(note)
    apart = []
    for other in others:
        its = [note.rows for note in _notes(other) if isinstance(note, ItemsNote)]
        more = [note for note in _notes(other) if not isinstance(note, ItemsNote | Detail) and note not in told]
        if more:
            apart.append(f"{', '.join(map(items_text, its))} ({'; '.join(more)})")
        else:
            rows += its
    return told, ", ".join([*map(items_text, _joined(rows)), *apart])


def _without_items(error: BaseException) -> str:
    """What `error` says, with its own items left out: it may be alike for others."""
    text = str(error)
    for note in _notes(error):
        if isinstance(note, ItemsNote):
            text = text.replace(items_text(note.rows), "")
    return text


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _joined(rows: Iterable[range]) -> list[range]:
    """Ranges in order, adjacent ones as one."""
    joined: list[range] = []
    for one in sorted(rows, key=lambda one: one.start):
        if joined and joined[-1].stop == one.start:
            joined[-1] = range(joined[-1].start, one.stop)
        elif one not in joined:
            joined.append(one)
    return joined
