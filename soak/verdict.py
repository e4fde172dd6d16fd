"""What has to be true at the end of a soak."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from soak.vitals import MIB, growth

if TYPE_CHECKING:
    from rsrv.core.status import WorkerStatus
    from soak.run import Record

GROWTH_BYTES = 16 * MIB
"""That the server's memory may grow by: allocators and interpreters settle for a while, whatever the duration."""
GRPC_THREADS = frozenset({"event_engine"})
"""Names of threads that gRPC starts and ends as it likes, a few at most."""
SETTLE = 0.25
"""Share of the time before memory is looked at."""

_HOOK_ERRORS = re.compile(r"hook failed model=(hooked|apart)|hook process|marked to fail")


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    found: str


def judge(record: Record) -> list[Check]:
    return list(_checks(record))


def _checks(record: Record) -> Iterator[Check]:
    status, before, after = record.status, record.before, record.after
    answered = sum(n for outcome, n in record.outcomes.items() if outcome.split()[-1] == "OK")
    yield Check("every outcome is a right one", not record.problems, f"{len(record.problems)} problems")
    yield Check("every kind of request was there", len(_kinds(record)) >= 18, f"{len(_kinds(record))} kinds")
    counted = sum(record.outcomes.values())
    lost = record.survivors_started - min(record.survivors_ended, counted)
    yield Check(
        "every request has one outcome",
        lost == 0 and counted == record.survivors_ended == record.survivors_started,
        f"{record.survivors_started} started, {record.survivors_ended} ended, {counted} outcomes",
    )
    handled = sum(sum(model.counters.requests.values()) for model in status.models if model.counters)
    served_ok = sum(model.counters.requests.get("OK", 0) for model in status.models if model.counters)
    yield Check(
        "the server counted what the clients did",
        answered <= served_ok and handled <= record.started + record.extra,
        f"{answered} answers received, {served_ok} given; {handled} of {record.started} requests handled",
    )
    queued, in_flight = _waiting(status)
    yield Check("queues are empty", queued == 0, f"{queued} requests")
    yield Check(
        "nothing is in flight",
        in_flight == 0 and status.server.inflight == 0,
        f"{status.server.inflight} calls, {in_flight} batches",
    )
    unready = [model.name for model in status.models if model.state != "ready"]
    yield Check("all models serve", not unready and status.server.ready, ", ".join(unready) or "ready")
    settled = record.samples[int(SETTLE * len(record.samples)) :]
    grown = growth(settled)
    yield Check(
        "memory at work is flat",
        grown <= GROWTH_BYTES,
        f"{grown / MIB:+.1f} MiB by trend in {settled[-1][0] - settled[0][0] if settled else 0:.0f} s",
    )
    rest = after.rss - before.rss
    yield Check(
        "memory at rest is what it was",
        rest <= GROWTH_BYTES,
        f"{rest / MIB:+.1f} MiB, {before.rss / MIB:.0f} to {after.rss / MIB:.0f} MiB",
    )
    yield Check(
        "descriptors are what they were",
        after.fds <= before.fds,
        f"{before.fds} to {after.fds} {dict(after.files - before.files) or ''}",
    )
    more = after.tasks - before.tasks
    own = [name for name in more if name not in GRPC_THREADS]
    yield Check("threads are what they were", not own, f"{before.threads} to {after.threads} {dict(more) or ''}")
    yield Check(
        "child processes are what they were",
        after.children == before.children,
        f"{before.children} to {after.children}",
    )
    if record.cache is not None:
        cache = record.cache
        yield Check(
            "weights came and went within the budget",
            cache.evictions > 0 and cache.resident <= cache.budget,
            f"{cache.loads} loads in {cache.load_seconds:.1f} s, {cache.evictions} evictions; "
            f"{cache.resident} of {cache.budget} bytes resident",
        )
    if record.vandal is not None:
        missed = record.vandal.unnoticed
        yield Check("lost weights were noticed", not missed, ", ".join(missed) or "all of them")
    left = record.left_in_shared_memory
    yield Check("nothing is left in /dev/shm", not left, ", ".join(left) or "nothing")
    yield Check("SIGTERM ends the server with 0", record.exit_code == 0, str(record.exit_code))
    faults = [line for line in record.log if _is_fault(line)]
    yield Check("the log has no fault of the server", not faults, "; ".join(faults[:3]) or "none")


def _waiting(status: WorkerStatus) -> tuple[int, int]:
    queues = [model.queue for model in status.models if model.queue]
    return sum(queue.requests for queue in queues), sum(queue.inflight_batches for queue in queues)


def _kinds(record: Record) -> set[str]:
    return {outcome.rsplit(" ", 1)[0] for outcome in record.outcomes}


def _is_fault(line: str) -> bool:
    """An error in the log that is not the one of a hook that was told to fail."""
    return re.search(r"\b(ERROR|CRITICAL)\b", line) is not None and not _HOOK_ERRORS.search(line)
