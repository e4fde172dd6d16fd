"""Models that are being prepared while the server runs, and those who want to know what becomes of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from rsrv.core.errors import ModelUnloaded, RsrvError, ServerStopping
from rsrv.serve.loading.steps import Steps
from rsrv.serve.registry import Entry, ModelState

if TYPE_CHECKING:
    from rsrv.serve.loading import Loader
    from rsrv.serve.registry import Registry
    from rsrv.serve.retirement import Retirements

log = logging.getLogger(__name__)

Settled = Future[Entry]
"""What a preparation ends with: the entry that is ready, or why it is not."""

_NOT_GONE = tuple(state for state in ModelState if state is not ModelState.RELEASE_FAILED)


class Posts:
    """Runs small things on a thread of its own, for those who hold locks that must not be held meanwhile."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rsrv-registrations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, post: Callable[[], object]) -> None:
        self._queue.put(post)

    def close(self) -> None:
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (post := self._queue.get()) is not None:
            try:
                post()
            except Exception:
                log.exception("registrations could not be looked through")


class Preparations:
    """Thread safe. `on_end` is told of each entry whose preparation, begun here, has ended, and must be quick."""

    def __init__(
        self,
        registry: Registry,
        loader: Loader,
        retirements: Retirements,
        threads: ThreadPoolExecutor,
        posts: Posts,
        *,
        on_end: Callable[[Entry], None],
        stopping: threading.Event,
    ) -> None:
        self._registry = registry
        self._loader = loader
        self._retirements = retirements
        self._threads = threads
        self._posts = posts
        self._on_end = on_end
        self._stopping = stopping
        self._lock = threading.Lock()
        self._underway: set[int] = set()
        # By incarnation: who wants to know when it is prepared, and who when it is gone.
        self._settling: dict[int, Settled] = {}
        self._leaving: dict[int, Future[None]] = {}
        self._closed = False

    def begin(self, entry: Entry) -> Settled:
        """Prepare `entry`, whose state says so already."""
        settled = self.settled(entry)
        with self._lock:
            self._underway.add(entry.incarnation)
        begin(self._threads, settled, self._run, entry)
        return settled

    def settled(self, entry: Entry) -> Settled:
        """The outcome of the preparation that `entry` is in; of one that is not in any, what it is."""
        if entry.state is not ModelState.PREPARING:
            return _resolve(Future(), entry)
        return self._await(self._settling, entry)

    def ended(self, entry: Entry) -> None:
        """`entry`, which is prepared or has failed, is told to all who wait for that. Must come before the name is
        prepared once more: then nobody finds this incarnation any longer. On any thread, with any lock."""
        with self._lock:
            first = entry.incarnation in self._underway
            self._underway.discard(entry.incarnation)
            settled = self._settling.pop(entry.incarnation, None)
        if first:
            self._on_end(entry)
        if settled is not None:
            self._posts.put(lambda: _resolve(settled, entry))

    def gone(self, entry: Entry) -> Future[None]:
        """Done when `entry` is removed; fails when it cannot be."""
        return self._await(self._leaving, entry)

    def _await(self, where: dict[int, Future[Any]], entry: Entry) -> Future[Any]:
        with self._lock:
            awaited = where.setdefault(entry.incarnation, Future())
            if self._closed:
                refuse(awaited, ServerStopping("the server is stopping"))
        # It may have happened between the look at the entry and now.
        self._posts.put(self._look)
        return awaited

    def entry_changed(self) -> None:
        """The registry changed. On any thread, with any lock."""
        if self._settling or self._leaving:
            self._posts.put(self._look)

    def _look(self) -> None:
        # An entry that goes takes its account and its counters along, under this lock: only then it is gone.
        with self._registry.changing:
            entries = {entry.incarnation: entry for entry in self._registry.entries()}
        with self._lock:
            prepared = _take(self._settling, entries, ModelState.PREPARING)
            gone = _take(self._leaving, entries, *_NOT_GONE)
        for settled, entry in prepared:
            _resolve(settled, entry)
        for ended, entry in gone:
            if entry is not None:
                refuse(ended, entry.unavailable())
            elif not ended.done():
                ended.set_result(None)

    def close(self) -> None:
        """Refuse all who wait, and all to come."""
        with self._lock:
            self._closed = True
            open_: list[Future[Any]] = [*self._settling.values(), *self._leaving.values()]
            self._settling, self._leaving = {}, {}
        for settled in open_:
            refuse(settled, ServerStopping("the server is stopping"))

    def _run(self, entry: Entry) -> None:
        try:
            # An incarnation that failed may still hold the name in the scheduler.
            self._retirements.wait(entry.name, Steps(self._stopping, entry.dropped).require_running)
            self._loader.load(entry)
            now = self._registry.get(entry.name)
            if now is not None and now.incarnation == entry.incarnation and now.state is not ModelState.PREPARING:
                self.ended(now)
        except RsrvError:
            pass
        finally:
            with self._lock:
                self._underway.discard(entry.incarnation)


def begin(threads: ThreadPoolExecutor, settled: Future[Any], work: Callable[..., None], *args: Any) -> None:
    """Have `work` done on `threads`; `settled` is refused when they are closed before its turn."""
    stopping = ServerStopping("the server is stopping")
    try:
        begun = threads.submit(work, *args)
    except RuntimeError:  # closed
        refuse(settled, stopping)
    else:
        begun.add_done_callback(lambda begun: refuse(settled, stopping) if begun.cancelled() else None)


def refuse(settled: Future[Any], error: BaseException) -> None:
    if not settled.done():
        settled.set_exception(error)


def copy(outcome: Settled, to: Settled) -> None:
    """Resolve `to` as `outcome`, which is done."""
    error = outcome.exception()
    if error is not None:
        refuse(to, error)
    elif not to.done():
        to.set_result(outcome.result())


def _take(
    awaited: dict[int, Future[Any]], entries: Mapping[int, Entry], *not_yet: ModelState
) -> list[tuple[Future[Any], Entry | None]]:
    """Remove those that wait no longer, with what became of the entry; None = it is not there any more."""
    ended = []
    for incarnation in [*awaited]:
        entry = entries.get(incarnation)
        if entry is None or entry.state not in not_yet:
            ended.append((awaited.pop(incarnation), entry))
    return ended


def _resolve(settled: Settled, entry: Entry | None) -> Settled:
    if entry is None or entry.gate == "removing":
        refuse(settled, ModelUnloaded("the model was removed while it was being prepared"))
    elif entry.failure is not None:
        refuse(settled, entry.unavailable())
    elif not settled.done():
        settled.set_result(entry)
    return settled
