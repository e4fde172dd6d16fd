"""`AsyncKServeModel`: the same model for an event loop of asyncio. It takes the same steps as `KServeModel`."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from inspect import iscoroutinefunction
from operator import length_hint
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from rsrv.client.model import KServeModel
from rsrv.client.steps import arun
from rsrv.client.tensors import InferInput, InferResponse, named_arrays
from rsrv.client.url import host_port
from rsrv.core.errors import UsageError

if TYPE_CHECKING:
    import asyncio

    from rsrv.client.dataset.course import Course
    from rsrv.client.dataset.driver import Progress
    from rsrv.client.dataset.io import InferenceIO
    from rsrv.client.dataset.items import ItemMap
    from rsrv.client.dataset.survey import Batch
    from rsrv.client.server import ModelMetadata


class AsyncKServeModel:
    """A model on a server, for tasks of an event loop; takes the options of `KServeModel`. Use it as an asynchronous
    context manager or `close` it.

    A task that is cancelled cancels its requests and gives back its buffers. What takes long, `encode_chunk` and
    `decode_chunk` for example, runs in the loop's default executor.
    """

    def __init__(self, url: str, model_name: str, **options: Any) -> None:
        self._model = KServeModel(url, model_name, **options)

    @classmethod
    def at(cls, host: str, port: int, model_name: str, **options: Any) -> Self:
        """The model at `host` and `port`; the options are those of the constructor."""
        return cls(host_port(host, port), model_name, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """As `KServeModel.close`."""
        import asyncio

        await asyncio.to_thread(self._model.close)

    @property
    def model(self) -> KServeModel:
        """The same handle, for threads."""
        return self._model

    async def metadata(self) -> ModelMetadata:
        """As `KServeModel.metadata`."""
        import asyncio

        return await asyncio.to_thread(self._model.metadata)

    async def infer(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        *,
        id: str = "",  # noqa: A002
    ) -> dict[str, np.ndarray]:
        """As `KServeModel.infer`."""
        tensors = named_arrays(inputs)
        return (await arun(self._model.tensor_steps(tensors, outputs, id))).arrays()

    async def request(
        self,
        inputs: Sequence[InferInput],
        outputs: Sequence[str] | None = None,
        id: str = "",  # noqa: A002
        *,
        inline: bool = False,
    ) -> InferResponse:
        """As `KServeModel.request`."""
        tensors = [(tensor.name, tensor.data) for tensor in inputs]
        return await arun(self._model.tensor_steps(tensors, outputs, id, inline=inline))

    async def __call__(self, data: Any, outputs: Sequence[str] | None = None) -> Any:
        """As ``model(data)`` of `KServeModel`: one request with all the rows of an array, or of arrays by name."""
        from rsrv.client.dataset.rows import call_steps

        return await arun(call_steps(self._model, data, outputs))

    @overload
    def map(  # type: ignore[overload-overlap]  # a mapping is iterable, too, but is not meant so
        self,
        data: np.ndarray | Mapping[str, Any],
        *,
        batch: Batch = None,
        progress: Progress | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Awaitable[Any]: ...
    @overload
    def map(
        self,
        data: Iterable[Any] | AsyncIterable[Any],
        *,
        batch: Batch = None,
        progress: Progress | None = None,
        outputs: Sequence[str] | None = None,
    ) -> AsyncGenerator[Any, None]: ...
    def map(
        self,
        data: Any,
        *,
        batch: Batch = None,
        progress: Progress | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Any:
        """As `KServeModel.map`: ``await model.map(arrays)``, or ``async for y in model.map(items)``, where `items` may
        also be asynchronous. The loop stands still while a synchronous iterator makes an item."""
        from rsrv.client.dataset.items import require_items
        from rsrv.client.dataset.rows import is_rows

        _require_plain(progress)
        if is_rows(data):
            return self._map_rows(data, batch, progress, outputs)
        if not isinstance(data, AsyncIterable):
            require_items(data)
        return self._map_items(data, batch, progress, outputs)

    async def infer_async(
        self,
        io: InferenceIO,
        *,
        progress: Progress | None = None,
        copy_outputs: bool = True,
        window: int | None = None,
    ) -> None:
        """As `rsrv.client.infer_async`: all items of `io`. Its methods run in threads of the loop's executor."""
        from rsrv.client.dataset.course import Course, require_io
        from rsrv.client.dataset.driver import checked_window
        from rsrv.client.dataset.survey import survey

        checked_window(window)
        require_io(io)
        _require_plain(progress)
        if n_items := len(io):
            course = Course(self._model, io, await arun(survey(self._model)), copy_outputs=copy_outputs)
            await _drive(course, n_items, progress, window)

    async def _map_rows(self, data: Any, batch: Batch, progress: Progress | None, outputs: Sequence[str] | None) -> Any:
        from rsrv.client.dataset.rows import RowMap

        rows = await arun(RowMap.prepare(self._model, data, batch, outputs))
        if rows.course is not None:
            await _drive(rows.course, len(rows.io), progress, None)
        return rows.result()

    async def _map_items(
        self, items: Any, batch: Batch, progress: Progress | None, outputs: Sequence[str] | None
    ) -> AsyncGenerator[Any, None]:
        from rsrv.client.dataset.items import ItemMap

        total = length_hint(items, -1)
        source = aiter(items) if isinstance(items, AsyncIterable) else _asynchronous(items)
        try:
            first = await anext(source)
        except StopAsyncIteration:
            return
        chunks = await arun(ItemMap.prepare(self._model, first, batch, outputs))
        async with aclosing(_in_order(chunks, source, first)) as ordered:
            async for rows, results in ordered:
                for result in results:
                    yield result
                if progress is not None:
                    progress(rows.stop, total)


