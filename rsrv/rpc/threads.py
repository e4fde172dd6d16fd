"""The threads of the grpcio engine: a pool that is quicker than `ThreadPoolExecutor` and prefers warm threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple[Callable[..., Any], tuple[Any, ...]]

_LAST_CHANCE_SECONDS = 0.5

log = logging.getLogger(__name__)


class CallThreads(futures.Executor):
    """Up to `size` daemon threads, started when needed; the thread that became idle last gets the next task.

    grpcio asks little of its pool: `submit`, and of the future only ``add_done_callback`` to count calls, which it
    does for a limit that we do not use. So no real future is made, which saves a fifth of the CPU of a small call.

    A task of grpcio's begins by waiting for the request's message, for as long as the client likes. So that clients who
    send none cannot hold all threads, tasks that have waited for longer than `body_seconds` are cancelled when another
    one finds no thread.
    """

    def __init__(self, size: int, *, name: str) -> None:
        self._size = size
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._backlog: deque[tuple[_Task, float]] = deque()  # with the time since when it waits
        self._closed = False
        self._current = threading.local()
        self.shutdown_seconds = 5.0
        self.body_seconds = 10.0

    @property
    def size(self) -> int:
        """How many threads exist now."""
        return len(self._workers)

    def grow(self, size: int) -> None:
        """Allow `size` threads from now on, and begin what waits for one; a smaller number than before is ignored."""
        with self._lock:
            self._size = max(size, self._size)
            while self._backlog and len(self._workers) < self._size and not self._closed:
                self._started().tasks.put(self._backlog.popleft()[0])

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        task = (partial(fn, **kwargs) if kwargs else fn, args)
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine has stopped")
            if self._idle:
                worker = self._idle.pop()
            elif len(self._workers) < self._size:
                worker = self._started()
            else:
                self._backlog.append((task, monotonic()))
                self._cancel_silent_calls()
                return _UNUSED
        worker.tasks.put(task)
        return _UNUSED

    def message_arrived(self) -> None:
        """Say that the present task of this thread, one of the pool's, has its request and waits for no client."""
        self._current.worker.waiting_since = 0.0

    def afterwards(self, fn: Callable[[], object]) -> None:
        """Run `fn` on this thread, one of the pool's, when its present task is over."""
        self._current.worker.afterwards.append(fn)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads. One that is stuck in a handler is left behind after `shutdown_seconds`, as a daemon."""
        with self._lock:
            self._closed = True
            self._backlog.clear()
            workers = list(self._workers)
        for worker in workers:
            worker.tasks.put(None)
        deadline = monotonic() + self.shutdown_seconds
        for worker in workers:
            worker.join(max(deadline - monotonic(), 0.0) if wait else 0.0)
        stuck = [worker.name for worker in workers if worker.is_alive()]
        if stuck and wait:
            log.warning("threads left behind count=%d names=%s", len(stuck), ",".join(stuck))

    def next_task(self, worker: _Worker) -> _Task | None:
        """The task that has waited longest, or None after noting that `worker` is idle."""
        with self._lock:
            if self._backlog:
                task, queued = self._backlog.popleft()
                # Its message had all that time to arrive, and is here at once if it has.
                worker.waiting_since = max(queued, monotonic() - self.body_seconds + _LAST_CHANCE_SECONDS)
                return task
            self._idle.append(worker)
            return None

    def _started(self) -> _Worker:
        """A new thread. Under the lock."""
        worker = _Worker(self, f"{self._name}-{len(self._workers)}")
        self._workers.append(worker)
        worker.start()
        return worker

    def _cancel_silent_calls(self) -> None:
        """Under the lock."""
        latest = monotonic() - self.body_seconds
        silent = [worker for worker in self._workers if 0.0 < worker.waiting_since <= latest]
        for worker in silent:
            worker.waiting_since = 0.0
            _cancel(worker.task)
        if silent:
            log.warning("calls without a message cancelled count=%d seconds=%g", len(silent), self.body_seconds)

    def adopt(self, worker: _Worker) -> None:
        """Make `worker`, on whose thread this is called, the one that `afterwards` speaks to."""
        self._current.worker = worker


class _Worker(threading.Thread):
    def __init__(self, pool: CallThreads, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self.afterwards: list[Callable[[], object]] = []
        self.task: _Task | None = None
        self.waiting_since = 0.0
        self._pool = pool

    def run(self) -> None:
        self._pool.adopt(self)
        task = self.tasks.get()
        while task is not None:
            self.task = task
            self.waiting_since = self.waiting_since or monotonic()
            _guarded(task[0], *task[1])
            self.waiting_since = 0.0
            while self.afterwards:
                _guarded(self.afterwards.pop(0))
            task = self.task = None  # a request's body must not live until the next request comes
            task = self._pool.next_task(self) or self.tasks.get()


def _cancel(task: _Task | None) -> None:
    """Cancel the RPC of a task: grpcio passes a function of its own, the event with which the RPC came, and more."""
    event = task[1][1] if task is not None and len(task[1]) > 1 else None
    call = getattr(event, "call", None)
    if call is not None:
        call.cancel()


def _guarded(fn: Callable[..., object], *args: Any) -> None:
    try:
        fn(*args)
    except BaseException:  # this thread is for everybody's calls, so it survives all of them
        log.exception("unexpected error on an engine thread")


class _Unused(futures.Future[Any]):
    def add_done_callback(self, fn: Callable[[futures.Future[Any]], object]) -> None:
        """Nobody waits for an RPC through its future."""


_UNUSED: futures.Future[Any] = _Unused()
