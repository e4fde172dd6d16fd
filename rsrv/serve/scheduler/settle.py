"""From a batch that ran, or could not, to what each of its requests is told and what is counted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rsrv.core.errors import DeviceError, RsrvError
from rsrv.serve.scheduler.batch import split
from rsrv.serve.scheduler.queue import Result, Ticket
from rsrv.serve.scheduler.stats import reason_of

if TYPE_CHECKING:
    import numpy as np

    from rsrv.serve.scheduler.batch import Batch

logger = logging.getLogger(__name__)

Settled = list[tuple[Ticket, Result]]
Replies = list[dict[str, "np.ndarray"]]


def cut(batch: Batch) -> Replies:
    """The outputs of each request. Empty when there are none; results that are not as declared become `batch.error`."""
    if batch.error is not None:
        logger.log(
            logging.WARNING if isinstance(batch.error, RsrvError) else logging.ERROR,
            "dispatch failed model=%s key=%d requests=%d",
            batch.queue.model.name,
            batch.batch_key,
            len(batch.live),
            exc_info=batch.error,
        )
    elif batch.outputs is not None:
        try:
            return split(batch.queue.model, batch.outputs, [ticket.rows for ticket in batch.tickets], batch.batch_key)
        except DeviceError as mismatch:
            batch.error = mismatch
    return []


def discard(batch: Batch, error: BaseException) -> None:
    """Whatever became of `batch`, its requests end with `error`."""
    batch.outputs, batch.error = None, error


def may_retry(batch: Batch) -> bool:
    """One bad request must not fail its neighbours; but what a broken device fails, it would fail again."""
    return len(batch.tickets) > 1 and not isinstance(batch.error, DeviceError)


def count(batch: Batch) -> None:
    """Count what became of `batch`. The lock is held."""
    counters, key, dropped = batch.queue.counters, batch.batch_key, batch.dropped
    if dropped:
        for verdict in dropped.values():
            counters.dropped[verdict.reason] += 1
    if batch.error is not None:
        counters.errors[reason_of(batch.error)] += 1
    elif batch.outputs is not None:
        launched, rows = batch.launched_ns, batch.live_rows
        waits = [launched - ticket.enqueued_ns for ticket in batch.live]
        counters.record(key, rows, key - rows if key else 0, batch.compute_ns, waits)


def results(batch: Batch, replies: Replies, *, retried: bool) -> Settled:
    """What each request is told; those that are `retried` are told nothing yet."""
    launched, compute, key, rows = batch.launched_ns, batch.compute_ns, batch.batch_key, batch.live_rows
    upload, download = batch.upload_ns, batch.download_ns
    error, dropped = batch.error, batch.dropped
    if error is None and not dropped:
        return [
            (ticket, Result(reply, None, launched - ticket.enqueued_ns, compute, key, rows, upload, download))
            for ticket, reply in zip(batch.tickets, replies, strict=True)
        ]
    settled: Settled = []
    for position, ticket in enumerate(batch.tickets):
        waited = max(launched - ticket.enqueued_ns, 0)
        if dropped and position in dropped:
            settled.append((ticket, Result(error=dropped[position].error, queue_ns=waited)))
        elif error is None:
            settled.append((ticket, Result(replies[position], None, waited, compute, key, rows, upload, download)))
        elif not retried:
            settled.append((ticket, Result(None, error, waited, compute, key, rows)))
    return settled