async def _drive(course: Course, n_items: int, progress: Progress | None, window: int | None) -> None:
    """Run all chunks of `course` as tasks, so many at a time; see `rsrv.client.dataset.driver.drive`."""
    import asyncio

    from rsrv.client.dataset.settlement import settle

    limit = course.window if window is None else min(window, course.window)
    ranges = course.ranges()
    running: dict[asyncio.Task[None], int] = {}
    failures: list[BaseException] = []
    done = 0
    try:
        while True:
            while len(running) < limit and not failures and (rows := next(ranges, None)) is not None:
                running[asyncio.create_task(arun(course.run(rows)))] = len(rows)
            if not running:
                break
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                count = running.pop(task)
                error = _failure(task)
                if error is not None:
                    failures.append(error)
                    continue
                done += count
                if progress is not None and not failures:
                    try:
                        progress(done, n_items)
                    except Exception as failure:
                        failures.append(failure)
    finally:
        await _cancel(running)
    settle(failures)


async def _in_order(
    chunks: ItemMap, source: AsyncIterator[Any], first: Any
) -> AsyncGenerator[tuple[range, Iterable[Any]], None]:
    """Read chunks, run them as tasks, and give each with its results when its turn has come."""
    import asyncio

    from rsrv.client.dataset.settlement import settle

    course = chunks.course
    line: deque[tuple[range, asyncio.Task[None]]] = deque()
    pending: list[Any] = [first]
    ended = False
    trouble: BaseException | None = None
    try:
        while line or not ended:
            while line and line[0][1].done():
                rows, task = line.popleft()
                failure = _failure(task)
                if failure is not None:
                    if line:
                        await asyncio.wait([other for _, other in line])
                    settle([failure, *(error for _, other in line if (error := _failure(other)) is not None)])
                yield rows, chunks.results(rows)
            if not ended and len(line) < course.window and not any(_failed(task) for _, task in line):
                try:
                    while not chunks.full:
                        chunks.add(pending.pop() if pending else await anext(source))
                except StopAsyncIteration:
                    ended = True
                except Exception as error:
                    ended, trouble = True, error
                cut = chunks.cut()
                if cut is not None:
                    line.append((cut, asyncio.create_task(arun(course.run(cut)))))
                    await asyncio.sleep(0)  # let it begin
            elif line:
                await asyncio.wait((line[0][1],))
        settle([trouble] if trouble is not None else [])
    finally:
        await _cancel([task for _, task in line])


def _require_plain(progress: Progress | None) -> None:
    """Raise UsageError for a coroutine function, which nobody would await."""
    if iscoroutinefunction(progress):
        raise UsageError("progress is a coroutine function; wanted a plain one, which the event loop calls")


async def _asynchronous(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel `tasks` and wait until they have given back what they held."""
    import asyncio

    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting)
    for task in tasks:
        _failure(task)


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    """What a task that has ended failed with."""
    import asyncio

    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and _failure(task) is not None
