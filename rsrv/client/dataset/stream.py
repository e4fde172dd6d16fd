"""Drives a map over an iterator with threads: reads ahead as far as requests may be in flight, and keeps the order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import length_hint
from typing import TYPE_CHECKING, Any

from rsrv.client.dataset.driver import Crew, Progress
from rsrv.client.dataset.items import ItemMap, require_items
from rsrv.client.dataset.settlement import settle
from rsrv.client.dataset.survey import Batch, checked_batch
from rsrv.client.steps import run

if TYPE_CHECKING:
    from rsrv.client.model import KServeModel


class Reader:
    """Fills the chunks of an `ItemMap`; `trouble` is why it ended before the source did."""

    def __init__(self, source: Iterator[Any], first: Any, chunks: ItemMap) -> None:
        self._source = source
        self._first: list[Any] = [first]
        self._chunks = chunks
        self.ended = False
        self.trouble: BaseException | None = None

    def next(self) -> range | None:
        """The next chunk; a shorter one, or None, where the items end or one of them is no good."""
        try:
            while not self._chunks.full:
                self._chunks.add(self._first.pop() if self._first else next(self._source))
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.ended = True
            self.trouble = error
        return self._chunks.cut()


def over_items(
    model: KServeModel,
    items: Iterable[Any],
    batch: Batch = None,
    progress: Progress | None = None,
    outputs: Sequence[str] | None = None,
) -> Iterator[Any]:
    """The outputs of each item, in order; see `KServeModel.map`. Raises UsageError at once for what has no items."""
    require_items(items)
    checked_batch(batch)
    return _stream(model, iter(items), length_hint(items, -1), batch, progress, outputs)


def _stream(
    model: KServeModel,
    source: Iterator[Any],
    total: int,
    batch: Batch,
    progress: Progress | None,
    outputs: Sequence[str] | None,
) -> Iterator[Any]:
    try:
        first = next(source)
    except StopIteration:
        return
    chunks = run(ItemMap.prepare(model, first, batch, outputs))
    course = chunks.course
    reader = Reader(source, first, chunks)
    del first
    crew = Crew(course.window)
    line: deque[range] = deque()  # chunks whose results are to come, in order
    ended: dict[int, BaseException | None] = {}
    failed = False
    try:
        while line or not reader.ended:
            while line and line[0].start in ended:
                rows = line.popleft()
                failure = ended.pop(rows.start)
                if failure is not None:
                    while crew.busy:
                        ended.update((crew.next(),))
                    settle([failure, *filter(None, ended.values())])
                yield from chunks.results(rows)
                if progress is not None:
                    progress(rows.stop, total)
            if not reader.ended and not failed and len(line) < course.window:
                cut = reader.next()
                if cut is not None:
                    line.append(cut)
                    crew.give(cut.start, lambda cut=cut: run(course.run(cut)))  # type: ignore[misc]
            elif line:
                ended.update((crew.next(),))
            while crew.busy and crew.any_ended():
                ended.update((crew.next(),))
            failed = any(ended.values())
        settle([reader.trouble] if reader.trouble is not None else [])
    except BaseException:  # also when nobody wants the rest: requests in flight end by themselves
        crew.dismiss(wait=not crew.busy)
        course.abandon()
        raise
    crew.dismiss()
