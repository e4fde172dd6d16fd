"""What several workers say, as one server would say it: pure functions over their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from rsrv.core.wire import encode_index
from rsrv.gateway.workers.outcome import Outcome
from rsrv.protos import inference as pb

READY, UNAVAILABLE = "READY", "UNAVAILABLE"


def read(kind: Any, outcomes: Mapping[str, Outcome]) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers that are messages of the class `kind`, and what became of the other calls; both by worker."""
    answers: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for url, outcome in outcomes.items():
        if not outcome.ok:
            failures[url] = outcome.text or outcome.code.name
            continue
        try:
            answers[url] = kind.FromString(outcome.body)
        except DecodeError:
            failures[url] = f"it answers with {len(outcome.body)} bytes that are no {kind.DESCRIPTOR.full_name}"
    return answers, failures


def union_of_indexes(answers: Mapping[str, pb.RepositoryIndexResponse], name_of: Callable[[str], str]) -> Any:
    """Every model that some worker lists, sorted by name; READY if it is READY anywhere.

    The reason of a READY model is the first of its READY rows that has one, by worker's address. Of another one it is
    what all workers give, or who gives which.
    """
    rows: dict[str, list[tuple[str, Any]]] = {}
    for url in sorted(answers):
        for row in answers[url].models:
            rows.setdefault(row.name, []).append((url, row))
    merged = []
    for name in sorted(rows):
        ready = [row.reason for _, row in rows[name] if row.state == READY]
        if ready:
            merged.append((name, READY, next((reason for reason in ready if reason), "")))
            continue
        reasons = {url: row.reason for url, row in rows[name] if row.reason}
        texts = sorted(set(reasons.values()))
        if len(texts) > 1:
            texts = [f"{name_of(url)}: {reason}" for url, reason in reasons.items()]
        merged.append((name, UNAVAILABLE, "; ".join(texts)))
    return encode_index(merged)


def sum_of_statistics(answers: Mapping[str, pb.ModelStatisticsResponse]) -> pb.ModelStatisticsResponse:
    """One row per model and version, sorted; counters are summed, `last_inference` is the latest."""
    rows: dict[tuple[str, str], Any] = {}
    for url in sorted(answers):
        for row in answers[url].model_stats:
            known = rows.get((row.name, row.version))
            if known is None:
                rows[row.name, row.version] = row
            else:
                _add(known, row)
    return pb.ModelStatisticsResponse(model_stats=[rows[key] for key in sorted(rows)])


def _add(row: Any, more: Any) -> None:
    row.last_inference = max(row.last_inference, more.last_inference)
    row.inference_count += more.inference_count
    row.execution_count += more.execution_count
    _add_durations(row.inference_stats, more.inference_stats)
    by_size = {batch.batch_size: batch for batch in row.batch_stats}
    for batch in more.batch_stats:
        if batch.batch_size in by_size:
            _add_durations(by_size[batch.batch_size], batch)
        else:
            row.batch_stats.append(batch)


def _add_durations(row: Any, more: Any) -> None:
    for field, duration in more.ListFields():
        if field.message_type is not None:
            total = getattr(row, field.name)
            total.count += duration.count
            total.ns += duration.ns
