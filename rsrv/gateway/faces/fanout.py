"""One call to several workers at once. Nothing waits: what is to happen with the outcomes is a continuation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rsrv.core.errors import Code
from rsrv.gateway.workers.outcome import Outcome

if TYPE_CHECKING:
    from rsrv.gateway.workers.hops import Metadata
    from rsrv.gateway.workers.worker import Worker

log = logging.getLogger(__name__)

Outcomes = dict[str, Outcome]
"""Worker's address → how its call ended, in the order in which they ended."""

Done = Callable[[Outcome], None]


def fan_out(
    workers: Sequence[Worker],
    path: str,
    body: bytes,
    timeout: float,
    on_all: Callable[[Outcomes], None],
    metadata: Metadata = (),
) -> None:
    """Call `path` of every worker with the same bytes; `timeout` is in seconds, for each. See `gather`."""
    gather(workers, lambda worker, done: worker.call(path, body, timeout=timeout, metadata=metadata, done=done), on_all)


def gather(
    workers: Sequence[Worker], send: Callable[[Worker, Done], object], on_all: Callable[[Outcomes], None]
) -> None:
    """Start one call to each worker with `send`, which is given what the call's end is to be told to.

    `on_all` runs once, on the thread on which the last call ended; at once without workers. What it raises is logged.
    """
    outcomes: Outcomes = {}
    lock = threading.Lock()

    def ended(worker: Worker, outcome: Outcome) -> None:
        with lock:
            outcomes[worker.url] = outcome
            last = len(outcomes) == len(workers)
        if last:
            conclude()

    def conclude() -> None:
        try:
            on_all(outcomes)
        except Exception:
            log.exception("what follows a call to %d workers failed", len(workers))

    if not workers:
        conclude()
    for worker in workers:
        send(worker, lambda outcome, worker=worker: ended(worker, outcome))  # type: ignore[misc]


def unanswered(outcome: Outcome) -> bool:
    """Whether the worker said nothing: it is away, or hangs, or its channel was closed under the call."""
    silent = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED)
    return outcome.code in silent and not outcome.reason
