"""Drives a dataset with threads: `infer_sync`, one request after another, and `infer_async`, several at a time."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

from rsrv.client.dataset.course import Course, require_io
from rsrv.client.dataset.settlement import settle
from rsrv.client.dataset.survey import survey
from rsrv.client.steps import run
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    from rsrv.client.dataset.io import InferenceIO
    from rsrv.client.model import KServeModel
    from rsrv.client.tensors import InferInput, InferResponse

Progress = Callable[[int, int], None]
"""Told, after each chunk, how many items are done and how many there are."""


class Outcome(NamedTuple):
    """What came of the piece of work `number`: `error` is None when it returned."""

    number: int
    error: BaseException | None


class Crew:
    """Daemon threads, `size` at most, that take work in order and report in the order in which they end.

    No executor: its threads are joined at exit, and after Ctrl-C nobody wants to wait for the deadline of a request.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self.busy = 0

    def give(self, number: int, work: Callable[[], Any]) -> None:
        """Have `work` done; more than `size` pieces wait."""
        self.busy += 1
        self._work.put((number, work))
        if len(self._threads) < min(self.busy, self._size):
            thread = threading.Thread(target=self._labour, name=f"rsrv-dataset-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def next(self) -> Outcome:
        """Wait for a piece of work to end; call it no more often than there was work."""
        outcome = self._outcomes.get()
        self.busy -= 1
        return outcome

    def any_ended(self) -> bool:
        """Whether `next` would return at once."""
        return not self._outcomes.empty()

    def dismiss(self, *, wait: bool = True) -> None:
        """No more work: threads end, those that are busy after their present one. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _labour(self) -> None:
        while (task := self._work.get()) is not None:
            number, work = task
            error: BaseException | None = None
            try:
                work()
            except BaseException as failure:
                error = failure
            del task, work
            self._outcomes.put(Outcome(number, error))
            del error


@overload
def infer_sync(
    model: KServeModel,
    data: Sequence[InferInput],
    outputs: Sequence[str] | None = None,
    id: str = "",
) -> InferResponse: ...
@overload
def infer_sync(
    model: KServeModel, data: InferenceIO, *, progress: Progress | None = None, copy_outputs: bool = True
) -> None: ...
def infer_sync(
    model: KServeModel,
    data: Sequence[InferInput] | InferenceIO,
    outputs: Sequence[str] | None = None,
    id: str = "",  # noqa: A002
    *,
    progress: Progress | None = None,
    copy_outputs: bool = True,
) -> InferResponse | None:
    """Send one inline request of explicit tensors and return the response, or send a dataset, chunk after chunk.

    A dataset is an `InferenceIO`; see `infer_async`, which has several chunks in flight.
    """
    if isinstance(data, Sequence):
        for tensor in data:
            if not hasattr(tensor, "data") or not hasattr(tensor, "name"):
                raise UsageError(
                    f"infer_sync was given a sequence with a {type(tensor).__name__}; wanted InferInput(name, array)",
                    hint="for rows of an array, or many items: model.map(data)",
                )
        return model.request(data, outputs, id, inline=True)
    if outputs is not None or id:
        raise UsageError("outputs and id are for explicit tensors; a dataset has output_specs()")
    infer_async(model, data, progress=progress, copy_outputs=copy_outputs, window=1)
    return None


def infer_async(
    model: KServeModel,
    io: InferenceIO,
    *,
    progress: Progress | None = None,
    copy_outputs: bool = True,
    window: int | None = None,
) -> None:
    """Send all items of `io`, `max_batch_size` of the handle in a request, and return when all answers were taken.

    Args:
        progress: called in this thread after each chunk with (items done, items).
        copy_outputs: False hands `decode_chunk` views of shared memory where it can, valid only inside that call.
        window: the most requests in flight; by default as many as have room in the pool of buffers.

    Each request may take the handle's `deadline`, waiting for buffers included, the time of `encode_chunk` and
    `decode_chunk` excluded. After the first failure nothing new is sent; when what runs has ended, that error is
    raised, with the items in its notes, and other failures too. Safe to call from several threads.

    Raises UsageError for an `io` that does not keep its contract or does not fit into a pool, InvalidResponse when
    answers are not what `output_specs` declares, whatever its methods raise, and the errors of `KServeModel.infer`.
    """
    checked_window(window)
    require_io(io)
    n_items = len(io)
    if n_items == 0:
        return
    course = Course(model, io, run(survey(model)), copy_outputs=copy_outputs)
    drive(course, n_items, progress, window)


def checked_window(window: int | None) -> None:
    """Raise UsageError for a window that no request fits into."""
    if window is not None and (not isinstance(window, SupportsIndex) or operator.index(window) < 1):
        raise UsageError(f"window={window!r} is not a number of requests from 1 on")


def drive(course: Course, n_items: int, progress: Progress | None = None, window: int | None = None) -> None:
    """Run all chunks of `course`; see `infer_async`."""
    limit = course.window if window is None else min(window, course.window)
    if limit == 1 or n_items <= course.chunk:
        _one_by_one(course, n_items, progress)
    else:
        _several(course, n_items, limit, progress)


def _one_by_one(course: Course, n_items: int, progress: Progress | None) -> None:
    for rows in course.ranges():
        run(course.run(rows))
        if progress is not None:
            progress(rows.stop, n_items)


def _several(course: Course, n_items: int, window: int, progress: Progress | None) -> None:
    crew = Crew(window)
    failures: list[BaseException] = []
    done = 0

    def next_one() -> None:
        nonlocal done
        ended = crew.next()
        if ended.error is not None:
            failures.append(ended.error)
            return
        done += min(course.chunk, n_items - ended.number)
        if progress is not None and not failures:
            try:
                progress(done, n_items)
            except Exception as error:
                failures.append(error)

    try:
        for rows in course.ranges():
            while crew.busy >= window or (crew.busy and crew.any_ended()):
                next_one()
            if failures:
                break
            crew.give(rows.start, lambda rows=rows: run(course.run(rows)))  # type: ignore[misc]
        while crew.busy:
            next_one()
    except BaseException:  # Ctrl-C: requests in flight end by themselves, and nobody is told of their answers
        crew.dismiss(wait=False)
        course.abandon()
        raise
    crew.dismiss()
    settle(failures)
