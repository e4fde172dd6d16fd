"""The steps of which a request consists, and the two ways to take them: a thread that waits, and an event loop.

The course of a request (wait for memory, encode, send, wait and try again, register anew, read) is written once, as a
generator of steps that returns the result. A step that fails raises in the generator, where ``finally`` cleans up; no
step is taken there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rsrv.client.connection import Connection
    from rsrv.core.shm.pool import BufferPool
    from rsrv.core.shm.slot import PoolSlot

T = TypeVar("T")


class Step(Protocol):
    """Something that takes time; its outcome is sent into the generator that asked for it."""

    def take(self) -> Any: ...
    async def atake(self) -> Any: ...


Steps: TypeAlias = Generator[Step, Any, T]


@dataclass(slots=True)  # not frozen: that would make it three times as slow to make
class Call:
    """A unary call: gives the bytes of the answer. `timeout` is in seconds, None for no limit."""

    connection: Connection
    method: str
    body: bytes
    timeout: float | None

    def take(self) -> bytes:
        return self.connection.call(self.method, self.body, self.timeout)

    async def atake(self) -> bytes:
        return await self.connection.acall(self.method, self.body, self.timeout)


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for some seconds."""

    seconds: float

    def take(self) -> None:
        time.sleep(self.seconds)

    async def atake(self) -> None:
        import asyncio

        await asyncio.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Aside:
    """Work that blocks for a while, rare or long: gives what `work` returns. An event loop does it in a thread."""

    work: Callable[[], Any]

    def take(self) -> Any:
        return self.work()

    async def atake(self) -> Any:
        import asyncio

        return await asyncio.to_thread(self.work)


@dataclass(frozen=True, slots=True)
class Work:
    """A step that runs the user's code, or copies much: an event loop does it in a thread and, even when it is
    cancelled, waits for its end, since the memory that it uses must not go to somebody else before."""

    work: Callable[[], Any]

    def take(self) -> Any:
        try:
            return self.work()
        except StopIteration as error:  # which would mean the end of the steps, and has no place in a future
            wrong = RuntimeError("encode_chunk or decode_chunk raised StopIteration")
            for note in getattr(error, "__notes__", ()):
                wrong.add_note(note)
            raise wrong from error

    async def atake(self) -> Any:
        import asyncio
        from contextvars import copy_context

        # A future, not a task, which everybody can cancel: asyncio.run does so at its end.
        end = asyncio.get_running_loop().run_in_executor(None, copy_context().run, self.take)
        try:
            return await asyncio.shield(end)
        except asyncio.CancelledError:
            while not end.done():
                try:
                    await asyncio.wait((end,))
                except asyncio.CancelledError:
                    continue
            if not end.cancelled():
                end.exception()  # looked at, or the loop would complain that nobody did
            raise


@dataclass(frozen=True, slots=True)
class Lend:
    """Wait for a slot of `span` adjacent ones; `deadline` as in `BufferPool.acquire`."""

    pool: BufferPool
    span: int
    deadline: float | None

    def take(self) -> PoolSlot:
        return self.pool.acquire(self.span, self.deadline)

    async def atake(self) -> PoolSlot:
        return await self.pool.aacquire(self.span, self.deadline)


def run(steps: Steps[T]) -> T:
    """Take `steps` one after another in this thread; returns the result, or raises what the generator raises."""
    try:
        step = next(steps)
        while True:
            try:
                outcome = step.take()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result


async def arun(steps: Steps[T]) -> T:
    """Like `run` on the running event loop. Cancelling it raises CancelledError in the generator."""
    try:
        step = next(steps)
        while True:
            try:
                outcome = await step.atake()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
