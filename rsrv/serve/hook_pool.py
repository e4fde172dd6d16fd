"""A pool of threads for user code that may hang: a job past its time limit is answered, its thread is written off."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from rsrv.core.errors import DeadlineExceeded, HookError, RsrvError, ServerStopping

log = logging.getLogger(__name__)

_HEAP_SLACK = 256


class Job:
    """One piece of user code for `HookPool`.

    Args:
        run: the work.
        done: called once with (value, None) or (None, error), on the pool's thread, or on its watch when `run` is late.
        what: for messages ("hook preprocess of model 'm'").
        timeout: seconds that `run` may take; past them its thread is written off and `lost` is called. None = no limit.
        deadline_ns: absolute monotonic time after which nobody waits for the answer, 0 = none. Passing it costs no
            thread: a client must not be able to use up threads by asking for little time.
        lost: called after a thread was written off.
    """

    __slots__ = ("answered", "deadline_ns", "done", "lost", "run", "timeout", "what")

    def __init__(
        self,
        run: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        *,
        what: str,
        timeout: float | None = None,
        deadline_ns: int = 0,
        lost: Callable[[], None] | None = None,
    ) -> None:
        self.run = run
        self.done = done
        self.what = what
        self.timeout = timeout
        self.deadline_ns = deadline_ns
        self.lost = lost
        self.answered = False


def _matters(due_ns: int, number: int, job: Job, worker: _Worker | None) -> bool:
    """A job whose deadline has passed is answered, but while it runs its thread still has a time limit."""
    return not job.answered or (worker is not None and worker.job is job)


def _spent(*_: Any) -> None:
    """In the place of what an answered job no longer needs."""


class _Worker:
    __slots__ = ("job", "thread", "written_off")

    def __init__(self) -> None:
        self.job: Job | None = None
        self.thread: threading.Thread | None = None
        self.written_off = False


class HookPool:
    """At most `size` threads that count, started as they are needed. All methods are thread safe."""

    def __init__(self, size: int, *, name: str = "rsrv-hook") -> None:
        self.size = size
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._outstanding = 0
        self._closed = False
        self._end: RsrvError = ServerStopping("the server is stopping")
        self._names = itertools.count()
        # The watch: (due in ns, tie break, job, worker whose thread is written off then, or None for a deadline).
        self._due: list[tuple[int, int, Job, _Worker | None]] = []
        self._watched = 0
        self._changed = threading.Condition(self._lock)
        self._watch: threading.Thread | None = None
        self.lost_threads = 0

    def submit(self, job: Job) -> None:
        """Queue a job. A closed pool answers it at once."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._outstanding += 1
                if self._outstanding > len(self._workers) and len(self._workers) < self.size:
                    self._start_worker()
                if job.deadline_ns:
                    self._watch_over(job.deadline_ns, job, None)
                self._jobs.put(job)
        if closed:
            self._answer(job, None, self._end)

    def close(self, timeout: float = 1.0, *, error: RsrvError | None = None) -> None:
        """End the threads; one that still runs user code is left behind. Jobs that are queued, and new ones, are
        answered with `error`, ServerStopping by default."""
        with self._lock:
            if self._closed:
                return
            self._end = error or self._end
            self._closed = True
            workers, watch = list(self._workers), self._watch
            self._changed.notify_all()
        for _ in workers:
            self._jobs.put(None)
        until = time.monotonic() + timeout
        for worker in workers:
            if worker.thread is not None:
                worker.thread.join(max(0.0, until - time.monotonic()))
        if watch is not None:
            watch.join()

    # All below: `_lock` is held where the docstring says so.

    def _start_worker(self) -> None:
        """Under the lock."""
        worker = _Worker()
        # Daemon: user code that never returns must not keep the process alive.
        worker.thread = threading.Thread(
            target=self._work, args=(worker,), name=f"{self._name}-{next(self._names)}", daemon=True
        )
        self._workers.add(worker)
        worker.thread.start()

    def _work(self, worker: _Worker) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                skip = job.answered
                stopping = self._closed
                if skip or stopping:
                    self._outstanding -= 1
                else:
                    worker.job = job
                    if job.timeout is not None:
                        self._watch_over(time.monotonic_ns() + int(job.timeout * 1e9), job, worker)
            if skip:
                continue
            if stopping:
                self._answer(job, None, self._end)
                continue
            value: Any = None
            error: BaseException | None = None
            try:
                value = job.run()
            except BaseException as raised:
                error = raised
            with self._lock:
                if worker.written_off:
                    return
                worker.job = None
                self._outstanding -= 1
            self._answer(job, value, error)
            job = value = error = None  # a thread that waits holds no tensors

    def _answer(self, job: Job, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if job.answered:
                return
            job.answered = True
            done = job.done
            # The watch keeps a job until its time limit has passed; the tensors of its request need not wait for that.
            job.run = job.done = _spent
        try:
            done(value, error)
        except BaseException:
            log.exception("answer of a hook could not be delivered job=%s", job.what)

    def _watch_over(self, due_ns: int, job: Job, worker: _Worker | None) -> None:
        """Under the lock."""
        due = self._due
        if len(due) > 2 * self._outstanding + _HEAP_SLACK:
            due[:] = [entry for entry in due if _matters(*entry)]
            heapq.heapify(due)
        self._watched += 1
        heapq.heappush(due, (due_ns, self._watched, job, worker))
        if self._watch is None:
            self._watch = threading.Thread(target=self._watch_loop, name="rsrv-hook-watch", daemon=True)
            self._watch.start()
        elif due[0][2] is job:
            self._changed.notify_all()

    def _watch_loop(self) -> None:
        while True:
            with self._lock:
                while not self._closed:
                    if not self._due:
                        self._changed.wait()
                        continue
                    wait_ns = self._due[0][0] - time.monotonic_ns()
                    if wait_ns <= 0:
                        break
                    self._changed.wait(min(wait_ns / 1e9, threading.TIMEOUT_MAX))
                if self._closed:
                    return
                _, _, job, worker = heapq.heappop(self._due)
                hung = worker is not None and worker.job is job
                if hung and worker is not None:
                    worker.written_off = True
                    self._workers.discard(worker)
                    self._outstanding -= 1
                    self.lost_threads += 1
                    if self._outstanding > len(self._workers):
                        self._start_worker()
            if hung:
                log.error("hook thread written off job=%s timeout_seconds=%s", job.what, job.timeout)
                self._answer(job, None, HookError(f"{job.what} did not return within {job.timeout:g} s"))
                if job.lost is not None:
                    job.lost()
            elif worker is None:
                self._answer(job, None, DeadlineExceeded(f"the deadline passed before {job.what} returned"))
