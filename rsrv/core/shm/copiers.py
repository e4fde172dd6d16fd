"""Threads that lend a hand with large copies out of shared memory: one alone reads 3 GB/s, and memory gives more."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count

LEAST_BYTES = 4 << 20
"""Smaller copies are over before another thread has woken up."""
PART_BYTES = 512 << 10
_MOST_THREADS = 3
"""Beside the one that wants the copy. Four read what a memory channel or two give."""

Fill = Callable[[int, memoryview], None]
"""(start, target): fill `target` with what lies at `start` of the source. Lets other threads run meanwhile."""


class Copiers:
    """Thread safe. `threads` is how many help, by default one less than there are processors, three at most."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1) if threads is None else threads
        # Its threads are started when they are first needed.
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="rsrv-copy") if self._threads else None

    def copy(self, fill: Fill, target: memoryview) -> None:
        """Fill all of `target`, bytes, by calls of `fill` on this thread and on others that have nothing else to do.

        This thread takes part after part until none is left, so one that gets no processor holds nothing up but the
        part that it is at. Raises what `fill` raises first; nobody writes into `target` any more then.
        """
        pool = self._pool
        if pool is None or len(target) < LEAST_BYTES:
            fill(0, target)
            return
        starts = count(0, PART_BYTES)
        failed = False

        def work() -> None:
            nonlocal failed
            try:
                while not failed and (start := next(starts)) < len(target):
                    fill(start, target[start : start + PART_BYTES])
            except BaseException:
                failed = True
                raise

        def help_out(over: Future[None]) -> None:
            if over.set_running_or_notify_cancel():
                try:
                    work()
                except BaseException as error:
                    over.set_exception(error)
                else:
                    over.set_result(None)

        # Not the pool's own futures: when it cannot start a thread, `submit` raises and leaves the task in its queue,
        # where another thread may find it.
        helping: list[Future[None]] = [Future() for _ in range(min(self._threads, len(target) // LEAST_BYTES))]
        try:
            with suppress(RuntimeError):  # no thread can be started, or the pool was closed meanwhile: then alone
                for over in helping:
                    pool.submit(help_out, over)
            work()
        finally:
            begun = [over for over in helping if not over.cancel()]
            errors = [over.exception() for over in begun]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads when they are done with what they are at. Whoever copies later does so alone."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)
